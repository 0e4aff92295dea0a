"""Queries, keys and values: in one tensor, as one product made them, or in three; and as a kernel steps through them."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.checks import floating, refuse

Packed = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(B, N, 3, heads, dim), or three tensors (B, N, heads, dim)."""


def unpack(qkv: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, each (B, N, heads, dim): views.

    Raises:
        ShapeError: for anything else than :data:`Packed`.
    """
    if isinstance(qkv, torch.Tensor):
        floating("qkv", qkv)
        if qkv.dim() != 5 or qkv.shape[2] != 3 or 0 in qkv.shape[3:]:
            raise refuse("qkv", qkv, "(B, N, 3, heads, dim), or three tensors (B, N, heads, dim)")
        q, k, v = qkv.unbind(2)
        return q, k, v
    if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
        raise refuse("qkv", qkv, "(B, N, 3, heads, dim), or three tensors (B, N, heads, dim)")
    for name, value in zip("qkv", qkv, strict=True):
        floating(name, value, like=qkv[0] if isinstance(qkv[0], torch.Tensor) else None)
        if value.dim() != 4 or value.shape != qkv[0].shape or value.dtype != qkv[0].dtype or 0 in value.shape[2:]:
            raise refuse(name, value, "(B, N, heads, dim), in shape and type as the other two")
    q, k, v = qkv
    return q, k, v


def sides(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """What an op was given, as its three tensors: either all in ``x``, or ``x`` is the queries."""
    return tuple(x.unbind(2)) if x.dim() == 5 else (x, *others)


def stepped(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is contiguous: itself, where it is so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Of samples, tokens and heads, in elements."""
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def like_sides(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """New tensors for the gradients of what an op was given, contiguous: the whole, and the three in it."""
    if x.dim() == 5:
        whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return (whole, *whole.unbind(2))
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in (x, *others)]
    return (made[0], *made)
