"""Parts of kernels: a head as pairs of columns, turned by the angles of a token's place on the grid."""

from __future__ import annotations

import math
from typing import Any

import torch

from gpupipe.device.jit import jit, tl


@jit
def load_pairs(start, live, FIRST: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Pairs ``FIRST`` and following of heads that start at ``start`` (R, 1): two tiles (R, COUNT) in float32.

    Of an odd DIM the last pair of the layout by halves lacks its second column: it is 0.
    """
    if INTERLEAVED:
        columns = 2 * FIRST + tl.arange(0, 2 * COUNT)[None, :]
        x = tl.load(start + columns, mask=live & (columns < DIM), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, (x.shape[0], COUNT, 2)))
    else:
        half: tl.constexpr = (DIM + 1) // 2
        columns = FIRST + tl.arange(0, COUNT)[None, :]
        first = tl.load(start + columns, mask=live & (columns < half), other=0.0).to(tl.float32)
        second = tl.load(start + half + columns, mask=live & (columns < DIM - half), other=0.0).to(tl.float32)
        return first, second


@jit
def store_pairs(
    start, live, first, second, FIRST: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The reverse of :func:`load_pairs`."""
    kind = start.dtype.element_ty
    if INTERLEAVED:
        columns = 2 * FIRST + tl.arange(0, 2 * COUNT)[None, :]
        x = tl.reshape(tl.join(first.to(kind), second.to(kind)), (first.shape[0], 2 * COUNT))
        tl.store(start + columns, x, mask=live & (columns < DIM))
    else:
        half: tl.constexpr = (DIM + 1) // 2
        columns = FIRST + tl.arange(0, COUNT)[None, :]
        tl.store(start + columns, first.to(kind), mask=live & (columns < half))
        tl.store(start + half + columns, second.to(kind), mask=live & (columns < DIM - half))


@jit
def angles(
    table_ptr, frame, line, column, second_base, third_base, total,
    FIRST: tl.constexpr, COUNT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Cosine and sine of pairs ``FIRST`` and following at places that broadcast to (R, 1).

    Places must lie in the table, so that loads need no mask but a constant one: another would keep them from being wide.
    """
    pair = FIRST + tl.arange(0, COUNT)[None, :]
    if P0 + P1 == 0:
        offset = column * P2 + pair
    else:
        offset = tl.where(pair < P0 + P1, second_base + line * P1 + (pair - P0), third_base + column * P2 + (pair - P0 - P1))
        offset = tl.where(pair < P0, frame * P0 + pair, offset)
    offset = tl.max_contiguous(tl.multiple_of(offset, (1, VECTOR)), (1, VECTOR))
    if FIRST + COUNT <= P0 + P1 + P2:
        return tl.load(table_ptr + offset), tl.load(table_ptr + total + offset)
    else:
        mask = pair < P0 + P1 + P2
        return tl.load(table_ptr + offset, mask=mask, other=1.0), tl.load(table_ptr + total + offset, mask=mask, other=0.0)


@jit
def turn(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@jit
def turn_back(first, second, cos, sin):
    return first * cos + second * sin, second * cos - first * sin


def table_arguments(lengths: list[int], pairs: list[int]) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Where the second and third axis begin in a table and where its sines begin; and the constants of :func:`angles`."""
    ends = [lengths[0] * pairs[0]]
    for length, count in zip(lengths[1:], pairs[1:], strict=True):
        ends.append(ends[-1] + length * count)
    constants = {"P0": pairs[0], "P1": pairs[1], "P2": pairs[2], "VECTOR": math.gcd(*pairs, 4)}
    return (ends[0], ends[1], ends[2]), constants


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A table that starts where wide loads may."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
