"""Draws of dropout: the same as ever for a seed, a row and a column."""

from __future__ import annotations

import pytest
import torch

from gpupipe.device import jit
from gpupipe.device.jit import tl
from gpupipe.ops.dropout import dropping, kept, philox
from gpupipe.ops.softmax.kernels import _dropping, _kept

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="needs TRITON_INTERPRET=1")

ROWS, COLUMNS = 4, 32


@jit.jit
def draw(seed_ptr, c0_ptr, c1_ptr, c2_ptr, ours_ptr, theirs_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    seed = tl.load(seed_ptr)
    c0, c1, c2 = tl.load(c0_ptr + at), tl.load(c1_ptr + at), tl.load(c2_ptr + at)
    ours = philox(seed, c0, c1, c2)
    theirs = tl.philox(seed, c0, c1, c2, c0 * 0, 7)
    for place in tl.static_range(4):
        tl.store(ours_ptr + place * COUNT + at, ours[place].to(tl.int64))
        tl.store(theirs_ptr + place * COUNT + at, theirs[place].to(tl.uint32, bitcast=True).to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**40 + 5, 2**62 + 7])
def test_draws_are_those_of_triton(seed: int) -> None:
    counters = torch.randint(-(2**31), 2**31, (3, 64), generator=torch.Generator().manual_seed(0)).int()
    counters[:, :3] = torch.tensor([0, -1, 2**31 - 1])
    ours, theirs = torch.empty(2, 4, 64, dtype=torch.int64)
    draw[(1,)](torch.tensor([seed]), *counters, ours, theirs, COUNT=64)
    assert torch.equal(ours, theirs)
    assert ours.unique().numel() > 200


@jit.jit
def keep(seed_ptr, ours_ptr, theirs_ptr, threshold, shift, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr):
    """Column c has byte or word c % 8 or c % 4 of the draw of c // 8 or c // 4, which its threshold is held against."""
    seed = tl.load(seed_ptr)
    row = shift + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    each: tl.constexpr = 8 if HALF else 4
    c0 = columns // each + row[:, None] * 0
    c1 = row[:, None] + columns * 0
    a, b, c, d = tl.philox(seed, c0, c1, c0 * 0, c0 * 0, 7)
    word = columns % each // (2 if HALF else 1)
    draws = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    draws = draws.to(tl.uint32, bitcast=True).to(tl.int64)
    if HALF:
        draws = tl.where(columns % 2 == 0, draws & 0xFFFF, draws >> 16)
        ours = _kept(seed, row, 0, COLUMNS, threshold)
    else:
        ours = kept(seed, row, 0, COLUMNS, threshold)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + columns
    tl.store(ours_ptr + at, ours)
    tl.store(theirs_ptr + at, draws >= threshold if threshold is not None else draws < 0)


@pytest.mark.parametrize("half", [True, False], ids=["softmax", "others"])
@pytest.mark.parametrize("p", [0.0, 1 / 65536, 0.1, 0.5, 0.75, 1 - 1 / 65536, 1.0])
def test_an_element_is_kept_by_its_part_of_a_draw(p: float, half: bool) -> None:
    ours, theirs = torch.empty(2, ROWS, COLUMNS, dtype=torch.bool)
    threshold, _ = _dropping(p) if half else dropping(p)
    keep[(1,)](torch.tensor([7]), ours, theirs, threshold, 2**31 - 8, ROWS=ROWS, COLUMNS=COLUMNS, HALF=half)
    assert torch.equal(ours, theirs)
    assert ours.all() if p == 0 else not ours.any() if p == 1 else True
    if 0.1 <= p <= 0.75:
        assert 0 < ours.sum() < ours.numel()
