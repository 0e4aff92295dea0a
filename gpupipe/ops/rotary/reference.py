"""What the norm and the turning of queries and keys compute, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpupipe.ops.rope import spread

NONE, HEAD, FULL = 0, 1, 2
"""Norms: none, over each head, over all heads of a token."""


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    prefix: int,
    suffix: int,
    interleaved: bool,
    norm: int,
    eps: float,
    conservative: bool,
) -> torch.Tensor:
    """Queries, or keys, (B, N, heads, dim): normalised, then turned. Differentiable.

    ``conservative`` rounds to x's type between the two, as separate ops would; else float32 (float64 for such input) holds up
    to the result.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if norm != NONE:
        y = y if norm == HEAD else y.flatten(2)
        y = functional.rms_norm(y, y.shape[-1:], None if weight is None else weight.to(wide), eps).view(x.shape)
        if conservative:
            y = y.to(x.dtype).to(wide)
    if table is not None:
        cos, sin = (side.to(wide)[:, None] for side in spread(table, lengths, pairs, grid))
        body = y[:, prefix : y.shape[1] - suffix]
        if interleaved:
            first, second = body.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
        else:
            first, second = body.chunk(2, -1)
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
        y = torch.cat((y[:, :prefix], turned, y[:, y.shape[1] - suffix :]), 1)
    return y.to(x.dtype)
