"""Calls are captured where the host is their bottleneck, as a played GPU has it: there alone a graph gains anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from tape import Tape
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train.graphs import AdaptiveGraph, GraphReport, adaptive
from gpupipe.train.graphs.pace import DeviceClock, Pace

MS = 1e-3


class Point:
    """When the GPU comes to a place in its stream."""

    def __init__(self, gpu: Played, at: float) -> None:
        self._gpu, self.at = gpu, at

    def reached(self) -> bool:
        return self._gpu.now >= self.at

    def since_ms(self, other: Point) -> float:
        assert self.reached(), "to ask for it would wait"
        return (self.at - other.at) / MS


class Played:
    """A host and a GPU.

    Args:
        queue_s: of the GPU's work, that the host can be ahead at most: a launch beyond it waits.
    """

    def __init__(self, queue_s: float = 1e9) -> None:
        self.now = self._done = 0.0
        self._queue_s = queue_s
        self.marks = 0

    def host_s(self) -> float:
        return self.now

    def mark(self) -> Point:
        self.marks += 1
        return Point(self, self._through(max(self.now, self._done), 0.0))

    def sleep(self, seconds: float) -> None:
        assert self._done > self.now, "the GPU has nothing to do meanwhile"
        self.now += seconds

    def work(self, host_s: float, gpu_s: float) -> None:
        """Launches over ``host_s``, of kernels that take ``gpu_s`` in a row."""
        behind = self._through(max(self._done, self.now), gpu_s)
        self.now += host_s
        self._done = max(behind, self._through(self.now, 0.0))
        self.now = max(self.now, self._done - self._queue_s)

    def _through(self, begin: float, gpu_s: float) -> float:
        """When work is done that the GPU comes to at ``begin``."""
        return begin + gpu_s

    def finish(self) -> None:
        """The host waits for the GPU."""
        self.now = max(self.now, self._done)


class Shared(Played):
    """A GPU that others have for ``others_s``, then this process for 2 ms, and so on, from the moment ``since`` on."""

    def __init__(self, others_s: float, since: float = 0.0) -> None:
        super().__init__()
        self.others_s, self._since = others_s, since

    def _through(self, begin: float, gpu_s: float) -> float:
        own, turn = 2 * MS, self.others_s + 2 * MS
        turns, gone = divmod(begin - self._since, turn)
        turns, left = divmod(turns * own + max(0.0, gone - self.others_s) + gpu_s, own)
        return max(begin, self._since + turns * turn + self.others_s + left)

    def sleep(self, seconds: float) -> None:
        self.now += seconds  # while others have the GPU, it may have nothing of this process to do


class Works(nn.Module):
    """A module that takes its time."""

    def __init__(self, gpu: Played, host_s: float, gpu_s: float) -> None:
        super().__init__()
        self.gpu, self.host_s, self.gpu_s = gpu, host_s, gpu_s
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gpu.work(self.host_s, self.gpu_s * len(x) / 4)
        return self.layer(x)


def graph_of(target: Any, gpu: Played, **options: Any) -> AdaptiveGraph:
    given: dict[str, Any] = {"warmup_steps": 4, "capture_frequency": 2, "device": "cpu", "recorder": Tape, "clock": gpu}
    return AdaptiveGraph(target, **{**given, **options})


def run(graph: AdaptiveGraph, gpu: Played, calls: int, rest: tuple[float, float], *, waits: bool, rows: int = 4) -> GraphReport:
    """A loop of calls, each followed by the rest of a step: its host's and its GPU's seconds."""
    for _ in range(calls):
        graph(torch.ones(rows, 6)).sum().backward()
        gpu.work(*rest)
        if waits:
            gpu.finish()
    return graph.report()


@pytest.mark.parametrize("waits", [True, False])
def test_where_the_host_is_the_bottleneck_calls_are_captured(waits: bool) -> None:
    gpu = Played()
    graph = graph_of(Works(gpu, 10 * MS, 4 * MS), gpu)
    report = run(graph, gpu, 10, (15 * MS, 8 * MS), waits=waits)
    assert report.graphs == 1
    assert report.hits == 6, "from the first call behind the warm-up on"
    assert report.gpu_bound == ()


@pytest.mark.parametrize("waits", [True, False])
def test_where_the_gpu_is_they_are_not_and_that_is_told(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    gpu = Played()
    graph = graph_of(Works(gpu, 10 * MS, 40 * MS), gpu)
    with caplog.at_level(logging.INFO, "gpupipe"):
        report = run(graph, gpu, 400, (15 * MS, 80 * MS), waits=waits)
    assert report.graphs == report.hits == 0
    assert report.given_up is None, "that is no failure"
    assert not report.failures
    (told,) = report.gpu_bound
    assert "4x6: launched in 10.00 ms, " in told
    assert ("40.00 ms on the GPU" if waits else "not done on the GPU when the next one came") in told
    assert told in str(report)
    (record,) = [each for each in caplog.records if "a graph would gain nothing" in each.message]
    assert record.levelno == logging.INFO
    assert told in record.message
    assert "capture='always'" in record.message


def test_a_call_that_is_not_done_when_the_next_comes_is_hidden() -> None:
    gpu = Played()
    graph = graph_of(Works(gpu, 10 * MS, 4 * MS), gpu, warmup_steps=0)
    report = run(graph, gpu, 5, (1 * MS, 80 * MS), waits=False)
    assert report.graphs == 0
    assert "launched in 10.00 ms, and not done" in report.gpu_bound[0]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("others_ms", [2, 4, 6, 8])
def test_turns_of_other_processes_do_not_make_the_gpu_look_slow(others_ms: int, waits: bool) -> None:
    """Whatever the moment: a call of theirs may wait for its first kernel, or have its last one done a turn later."""
    for since in range(10):
        gpu = Shared(others_ms * MS, -since * 1.03 * MS)
        report = run(graph_of(Works(gpu, 0.75 * MS, 0.15 * MS), gpu), gpu, 10, (2.2 * MS, 0.5 * MS), waits=waits)
        assert report.hits == 6, str(report)


@pytest.mark.parametrize("waits", [True, False])
def test_turns_of_other_processes_do_not_make_the_host_look_slow(waits: bool) -> None:
    for since in range(10):
        gpu = Shared(6 * MS, -since * 0.8 * MS)
        report = run(graph_of(Works(gpu, 0.75 * MS, 7 * MS), gpu), gpu, 30, (2.2 * MS, 14 * MS), waits=waits)
        assert report.graphs == 0, str(report)
        assert len(report.gpu_bound) == 1


def test_a_full_queue_of_launches_does_not_make_the_host_look_slow() -> None:
    """Each launch waits for a kernel there, so that both take as long; the call is most of the step."""
    gpu = Played(queue_s=6 * MS)
    graph = graph_of(Works(gpu, 30 * MS, 200 * MS), gpu, warmup_steps=10)
    report = run(graph, gpu, 20, (2 * MS, 20 * MS), waits=False)
    assert report.graphs == 0
    assert "200.00 ms on the GPU, which was busy with earlier work all the while" in report.gpu_bound[0]


def test_work_left_over_from_before_does_not_hide_launches() -> None:
    """An optimizer's few large kernels, say: the GPU has done them long before the launches of the call are through."""
    gpu = Played()
    graph = graph_of(Works(gpu, 20 * MS, 8 * MS), gpu)
    report = run(graph, gpu, 10, (1 * MS, 9 * MS), waits=False)
    assert report.graphs == 1


def test_a_first_call_does_not_count() -> None:
    """Kernels are compiled in it: the host would seem to be the bottleneck."""
    gpu = Played()
    model = Works(gpu, 10.0, 40 * MS)
    graph = graph_of(model, gpu, warmup_steps=0, capture_frequency=1)
    run(graph, gpu, 1, (0, 0), waits=True)
    assert gpu.marks == 0
    model.host_s = 10 * MS
    assert run(graph, gpu, 10, (0, 0), waits=True).graphs == 0
    assert "launched in 10.00 ms, 40.00 ms on the GPU" in graph.report().gpu_bound[0]


def test_one_call_that_was_held_up_decides_nothing() -> None:
    gpu = Played()
    model = Works(gpu, 10 * MS, 40 * MS)
    graph = graph_of(model, gpu)
    run(graph, gpu, 3, (0, 0), waits=True)
    model.host_s = 1.0
    run(graph, gpu, 1, (0, 0), waits=True)
    model.host_s = 10 * MS
    run(graph, gpu, 1, (0, 0), waits=True)
    assert graph.report().graphs == 0


def test_one_call_that_waited_for_the_gpu_decides_nothing() -> None:
    gpu = Played()
    model = Works(gpu, 10 * MS, 4 * MS)
    graph = graph_of(model, gpu, warmup_steps=0, capture_frequency=1)
    run(graph, gpu, 1, (0, 0), waits=True)
    model.gpu_s = 40 * MS
    assert run(graph, gpu, 1, (0, 0), waits=True).gpu_bound == ()
    model.gpu_s = 4 * MS
    report = run(graph, gpu, 2, (0, 0), waits=True)
    assert report.gpu_bound == ()
    assert report.hits == 1, "the one after the next"


def test_a_call_that_raises_does_not_count() -> None:
    gpu = Played()

    class Raises(Works):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.host_s > 1:
                self.gpu.work(self.host_s, 0)
                raise ValueError
            return super().forward(x)

    model = Raises(gpu, 10 * MS, 40 * MS)
    graph = graph_of(model, gpu)
    run(graph, gpu, 2, (0, 0), waits=True)
    model.host_s = 2.0
    for _ in range(2):
        with suppress(ValueError):
            graph(torch.ones(4, 6))
    model.host_s = 10 * MS
    assert run(graph, gpu, 3, (0, 0), waits=True).graphs == 0


def test_it_is_looked_at_again_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adaptive, "LOOK_AGAIN", (20,))
    gpu = Played()
    model = Works(gpu, 10 * MS, 40 * MS)
    graph = graph_of(model, gpu)
    with caplog.at_level(logging.INFO, "gpupipe"):
        run(graph, gpu, 90, (0, 0), waits=True)
        assert 10 <= gpu.marks <= 2 * 3 * 5, "of three calls at each of five looks"
        model.gpu_s = 4 * MS
        report = run(graph, gpu, 30, (0, 0), waits=True)
    assert report.graphs == 1
    assert report.gpu_bound == ()
    assert sum("would gain nothing" in record.message for record in caplog.records) == 1, "told once"


def test_it_is_looked_at_again_soon_and_then_seldom() -> None:
    gpu = Played()
    model = Works(gpu, 10 * MS, 40 * MS)
    graph = graph_of(model, gpu)
    looks = []
    for call in range(1, 2200):
        before = gpu.marks
        run(graph, gpu, 1, (0, 0), waits=True)
        if gpu.marks > before:
            looks.append(call)
    assert looks == [2, 3, 4, 12, 13, 14, 112, 113, 114, 1112, 1113, 1114, 2112, 2113, 2114]
    graph = graph_of(model, gpu)
    assert len(run(graph, gpu, 10, (0, 0), waits=True).gpu_bound) == 1
    model.gpu_s = 4 * MS
    assert run(graph, gpu, 5, (0, 0), waits=True).hits == 1, "what was wrong once is mended at the second look"


def test_a_host_that_does_all_itself_is_the_bottleneck() -> None:
    """By the clock that is used, on a device whose time is the host's."""
    pace, clock = Pace(), DeviceClock(torch.device("cpu"))
    with pace.measured(clock):
        clock.sleep(5 * MS)
    assert pace.known()
    assert pace.gpu_bound() is None


def test_always_is_always() -> None:
    gpu = Played()
    graph = graph_of(Works(gpu, 10 * MS, 40 * MS), gpu, capture="always")
    assert run(graph, gpu, 10, (0, 0), waits=True).hits == 6
    assert gpu.marks == 0
    with pytest.raises(ConfigError, match="capture='never'"):
        graph_of(nn.Identity(), gpu, capture="never")


def test_each_kind_of_call_has_its_own_bottleneck() -> None:
    """And one that is left as it is, however large, holds no smaller one up."""
    gpu = Played()
    graph = graph_of(Works(gpu, 10 * MS, 4 * MS), gpu)
    for _ in range(12):
        run(graph, gpu, 1, (0, 0), waits=True, rows=64)
        report = run(graph, gpu, 1, (0, 0), waits=True, rows=2)
    assert report.graphs == 1
    assert report.hits == 12 - 4, "the larger one was measured three times before"
    assert [each.split(":")[0] for each in report.gpu_bound] == ["64x6"]


def test_nothing_is_measured_where_nothing_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Played()
    model = Works(gpu, 10 * MS, 4 * MS)
    full = graph_of(model, gpu, max_graphs=1)
    run(full, gpu, 10, (0, 0), waits=True)
    marks = gpu.marks
    assert run(full, gpu, 10, (0, 0), waits=True, rows=8).graphs == 1
    assert gpu.marks == marks
    within = graph_of(model, gpu)
    monkeypatch.setattr(AdaptiveGraph, "_in_a_capture", lambda self: True)
    run(within, gpu, 10, (0, 0), waits=True)
    assert gpu.marks == marks, "in another's capture"


@pytest.fixture
def forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forget_compiled")
def test_a_module_is_measured_whole_and_not_its_segments() -> None:
    gpu = Played()

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            work()
            hidden = self.layer(x)
            return hidden * 2 if hidden.sum().item() > 1e9 else hidden + 1

    @torch._dynamo.disable
    def work() -> None:
        gpu.work(10 * MS, gpu_s)

    gpu_s = 40 * MS
    graph = graph_of(Asks(), gpu)
    assert run(graph, gpu, 20, (0, 0), waits=True).failures == (), "it was not even tried"
    gpu_s = 4 * MS
    graph = graph_of(Asks(), gpu)
    report = run(graph, gpu, 20, (0, 0), waits=True)
    assert report.segments == 2
    marks = gpu.marks
    assert run(graph, gpu, 10, (0, 0), waits=True).hits == report.hits + 10
    assert gpu.marks == marks
