"""What blocks share: gated residuals and the modulated norm behind them, and an MLP with gate and residual."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe import ops
from gpupipe.train import switches
from gpupipe.train.fused import Fused, is_fused
from gpupipe.train.parts.mlps import FusedMLP
from gpupipe.train.parts.norms import eps_for, norm_kind
from gpupipe.train.parts.probe import silent


class FusedBlock(Fused):
    """A block of a transformer: residuals, gates and norms between what it calls."""

    kind = "block"
    whole = False


def norms_of(module: Any, *names: str) -> dict[str, str] | None:
    """Which norm each of these is; None if one is none of ours."""
    kinds = {name: norm_kind(getattr(module, name, None)) for name in names}
    return None if None in kinds.values() else {name: str(kind) for name, kind in kinds.items()}


def normed(
    norm: Any, kind: Any, x: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """norm(x), modulated if there is a scale."""
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), eps_for(norm, x)
    if scale is not None:
        return ops.modulate_norm(x, scale, shift, weight, bias, kind=kind, eps=eps)
    return ops.layer_norm(x, weight, bias, eps=eps) if kind == "layer" else ops.rms_norm(x, weight, eps=eps)


def added(
    norm: Any,
    kind: Any,
    x: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + gate * branch, modulated if there is a scale, and that sum."""
    return ops.add_norm(
        x, branch.to(x.dtype), norm.weight, getattr(norm, "bias", None), gate=gate, scale=scale, shift=shift, kind=kind,
        eps=eps_for(norm, x),
    )  # fmt: skip


def gated(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """x + gate * branch."""
    return x + branch if gate is None else ops.bias_act_dropout_add(branch, residual=x, gate=gate)


def mlp_added(mlp: Any, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """x + gate * mlp(y): in the pass behind the second product where the MLP is fused and nobody watches it."""
    if is_fused(mlp) and isinstance(mlp, FusedMLP) and silent(mlp, *mlp.modules_within()) and _may(mlp):
        made = mlp.added(y, gate, x)
        if made is not NotImplemented:
            return made  # type: ignore[no-any-return]
    return gated(x, mlp(y), gate)


def _may(mlp: Any) -> bool:
    state = mlp.__dict__[switches.STATE]
    return state.on and switches.wanted(mlp.kind) and all(state.decided.values())
