"""Attention of every pixel's frames to each other, on the token grid as it lies in memory."""

from __future__ import annotations

import torch

from gpupipe.errors import ShapeError
from gpupipe.ops import checks, settings
from gpupipe.ops.packed import Packed, unpack
from gpupipe.ops.rope import Rope
from gpupipe.ops.rotary import Norm, prepared, qk_norm_rope
from gpupipe.ops.sdpa import along_time
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import is_sharded
from gpupipe.ops.sharded.linear import within
from gpupipe.ops.temporal import reference
from gpupipe.ops.temporal.op import temporal_op
from gpupipe.ops.temporal.tiles import FUSED, WIDEST, longest


def temporal_attention(
    qkv: Packed,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    rope: Rope | None = None,
    *,
    grid: tuple[int, int, int],
    norm: Norm | None = None,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v along T, for every pixel and head, without moving a token (Vaswani et al. 2017).

    With ``norm`` or ``rope``, queries and keys are first treated as :func:`gpupipe.ops.qk_norm_rope` would: in the same launch
    with the norm ``"head"`` and up to 32 frames, in one of its own else. The backward keeps nothing but its inputs, and repeats
    bit for bit. Pixels that share a tile share its products: a NaN or Inf among values may show in neighbours. More than 64
    frames (32 before Hopper) or 128 columns go to torch's attention; on the CPU and for float64 all is plain torch. Second
    derivatives are not offered.

    Args:
        qkv: (B, N, 3, heads, dim), or (q, k, v), each (B, N, heads, dim), with N = T * H * W; in any strides.
        q_weight, k_weight, rope, norm, eps: see :func:`gpupipe.ops.qk_norm_rope`.
        grid: (T, H, W), in this order.
        causal: a frame sees itself and those before it.
        mask: (B, T), true for frames that may be seen. A frame that sees none gets 0.
        scale: of the scores; None: 1 / sqrt(dim).
        precision: see :func:`gpupipe.ops.precision`; conservative rounds between norm and turn, fast lets float32 products use
            TF32.

    Returns:
        (B, N, heads, dim), like qkv, contiguous.

    Raises:
        ShapeError: when an argument does not fit qkv.
        ConfigError: see :func:`gpupipe.ops.qk_norm_rope`.
    """
    q, k, v = unpack(qkv)
    if norm == "full" and is_sharded(q_weight):
        qkv = q, k, v = qk_norm_rope(qkv, q_weight, k_weight, rope, grid=grid, norm=norm, eps=eps, precision=precision)
        q_weight = k_weight = rope = norm = None
    q_weight, k_weight = within(q_weight, k_weight)
    if not isinstance(grid, tuple | list) or len(grid) != 3:
        raise ShapeError(f"grid is {grid!r}", fix="give (T, H, W), whose product is the number of tokens")
    _, _, table, lengths, pairs, sizes, _, _, interleaved, kind, eps, conservative = prepared(
        q, q_weight, k_weight, rope, grid=grid, norm=norm, text=(0, 0), eps=eps, precision=precision
    )
    if mask is not None and (
        not isinstance(mask, torch.Tensor)
        or mask.dtype != torch.bool
        or mask.shape != (q.shape[0], grid[0])
        or mask.device != q.device
    ):
        raise checks.refuse("mask", mask, f"a bool tensor {(q.shape[0], grid[0])} on {q.device}: (B, T)")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tuned = (interleaved, kind, eps, causal, scale, conservative)
    if not settings.kernel_runs("temporal_attention", q):
        return reference.temporal(q, k, v, mask, q_weight, k_weight, table, lengths, pairs, sizes, *tuned)
    long = grid[0] > longest(q.device) or q.shape[3] > WIDEST
    apart = norm != "head" or long or grid[0] > FUSED
    if apart and (norm is not None or rope is not None):
        q, k, v = qk_norm_rope(qkv, q_weight, k_weight, rope, grid=grid, norm=norm, eps=eps, precision=precision)
        qkv, q_weight, k_weight, table = (q, k, v), None, None, None
        lengths, pairs, kind = [0, 0, 0], [0, 0, 0], 0
    if long:
        return along_time(q, k, v, grid[0], mask=mask, causal=causal, scale=scale)
    given = (qkv, None, None) if isinstance(qkv, torch.Tensor) else qkv
    mask = None if mask is None else mask.contiguous()
    return temporal_op(  # type: ignore[no-any-return]
        *given, mask, q_weight, k_weight, table, lengths, pairs, sizes, interleaved, bool(kind), eps, causal, scale,
        conservative, settings.mode(precision) == "fast",
    )  # fmt: skip
