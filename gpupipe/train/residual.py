"""The two halves of a transformer's block, for those who write their own: the fused ops between norms, branch and residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train.arguments import a_function, a_model, a_tensor, shown, without_scale
from gpupipe.train.fused import Left
from gpupipe.train.modules import Mlp
from gpupipe.train.parts.blocks import added, gated, mlp_added, normed
from gpupipe.train.parts.mlps import FusedMLP, recognise_mlp, run_mlp
from gpupipe.train.parts.norms import norm_kind

_KEPT = "_gpupipe_recognised"
"""The attribute of a module that keeps what it was recognised as."""


@overload
def residual_attention(
    x: torch.Tensor, norm: nn.Module, attention: Callable[..., torch.Tensor], *args: Any, then: None = None, **kwargs: Any
) -> torch.Tensor: ...
@overload
def residual_attention(
    x: torch.Tensor, norm: nn.Module, attention: Callable[..., torch.Tensor], *args: Any, then: nn.Module, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]: ...
def residual_attention(
    x: torch.Tensor,
    norm: nn.Module,
    attention: Callable[..., torch.Tensor],
    *args: Any,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    then: nn.Module | None = None,
    then_scale: torch.Tensor | None = None,
    then_shift: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x + gate * attention(norm(x) * (1 + scale) + shift), and perhaps the norm that follows, in the same pass as the sum.

    Args:
        x: (B, ..., H), the residual.
        norm: a layer norm or RMS norm over the last dimension, whoever wrote it.
        attention: what is called with the normalised x, and with all further arguments; it returns a tensor like x.
        gate, scale, shift: as in :func:`gpupipe.ops.modulate_norm`; None leaves them out.
        then: the norm of the second half.
        then_scale, then_shift: its modulation.

    Returns:
        The sum; with ``then`` its norm, for :func:`residual_mlp`, and the sum.

    Raises:
        ConfigError: for a norm that is none of ours.
        ShapeError: when a tensor does not fit x.
    """
    if scale is None:
        without_scale(shift=shift)
    if then is None or then_scale is None:
        without_scale(then_shift=then_shift)
    if then is None and then_scale is not None:
        raise ConfigError("then_scale without then", fix="give the norm of the second half as then")
    a_function(attention, "attention", "takes the normalised x, and returns a tensor like it")
    branch = a_tensor(attention(normed(norm, _norm(norm), x, scale, shift), *args, **kwargs), "what attention returns")
    if then is None:
        return gated(x, branch, gate)
    return added(then, _norm(then), x, branch, gate, then_scale, then_shift)


def residual_mlp(
    x: torch.Tensor,
    norm: nn.Module,
    mlp: nn.Module,
    *,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    normalised: torch.Tensor | None = None,
) -> torch.Tensor:
    """x + gate * mlp(norm(x) * (1 + scale) + shift), gate and sum in the pass behind the second product.

    Args:
        x: (B, ..., H), the residual.
        norm: a layer norm or RMS norm over the last dimension, whoever wrote it.
        mlp: two linear layers with an activation between them, whoever wrote it; any other module is called as it is.
        gate, scale, shift: as in :func:`gpupipe.ops.modulate_norm`; None leaves them out.
        normalised: norm(x), modulated, where :func:`residual_attention` has made it.

    Returns:
        The sum, like x.

    Raises:
        ConfigError: for a norm that is none of ours.
        ShapeError: when a tensor does not fit x.
    """
    a_model(mlp, "mlp")
    if scale is None and normalised is None:
        without_scale(shift=shift)
    y = normed(norm, _norm(norm), x, scale, shift) if normalised is None else normalised
    if isinstance(mlp, Mlp):
        return mlp(y, gate=gate, residual=x)  # type: ignore[no-any-return]
    if isinstance(mlp, FusedMLP):
        return mlp_added(mlp, y, x, gate)
    settings = _recognised(mlp, _mlp)
    made = NotImplemented if settings is None else run_mlp(mlp, settings, y, gate, x)
    return gated(x, mlp(y), gate) if made is NotImplemented else made  # type: ignore[no-any-return]


def _norm(norm: nn.Module) -> str:
    if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
        return "layer"
    if isinstance(norm, nn.RMSNorm) and len(norm.normalized_shape) == 1:
        return "rms"
    kind = _recognised(norm, norm_kind) if isinstance(norm, nn.Module) else None
    if kind is None:
        raise ConfigError(
            f"norm is {shown(norm)}, which is no layer norm or RMS norm over the last dimension",
            fix="call it yourself, and add",
        )
    return str(kind)


def _mlp(module: nn.Module) -> dict[str, Any] | None:
    try:
        return recognise_mlp(module)
    except Left:
        return None


def _recognised(module: nn.Module, by: Callable[[Any], Any]) -> Any:
    """What a module is, found out once."""
    if _KEPT not in module.__dict__:
        module.__dict__[_KEPT] = by(module)
    return module.__dict__[_KEPT]
