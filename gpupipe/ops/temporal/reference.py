"""What attention along time computes, in plain torch."""

from __future__ import annotations

import torch

from gpupipe.ops.rotary.reference import norm_rope


def temporal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    interleaved: bool,
    norm: int,
    eps: float,
    causal: bool,
    scale: float,
    conservative: bool,
) -> torch.Tensor:
    """Attention of (B, N, heads, dim) along the frames of ``grid``. Differentiable.

    Queries and keys are rounded to their type after the norm and the turning, as when stored; what follows is float32 (float64
    for such input).
    """
    rest = (table, lengths, pairs, grid, 0, 0, interleaved, norm, eps, conservative)
    q, k = norm_rope(q, q_weight, *rest), norm_rope(k, k_weight, *rest)
    wide = torch.promote_types(q.dtype, torch.float32)
    frames = grid[0]
    q_rows, k_rows, v_rows = (x.to(wide).unflatten(1, (frames, -1)).permute(0, 2, 3, 1, 4) for x in (q, k, v))
    visible = torch.ones(frames, frames, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
    if mask is not None:
        visible = visible & mask[:, None, None, None, :]
    with torch.autocast(q.device.type, enabled=False):  # it would round the products
        scores = (q_rows @ k_rows.transpose(-1, -2)) * scale
        weights = scores.masked_fill(~visible, torch.finfo(wide).min).softmax(-1).masked_fill(~visible, 0.0)
        out: torch.Tensor = weights @ v_rows
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)
