"""Layer norms and RMS norms over the last dimension, and group norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.ops.norms import Kind
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.probe import which_norm

_EPS = ("eps", "variance_epsilon")
"""What modules call the number that is added before the root."""
_USUAL = (1e-6, 1e-5, 1e-8)
"""What it is in most that have it in their code alone: told apart by what comes out of small inputs."""
_FOUND = "_gpupipe_eps"
"""The attribute of such a module that keeps which of these it was."""


def norm_kind(module: Any) -> Kind | None:
    """``"layer"`` or ``"rms"`` for a module that normalises the last dimension; None for any other."""
    if not isinstance(module, nn.Module) or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    names = set(module._parameters)
    size = norm_size(module) if names <= {"weight", "bias"} else None
    if size is None:
        return None
    if any(hasattr(module, name) for name in _EPS):
        return which_norm(module, size, norm_eps(module))
    for eps in _USUAL if names else ():
        if (found := which_norm(module, size, eps)) is not None:
            module.__dict__[_FOUND] = eps
            return found
    return None


def norm_size(module: Any) -> int | None:
    """Columns that a norm is over; None where it is not over one dimension."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight.numel() if weight.dim() == 1 else None
    for name in ("normalized_shape", "dim"):
        shape = getattr(module, name, None)
        if isinstance(shape, int):
            return shape
        if isinstance(shape, tuple) and len(shape) == 1:
            return int(shape[0])
    return None


def norm_eps(module: Any) -> float | None:
    """What is added before the root; None: the smallest step of the type, as ``torch.nn.RMSNorm`` has it."""
    found = next(getattr(module, name) for name in (*_EPS, _FOUND) if hasattr(module, name))
    return None if found is None else float(found)


def eps_for(module: Any, x: torch.Tensor) -> float:
    """What is added before the root for values of this type."""
    eps = norm_eps(module)
    return torch.finfo(x.dtype).eps if eps is None else eps


def promoted(x: torch.Tensor) -> torch.Tensor:
    """As autocast on a GPU has the input of norms: in float32."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and x.is_cuda and torch.is_autocast_enabled("cuda") else x


class FusedNorm(Fused):
    """A layer norm or RMS norm."""

    kind = "norm"
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            raise Left("it normalises over several dimensions")
        kind = norm_kind(module)
        return None if kind is None else {"norm": kind}

    def fused_forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        if rest or others:
            return NotImplemented
        x = promoted(x)
        if self.settings["norm"] == "layer":
            return ops.layer_norm(x, self.weight, self.bias, eps=eps_for(self, x))
        return ops.rms_norm(x, self.weight, eps=eps_for(self, x))


class FusedGroupNorm(Fused):
    """A group norm."""

    kind = "group_norm"
    num_groups: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        return {} if type(module).forward is nn.GroupNorm.forward else None

    def fused_forward(self, input: torch.Tensor) -> Any:
        return ops.group_norm_act(promoted(input), self.num_groups, self.weight, self.bias, eps=self.eps)
