"""Attention on a token grid: within frames, along time or over all, whole or in windows, with joint text."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import checks, settings
from gpupipe.ops.packed import Packed, unpack
from gpupipe.ops.rope import Rope, grid_of
from gpupipe.ops.rotary import Norm, qk_norm_rope
from gpupipe.ops.sdpa import attend
from gpupipe.ops.settings import Precision
from gpupipe.ops.temporal import temporal_attention

Axis = Literal["spatial", "temporal", "full"]
Sides = tuple[torch.Tensor, torch.Tensor]


def attention(
    qkv: Packed,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    rope: Rope | None = None,
    *,
    grid: tuple[int, int, int],
    axis: Axis = "full",
    window: tuple[int, int, int] | None = None,
    context: Sides | None = None,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale + bias) v on a token grid (Vaswani et al. 2017), on strided views of what one product made.

    Along time it is :func:`gpupipe.ops.temporal_attention`. The rest is torch's attention with the backend that measures
    fastest for the shape (by rule while compiling, capturing or not measuring), around the shapes at which backends fail. Only
    a context makes a copy, of keys and values.

    Args:
        qkv: (B, N, 3, heads, dim), or (q, k, v), each (B, N, heads, dim), with N = T * H * W.
        q_weight, k_weight, rope, norm, eps: see :func:`gpupipe.ops.qk_norm_rope`; it comes first.
        grid: (T, H, W), in this order.
        axis: ``"spatial"`` each frame for itself, ``"temporal"`` each pixel for itself, ``"full"`` all tokens.
        window: (frames, rows, columns), odd: a token sees those at most half of each away from it, fewer at the borders.
            In space the first does nothing; along time it must be None.
        context: keys and values of joint text, (B, M, heads, dim), which every token also sees; not along time.
        bias: added to scores, or bool, true where seen; broadcasts to (B, heads, N, N), in space to (heads, H * W, H * W). Not
            with a window or a context, nor along time.
        scale: of the scores; None: 1 / sqrt(dim).
        precision: see :func:`gpupipe.ops.precision`.

    Returns:
        (B, N, heads, dim), like qkv.

    Raises:
        ShapeError: when an argument does not fit qkv.
        ConfigError: for another axis, or arguments that do not go together.
    """
    q, k, v = unpack(qkv)
    if axis not in get_args(Axis):
        raise ConfigError(f"axis is {axis!r}", fix="choose 'spatial', 'temporal' or 'full'")
    if not isinstance(grid, tuple | list) or len(grid) != 3:
        raise ShapeError(f"grid is {grid!r}", fix="give (T, H, W), whose product is the number of tokens")
    frames, lines, columns = grid_of(grid, q.shape[1])
    if bias is not None and (window is not None or context is not None):
        raise ConfigError("bias together with a window or a context", fix="put the window into the bias, and the text into qkv")
    if axis == "temporal":
        if window is not None or context is not None or bias is not None:
            raise ConfigError("window, context or bias along time", fix="leave them out; temporal_attention takes a mask")
        return temporal_attention(
            qkv, q_weight, k_weight, rope, grid=grid, norm=norm, scale=scale, eps=eps, precision=precision
        )  # fmt: skip
    if window is not None and (len(window) != 3 or any(size < 1 or size % 2 == 0 for size in window)):
        raise ConfigError(f"window is {window}", fix="give three odd sizes: frames, rows and columns")
    if context is not None:
        for name, side in zip(("context[0]", "context[1]"), context, strict=True):
            checks.floating(name, side, like=q)
            if side.dim() != 4 or (side.shape[0], *side.shape[2:]) != (q.shape[0], *q.shape[2:]) or side.dtype != q.dtype:
                raise checks.refuse(name, side, f"(B, M, heads, dim) as qkv is: ({q.shape[0]}, M, {q.shape[2]}, {q.shape[3]})")
    if norm is not None or rope is not None:
        q, k, v = qk_norm_rope(qkv, q_weight, k_weight, rope, grid=grid, norm=norm, eps=eps, precision=precision)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if axis == "spatial":
        if context is not None:
            context = (context[0].repeat_interleave(frames, 0), context[1].repeat_interleave(frames, 0))
        near = None if window is None else _plane(window, lines, columns, q.device)
        made = _attend(_by_frame(q, frames), _by_frame(k, frames), _by_frame(v, frames), context, near, bias, scale)
        return made.reshape(q.shape)
    if window is None:
        return _attend(q, k, v, context, None, bias, scale)
    near, size, reach = _plane(window, lines, columns, q.device), lines * columns, window[0] // 2
    parts = []
    for frame in range(frames):
        seen = slice(max(0, frame - reach) * size, min(frames, frame + reach + 1) * size)
        rows = slice(frame * size, (frame + 1) * size)
        tiled = None if near is None else near.repeat(1, (seen.stop - seen.start) // size)
        parts.append(_attend(q[:, rows], k[:, seen], v[:, seen], context, tiled, None, scale))
    return torch.cat(parts, 1) if parts else torch.empty_like(q)


def _by_frame(x: torch.Tensor, frames: int) -> torch.Tensor:
    """(B, N, ...) as (B * T, N / T, ...): a view, unless samples are further apart than their tokens reach."""
    apart: torch.Tensor = x.unflatten(1, (frames, -1) if x.shape[1] else (frames, 0))
    return apart.flatten(0, 1)


def _plane(window: tuple[int, int, int], lines: int, columns: int, device: torch.device) -> torch.Tensor | None:
    """Which pixels of a frame see which: (H * W, H * W), or None where all do."""
    if window[1] >= 2 * lines - 1 and window[2] >= 2 * columns - 1:
        return None
    line, column = (torch.arange(size, device=device) for size in (lines, columns))
    rows = (line[:, None] - line).abs() <= window[1] // 2
    across = (column[:, None] - column).abs() <= window[2] // 2
    return (rows[:, None, :, None] & across[None, :, None, :]).reshape(lines * columns, -1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Sides | None,
    near: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of (B, S, heads, dim) to its keys and the context's."""
    if context is not None:
        k, v = torch.cat((k, context[0]), 1), torch.cat((v, context[1]), 1)
        if near is not None:
            near = torch.cat((near, near.new_ones(near.shape[0], context[0].shape[1])), 1)
    bias = near if bias is None else bias
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(q.dtype)
    sides = [side.transpose(1, 2) for side in (q, k, v)]
    out: torch.Tensor
    if settings.kernel_wanted("attention"):
        out = attend(sides[0], sides[1], sides[2], bias, causal=False, scale=scale)
    else:
        # By its own name: what sdpa_kernel() allows holds for the whole process, and other threads attend at the same time.
        if bias is not None and bias.dtype == torch.bool:
            bias = q.new_zeros(()).masked_fill(~bias, float("-inf"))
        out = torch.ops.aten._scaled_dot_product_attention_math(sides[0], sides[1], sides[2], bias, scale=scale)[0]
    return out.transpose(1, 2)
