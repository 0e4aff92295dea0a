"""The watch: what is found in a step that is not finite, when, and that the run is as it would have been without it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpupipe.errors import ConfigError, NotFiniteError
from gpupipe.ops import settings
from gpupipe.train import Precision, Watch
from gpupipe.train.watch import Report, Seen


class Part(dict[str, torch.Tensor]):
    """A batch as a loader's: tensors by name, and the files that they are of."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.paths = [f"{row}.mp4" for row in range(len(x))]


class Net(nn.Module):
    """Two layers, with a fault that can be switched on behind the first and in the second's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.between(self.drop(self.first(x))))  # type: ignore[no-any-return]


class Training:
    """A loop in small."""

    def __init__(self, net: nn.Module | None = None, precision: dict[str, Any] | None = None, **config: Any) -> None:
        self.net = Net() if net is None else net
        self.precision = Precision({"dtype": "float32"} if precision is None else precision)
        self.optimizer = torch.optim.AdamW(self.precision.prepare(self.net), lr=1e-2, fused=True)
        self.watch = Watch(self.net, self.loss_of, self.precision, {"lag": 2, **config})
        self.seen: list[Seen] = []

    def loss_of(self, model: nn.Module, batch: Part) -> torch.Tensor:
        return model(batch["x"]).float().square().mean()  # type: ignore[no-any-return]

    def step(self, *batches: Part) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(())
        for batch in batches:
            with self.precision.autocast():
                loss = self.loss_of(self.net, batch) / len(batches)
            self.precision.backward(loss)
            total = total + loss.detach()
        return total, self.precision.step(self.optimizer, clip=1.0)

    def run(self, steps: list[list[Part]]) -> list[Report]:
        for number, batches in enumerate(steps):
            self.take(self.watch.after(number, batches, *self.step(*batches)))
        for seen in self.watch.settle():
            self.take(seen)
        return [seen.report for seen in self.seen if seen.report is not None]

    def take(self, seen: Seen | None) -> None:
        if seen is None:
            return
        self.seen.append(seen)
        if seen.report is not None and self.watch.config.repeat != "no":
            with self.watch.careful():
                again = self.watch.after(seen.step, seen.batches, *self.step(*seen.batches))
            assert again is not None
            self.seen.append(again)


def batches(count: int, rows: int = 3) -> list[list[Part]]:
    torch.manual_seed(1)
    return [[Part(torch.randn(rows, 4))] for _ in range(count)]


def test_figures_come_some_steps_later_and_lose_none() -> None:
    run = Training(lag=3)
    early = [run.watch.after(k, each, *run.step(*each)) for k, each in enumerate(batches(5))]
    assert [seen is None for seen in early] == [True, True, True, False, False]
    rest = list(run.watch.settle())
    assert [seen.step for seen in [*early[3:], *rest] if seen] == [0, 1, 2, 3, 4]
    assert all(seen.loss > 0 and seen.norm > 0 and seen.scale == 1 for seen in rest)
    assert list(run.watch.settle()) == []


def test_what_the_batch_brought_is_named_with_its_file() -> None:
    steps = batches(6)
    steps[2][0]["x"][1, 3] = float("nan")
    run = Training(repeat="no")
    (report,) = run.run(steps)
    first = report.first
    assert first is not None
    assert (report.step, first.what, first.name, first.nan, first.rows) == (2, "batch", "x", 1, (1,))
    assert report.files == ("1.mp4",)
    assert "step 2 is not finite" in str(report)
    assert "batch x, float32[3, 4]: 1 NaN, 0 infinite" in str(report)


@pytest.mark.parametrize(
    ("fault", "what", "name"),
    [
        (lambda x: x / x.new_zeros(()), "input", "last"),
        (lambda x: _Bad.apply(x), "gradient", "drop"),
    ],
    ids=["between modules", "in a backward"],
)
def test_the_first_module_is_named(fault: Callable[[torch.Tensor], torch.Tensor], what: str, name: str) -> None:
    net = Net()
    net.between = fault
    run = Training(net, repeat="no", give_up=9)
    reports = run.run(batches(1))
    first = reports[0].first
    assert first is not None
    assert (first.what, first.name, first.kind) == (what, name, type(getattr(net, name)).__name__)


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * float("inf")


def test_an_overflow_is_told_by_its_layer_and_what_it_was_given() -> None:
    """300 times weights of 300 are beyond float16, in a layer whose inputs are not."""
    net = Net()
    with torch.no_grad():
        net.last.weight.fill_(300.0)
        net.first.weight.fill_(75.0)
        net.first.bias.zero_()
    run = Training(net.eval(), {"dtype": "float16", "initial_scale": 8.0}, repeat="no")
    (report,) = run.run([[Part(torch.ones(2, 4))]])
    first = report.first
    assert first is not None
    assert (first.what, first.name, first.kind, first.infinite) == ("output", "last", "Linear", 4)
    assert (first.largest_input, report.scale) == (300.0, 8.0)
    assert "output of last (Linear), float16[2, 2]: 0 NaN, 4 infinite" in str(report)


def test_a_wrong_parameter_is_named() -> None:
    net = Net()
    with torch.no_grad():
        net.last.bias[0] = float("inf")
    (report,) = Training(net, repeat="no").run(batches(1))
    assert report.first is not None
    assert (report.first.what, report.first.name) == ("parameter", "last.bias")


def test_looking_into_a_step_leaves_the_run_as_it_was() -> None:
    """The same run without a watch: weights, random numbers and buffers are the same behind it."""
    steps = batches(6)
    steps[1][0]["x"][0, 0] = float("inf")
    watched, plain = Training(repeat="no"), Training()
    torch.manual_seed(5)
    assert len(watched.run(steps)) == 1
    after = torch.rand(())
    torch.manual_seed(5)
    for each in steps:
        plain.step(*each)
    assert torch.equal(after, torch.rand(())), "dropout drew the same"
    for name, value in plain.net.state_dict().items():
        assert torch.equal(value, watched.net.state_dict()[name]), name


def test_the_step_is_done_again_with_the_random_numbers_it_had() -> None:
    """Dropout decides whether this net overflows: with other numbers the fault would not show."""
    net = Net()
    net.between = lambda x: torch.where(x.detach()[0, 0] == 0, float("inf"), x)
    run = Training(net, repeat="no", give_up=9)
    reports = run.run(batches(4))
    assert reports, "the seed drops this element at least once in four steps"
    assert len(reports) < 4, "and keeps it at least once"
    assert all(report.first is not None and report.first.what == "input" for report in reports)


def test_a_step_is_repeated_conservatively_and_counts() -> None:
    net = Net()
    modes: list[str] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        modes.append(settings.mode(None))
        return x if settings.mode(None) == "conservative" or len(modes) > 3 else x * float("inf")

    net.between = between
    run = Training(net, lag=0)
    run.run(batches(1))
    assert modes == ["balanced", "balanced", "conservative"], "the step, the look into it, the step again"
    assert [seen.report is None for seen in run.seen] == [False, True]
    assert run.optimizer.state_dict()["state"][0]["step"] == 1


def test_a_step_is_repeated_without_autocast() -> None:
    net = Net()
    types: list[torch.dtype] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        types.append(x.dtype)
        return x * 1e6  # beyond float16

    net.between = between
    run = Training(net, {"dtype": "float16"}, lag=0, repeat="float32")
    run.run(batches(1))
    assert types == [torch.float16, torch.float16, torch.float32]
    assert run.seen[-1].norm < float("inf")
    with pytest.raises(ConfigError, match="master_weights"):
        Training(precision={"dtype": "float16", "master_weights": True}, repeat="float32")


def test_overflows_of_a_scale_that_finds_its_place_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpupipe"):
        run = Training(precision={"dtype": "float16", "initial_scale": 2.0**24, "max_scale": 2.0**24}, repeat="no")
        assert run.run(batches(12)) == []
    assert not caplog.records
    assert any(seen.norm == float("inf") or seen.norm != seen.norm for seen in run.seen), "some were left out"
    assert all(torch.isfinite(torch.tensor(seen.loss)) for seen in run.seen)


def test_overflows_without_end_are() -> None:
    net = Net()
    net.between = _Bad.apply
    run = Training(net, {"dtype": "float16"}, repeat="no", overflows=3)
    with pytest.raises(NotFiniteError, match=r"3 steps in a row.*gradient of drop"):
        run.run(batches(20))
    assert len([seen for seen in run.seen if seen.report]) == 2
    assert run.seen[2].report, "after so many in a row"


def test_training_that_is_not_finite_for_good_ends_in_an_error() -> None:
    steps = batches(9)
    for each in steps:
        each[0]["x"][2] = float("nan")
    run = Training(give_up=2, repeat="conservative")
    with pytest.raises(NotFiniteError, match="2 steps in a row") as raised:
        run.run(steps)
    assert raised.value.path == "2.mp4"
    assert all(value.isfinite().all() for value in run.net.state_dict().values())


def test_parts_of_a_step_and_float32_copies() -> None:
    """The second part brings it; gradients that are in the copies come back as they were."""
    first, second = batches(1)[0][0], Part(torch.full((3, 4), float("nan")))
    run = Training(precision={"dtype": "bfloat16", "master_weights": True}, repeat="no")
    (report,) = run.run([[first, second]])
    assert report.first is not None
    assert report.first.what == "batch"
    assert all(master.grad is None for master in run.precision.masters.values())


def test_wrapped_models_are_looked_into() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert isinstance(compiled, nn.Module)
    steps = batches(2)
    steps[0][0]["x"][0] = float("inf")
    run = Training(compiled, repeat="no")
    (report,) = run.run(steps)
    assert report.first is not None
    assert report.first.name == "x"


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    paths: list[str]


GIVEN: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor], str]] = {
    "a tensor": (lambda x: x, lambda batch: batch, "batch,"),
    "a pair": (lambda x: (x, torch.zeros(len(x))), lambda batch: batch[0], "batch 0,"),
    "a dataclass": (lambda x: Pair(x, [f"{row}.mp4" for row in range(len(x))]), lambda batch: batch.x, "batch x,"),
    "a mapping with paths": (
        lambda x: {"video": {"x": x}, "paths": [f"{row}.mp4" for row in range(len(x))]},
        lambda batch: batch["video"]["x"],
        "batch video.x,",
    ),
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("alone", [True, False])
def test_batches_of_any_kind(kind: str, alone: bool) -> None:
    """One that is given by itself is not taken apart into its keys or rows; what it holds is named, and its videos."""
    make, of, named = GIVEN[kind]
    net, precision = Net(), Precision({"dtype": "float32"})
    optimizer = torch.optim.AdamW(precision.prepare(net), lr=1e-2, fused=True)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(of(batch)).square().mean()  # type: ignore[no-any-return]

    watch = Watch(net, loss_of, precision, {"lag": 0})
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    batch = make(x)
    loss = loss_of(net, batch)
    precision.backward(loss)
    norm = precision.step(optimizer)
    alone = alone and kind != "a pair"  # which is taken for two batches
    seen = watch.after(1, batch if alone else [batch], loss.detach(), norm)
    assert seen is not None
    assert seen.report is not None
    assert named in str(seen.report)
    assert len(seen.batches) == 1
    assert seen.batches[0] is batch
    if hasattr(batch, "paths") or "paths" in kind:
        assert seen.report.files == ("1.mp4",)
