"""Tensors as rows that a kernel can step through, without a copy where two strides tell where a row starts."""

from __future__ import annotations

import torch


def rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor (..., H) as rows: the tensor, copied if need be, and two strides in elements.

    Row ``r`` of all rows starts at ``r // n * outer + r % n * inner``, where ``n`` is :func:`row_length`: the second last
    dimension is one step, all before it together are the other.
    """
    if x.is_contiguous():
        return x, x.shape[-1] * row_length(x), x.shape[-1]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return rows(x.contiguous())
    outer = 0
    expected = None  # the stride that the next dimension outwards must have, for all of them to be one step
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if expected is None:
            outer = stride
        elif stride != expected:
            return rows(x.contiguous())
        expected = stride * size
    return x, outer, x.stride(-2) if x.dim() > 1 else 0


def row_length(x: torch.Tensor) -> int:
    """How many rows lie one inner stride apart."""
    return x.shape[-2] if x.dim() > 1 else 1


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A tensor (..., H) as (M, H) whose rows are each contiguous: a view where possible."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
