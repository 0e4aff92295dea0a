"""Window attention, fused: held against the same worked out token by token, on grids that windows do not divide."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpupipe import ops
from gpupipe.train import fuse, statistics
from gpupipe.train.parts import windows
from gpupipe.train.verify import BOUNDS, relative_error


class Windowed(nn.Module):
    """What Swin does, in the plainest form: all scores of all tokens, and who is in whose window."""

    def __init__(self, width: int, window: list[int], shift: list[int], heads: int, seen: float = -100.0) -> None:
        super().__init__()
        self.window_size, self.shift_size, self.num_heads, self.seen = window, shift, heads, seen
        self.attention_dropout = self.dropout = 0.0
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        count = (2 * window[0] - 1) * (2 * window[1] - 1) * (2 * window[2] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(count, heads))
        places = torch.tensor(list(itertools.product(*map(range, window))))
        apart = places[:, None] - places[None] + torch.tensor(window) - 1
        sizes = [2 * size - 1 for size in window]
        self.register_buffer("relative_position_index", (apart[..., 0] * sizes[1] + apart[..., 1]) * sizes[2] + apart[..., 2])

    def get_relative_position_bias(self, window: list[int]) -> torch.Tensor:
        count = window[0] * window[1] * window[2]
        return self.relative_position_bias_table[self.relative_position_index[:count, :count]].permute(2, 0, 1)[None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape[1:4]
        window = [min(one, size) for one, size in zip(self.window_size, sizes, strict=True)]
        shift = [by if size > one else 0 for by, one, size in zip(self.shift_size, self.window_size, sizes, strict=True)]
        full = [-(-size // one) * one for size, one in zip(sizes, window, strict=True)]
        padded = x.new_zeros(x.shape[0], *full, x.shape[4])
        padded[:, : sizes[0], : sizes[1], : sizes[2]] = x
        places = torch.tensor(list(itertools.product(*map(range, full))))
        moved = (places - torch.tensor(shift)) % torch.tensor(full)
        home, inside = moved // torch.tensor(window), moved % torch.tensor(window)
        index = (inside[:, 0] * window[1] + inside[:, 1]) * window[2] + inside[:, 2]
        together = (home[:, None] == home[None]).all(-1)
        wrapped = moved > places  # those that the shift has brought round the border
        strangers = (wrapped[:, None] != wrapped[None]).any(-1)
        q, k, v = self.qkv(padded.flatten(1, 3)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5
        bias = self.get_relative_position_bias(window)[0]
        scores = scores + bias[:, index[:, None], index[None]] + strangers * self.seen
        scores = scores.masked_fill(~together, float("-inf"))
        made = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)
        return self.proj(made).view(x.shape[0], *full, -1)[:, : sizes[0], : sizes[1], : sizes[2]]


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    with ops.use("reference"):
        statistics.reset()
        yield


def made(shift: list[int], **options: float) -> Windowed:
    torch.manual_seed(0)
    return Windowed(12, [2, 4, 2], shift, 3, **options)


@pytest.mark.parametrize("shift", [[0, 0, 0], [1, 2, 1]], ids=["still", "shifted"])
@pytest.mark.parametrize("grid", [(4, 8, 4), (3, 7, 5), (2, 3, 5), (1, 2, 1)], ids=str)
def test_windows_on_any_grid(grid: tuple[int, int, int], shift: list[int]) -> None:
    """That windows divide, do not divide, that is smaller than one along some axes, and along all."""
    model = made(shift)
    x = torch.randn(2, *grid, 12, generator=torch.Generator().manual_seed(1))
    runs = []
    for module in (copy.deepcopy(model), model):
        if module is model:
            fuse(module, verify="off")
        given = x.clone().requires_grad_()
        out = module(given)
        (out * torch.linspace(0, 9, out.numel()).sin().view(out.shape)).sum().backward()
        runs.append((out, given.grad, *(value.grad for value in module.parameters())))
    assert statistics.fused == {"attention": 1}
    for one, other in zip(runs[1], runs[0], strict=True):
        assert relative_error(one, other) <= 4 * BOUNDS[torch.float32]


def test_the_mask_of_a_grid_is_made_once() -> None:
    model = made([1, 2, 1])
    fuse(model)
    for grid in ((4, 8, 4), (4, 8, 4), (4, 8, 6)):
        model(torch.randn(1, *grid, 12))
    assert len(windows._masks[model]) == 2
    assert len(windows._masks.get(copy.deepcopy(model), {})) == 0


def test_other_window_attention_is_left() -> None:
    """Strangers that may be seen: the same parts, and another function."""
    report = fuse(made([1, 2, 1], seen=0.0))
    assert not report.replaced
    assert any("something else in its windows" in entry.said for entry in report.left)


def test_dropout_runs_as_written() -> None:
    model = made([0, 0, 0])
    fuse(model, verify="off")
    model.attention_dropout = 0.5
    model(torch.randn(1, 4, 8, 4, 12))
    assert statistics.fused == {}
    model.eval()(torch.randn(1, 4, 8, 4, 12))
    assert statistics.fused == {"attention": 1}
