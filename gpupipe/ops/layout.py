"""Tensors as rows that a kernel can step through, without a copy where two strides tell where a row starts; and the steps."""

from __future__ import annotations

import torch

from gpupipe.device.jit import jit, tl

_SMALLEST = 4
"""Dropout draws for four columns at a time."""
_MOST_PARTS, _NARROWEST = 9, 128
"""Of equal parts of a row: more or narrower ones cost more steps than the lanes they save."""
MOST_ROWS = 2**31 - 2**20
"""A kernel counts rows in 32 bits: a division by a number of rows costs ten times as much in 64."""


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


def inner_rows(*steps: tuple[torch.Tensor, int, int]) -> int | None:
    """How many rows lie one inner stride apart; None when in each tensor the outer stride only goes on with the inner one."""
    length = row_length(steps[0][0])
    return None if all(outer == inner * length or x.shape[:-2].numel() == 1 for x, outer, inner in steps) else length


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A tensor (..., H) as (M, H) whose rows are each contiguous: a view where possible."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def stride(matrix: torch.Tensor | None) -> int:
    """Of its rows, in elements; 0 where there is one row, or none."""
    return 0 if matrix is None or matrix.shape[0] == 1 else matrix.stride(0)


def ceil_div(count: int, size: int) -> int:
    """How many of ``size`` hold ``count``. Triton's own, made for kernels, takes microseconds on the host."""
    return -(-count // size)


def bucket(count: int) -> int:
    """Row counts that are tuned together: powers of two."""
    return (count - 1).bit_length()


def parts(size: int) -> tuple[int, int]:
    """The two powers of two (the second may be 0) that a row of ``size`` is cut into: no lane waits at usual hidden sizes."""
    first = max(_SMALLEST, 1 << (size.bit_length() - 1))
    rest = size - first
    if rest <= 0:
        return first, 0
    second = max(_SMALLEST, 1 << (rest - 1).bit_length())
    return (2 * first, 0) if second >= first else (first, second)


def equal_parts(size: int) -> tuple[int, int]:
    """How many parts, and their width, a power of two, a row of ``size`` is cut into: the fewest that leave few lanes empty."""
    found = []
    for count in range(1, _MOST_PARTS + 1):
        width = max(_SMALLEST, 1 << (-(-size // count) - 1).bit_length())
        if count == 1 or width >= _NARROWEST:
            found.append((count, width))
    fewest = min(count * width for count, width in found)
    return next((count, width) for count, width in found if count * width <= 1.02 * fewest)


@jit
def wide(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def there(live, H: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile of columns ``FIRST`` and following exist; one answer a row where all its columns do."""
    if FIRST + WIDTH <= H:
        return live[:, None]
    else:
        return live[:, None] & (FIRST + tl.arange(0, WIDTH)[None, :] < H)


@jit
def row_starts(pointer, row, inner, outer_stride, inner_stride):
    """Pointers (ROWS, 1) to where rows start; 32-bit ``row``; ``inner`` is None where one stride leads through all."""
    if inner is None:
        return pointer + (row.to(tl.int64) * inner_stride)[:, None]
    else:
        return pointer + ((row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride)[:, None]
