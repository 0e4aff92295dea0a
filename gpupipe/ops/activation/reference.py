"""What the pass computes, in plain torch: the CPU's way, the twin to bisect with, and the truth that tests hold kernels to."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpupipe.ops import activations


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """residual + gate * dropout(act(x + bias)), of the residual's type, else of that of x. Differentiable.

    gate is (M, C), each row for as many rows of x as there are to one. ``conservative`` rounds to x's type after every step.
    """
    narrow = x.dtype
    wide = torch.promote_types(narrow, torch.float32)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(narrow).to(wide) if conservative else value

    y = x.to(wide) if bias is None else rounded(x.to(wide) + bias.to(wide))
    curve, gated = activations.split(act)
    if gated:
        value, other = y.chunk(2, -1)
        y = value * rounded(activations.apply(other, curve))
    else:
        y = activations.apply(y, curve)
    y = rounded(y)
    if p > 0:
        y = rounded(functional.dropout(y, p))
    if gate is not None:
        leading = y.shape[:-1].numel()
        each = leading // gate.shape[0] if gate.shape[0] else 0
        y = y * gate.to(wide).repeat_interleave(each, 0).view(y.shape)
        if gate.dtype == narrow:
            y = rounded(y)
    if residual is not None:
        return (residual.to(wide) + y).to(residual.dtype)
    return y.to(narrow)
