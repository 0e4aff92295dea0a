"""What the norms compute, in plain torch: the CPU's way, the twin to bisect with, and the truth that tests hold kernels to."""

from __future__ import annotations

import torch
from torch.nn import functional


def norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    *,
    eps: float,
    rms: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + gate * branch``, modulated, and that sum. Shapes as in :func:`gpupipe.ops.gate_add_modulate_norm`.

    Dropout of ``branch`` has been done. Differentiable. ``conservative`` rounds to x's type after every step, as torch's own
    ops would; else float32 (float64 for such input) holds up to the two results.
    """
    narrow = x.dtype
    wide = torch.promote_types(narrow, torch.float32)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(narrow).to(wide) if conservative else value

    total = x
    if branch is not None:
        step = branch.to(wide)
        if gate is not None:
            step = rounded(step * _spread(gate, x, wide))
        total = (x.to(wide) + step).to(narrow)
    size = x.shape[-1:]
    affine = [None if value is None else value.to(wide) for value in (weight, bias)]
    if rms:
        y = functional.rms_norm(total.to(wide), size, affine[0], eps)
        y = y if affine[1] is None else rounded(y) + affine[1]
    else:
        y = functional.layer_norm(total.to(wide), size, affine[0], affine[1], eps)
    y = rounded(y)
    if scale is not None:
        y = rounded(y * rounded(1 + _spread(scale, x, wide)))
    if shift is not None:
        y = y + _spread(shift, x, wide)
    return y.to(narrow), total


def _spread(value: torch.Tensor, x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """(M, H), each row for as many rows of x (..., H) as there are to one of them, as (..., H)."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    each = rows // value.shape[0] if value.shape[0] else 0
    return value.to(wide).repeat_interleave(each, 0).view(x.shape)
