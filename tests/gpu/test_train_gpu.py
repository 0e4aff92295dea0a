"""Training steps on a GPU: the host never waits in one, steps are left out on the device, and faults are found there too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_train_watch import Part
from video_dit import VideoDiT, VideoDiTConfig, flow_loss

from gpupipe.train import Ema, Precision, Watch

pytestmark = pytest.mark.gpu

CONFIG = VideoDiTConfig(frames=4, height=16, width=16, patch=(1, 4, 4), hidden=64, depth=1, heads=2)
SETTINGS = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "master_weights": True},
    {"dtype": "float16"},
    {"dtype": "float16", "master_weights": True, "keep_float32": ("last", "blocks.*.modulation")},
]


@pytest.fixture
def syncs_are_errors() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class Loop:
    """A few steps of the reference model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.net = VideoDiT(CONFIG).cuda()
        self.precision = Precision(settings, "cuda")
        self.optimizer = torch.optim.AdamW(self.precision.prepare(self.net), lr=1e-3, fused=True)
        self.ema = Ema(self.net, weights=self.precision.masters)
        self.watch = Watch(self.net, self.loss_of, self.precision, {"repeat": "no"})
        self.noise, self.time = torch.randn(2, 3, 4, 16, 16, device="cuda"), torch.rand(2, device="cuda")
        self.number = 0

    def loss_of(self, model: torch.nn.Module, batch: Part) -> torch.Tensor:
        return flow_loss(model, batch["x"], self.noise, self.time)

    def step(self, batch: Part) -> Any:
        with self.precision.autocast():
            loss = self.loss_of(self.net, batch)
        self.precision.backward(loss)
        norm = self.precision.step(self.optimizer, clip=1.0)
        self.ema.update()
        self.number += 1
        return self.watch.after(self.number, [batch], loss, norm)


def part() -> Part:
    return Part(torch.randn(2, 3, 4, 16, 16, device="cuda"))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_host_waits_for_nothing(settings: dict[str, Any], syncs_are_errors: None) -> None:
    """From the forward to the figures of an earlier step, which come all the same."""
    loop, batch = Loop(settings), part()
    for _ in range(6):
        loop.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    seen = [loop.step(batch) for _ in range(6)]
    assert [each.step for each in seen] == list(range(3, 9))
    assert all(each.loss > 0 for each in seen)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_that_is_not_finite_is_left_out_and_named(settings: dict[str, Any]) -> None:
    loop = Loop(settings)
    for _ in range(3):
        loop.step(part())
    before = [value.detach().clone() for value in [*loop.net.parameters(), *loop.precision.masters.values()]]
    bad = part()
    bad["x"][1] = float("nan")
    loop.step(bad)
    after = [*loop.net.parameters(), *loop.precision.masters.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (report,) = [seen.report for seen in loop.watch.settle() if seen.report is not None]
    assert report.first is not None
    assert (report.step, report.first.what, report.files) == (4, "batch", ("1.mp4",))
