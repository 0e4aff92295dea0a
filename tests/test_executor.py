"""Batches prepared ahead: the same ones in the same order, errors where they belong, nothing left behind; figures and times."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.errors import ClosedError, ConfigError
from gpupipe.train.executor import PipelineExecutor
from gpupipe.train.metrics import Metrics
from gpupipe.train.timeline import Span, overlap


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gpupipe-prepare"]


def test_batches_come_prepared_and_in_order() -> None:
    seen: list[Any] = []

    def prepare(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append((threading.current_thread().name, torch.is_grad_enabled()))
        return {"doubled": batch * 2}

    batches = [torch.full((2,), float(k), requires_grad=True) for k in range(7)]
    with PipelineExecutor(batches, prepare=prepare, device="cpu", accumulate=3) as run:
        for epoch in range(2):
            found, due = [], []
            for made in run:
                found.append(float(made["doubled"][0]))
                due.append(run.due)
            assert found == [2.0 * k for k in range(7)], epoch
            assert due == [False, False, True, False, False, True, True], "the last one ends a step, too"
            assert run.share == 1.0, "which it has for itself"
            assert len(run) == 7
    assert set(seen) == {("gpupipe-prepare", False)}
    assert not threads()


def test_it_prepares_as_far_ahead_as_asked_and_no_further() -> None:
    begun = threading.Semaphore(0)
    count = 0

    def source() -> Iterator[int]:
        nonlocal count
        for number in range(20):
            count += 1
            begun.release()
            yield number

    with PipelineExecutor(source(), device="cpu", ahead=2) as run:
        iterator = iter(run)
        assert next(iterator) == 0
        for _ in range(4):  # the one in use, two ready, and one that the source has begun
            assert begun.acquire(timeout=20)
        assert not begun.acquire(timeout=0.2)
        assert count == 4
    assert not threads()


@pytest.mark.parametrize("where", ["source", "prepare"])
def test_errors_come_to_the_loop_in_their_place(where: str) -> None:
    def source() -> Iterator[int]:
        yield from (0, 1)
        if where == "source":
            raise ValueError("the source")
        yield 2

    def prepare(number: int) -> int:
        if where == "prepare" and number == 2:
            raise ValueError("the preparation")
        return number

    found = []
    with PipelineExecutor(source(), prepare=prepare, device="cpu") as run:
        iterator = iter(run)
        found += [next(iterator), next(iterator)]
        with pytest.raises(ValueError, match=where[:4]):
            next(iterator)
    assert found == [0, 1]
    assert not threads()


def test_leaving_early_leaves_no_thread_and_a_newer_iteration_ends_the_older() -> None:
    run = PipelineExecutor(list(range(100)), device="cpu")
    older = iter(run)
    assert next(older) == 0
    newer = iter(run)
    assert next(newer) == 0
    with pytest.raises(ClosedError, match="has ended"):
        next(older)
    for _ in run:
        break
    run.close()
    assert not threads()
    with pytest.raises(ClosedError, match="closed"):
        iter(run)


def test_an_error_in_the_loop_leaves_no_thread() -> None:
    def loop() -> None:
        with PipelineExecutor(list(range(100)), device="cpu") as run:
            for _ in run:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    assert not threads()


def test_state_is_that_of_the_loop_and_not_of_the_thread(clips: dict[str, Path]) -> None:
    options: dict[str, Any] = {
        "clip": {"frames": 4}, "transform": {"size": 24, "dtype": "float32"}, "batch": 2, "device": "cpu", "seed": 3,
    }  # fmt: skip
    paths = [clips[name] for name in ("h264", "mpeg4", "vp9")] * 4
    with VideoLoader(paths, **options) as loader:
        whole = [batch.video for batch in loader]
    with VideoLoader(paths, **options) as loader, PipelineExecutor(loader, ahead=2) as run:
        assert run.device.type == "cpu"
        for number, _ in enumerate(run):
            if number == 2:
                state = run.state_dict()
                break
    with VideoLoader(paths, **options) as loader, PipelineExecutor(loader, prepare=lambda batch: batch.video) as run:
        run.load_state_dict(state)
        rest = list(run)
    assert len(rest) == len(whole) - 3
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[3:], strict=True))
    with PipelineExecutor([1, 2], device="cpu") as run:
        next(iter(run))
        with pytest.raises(ConfigError, match="carry no state"):
            run.state_dict()


def test_a_state_amid_a_step_is_that_before_it(clips: dict[str, Path]) -> None:
    """Its gradients are in no checkpoint: its batches come again."""
    options: dict[str, Any] = {
        "clip": {"frames": 4}, "transform": {"size": 24, "dtype": "float32"}, "batch": 2, "device": "cpu", "seed": 3,
    }  # fmt: skip
    paths = [clips[name] for name in ("h264", "mpeg4", "vp9")] * 4
    with VideoLoader(paths, **options) as loader, PipelineExecutor(loader, accumulate=2) as run:
        states = []
        for _ in run:
            states.append(run.state_dict()["samples"])
    assert states == [0, 4, 4, 8, 8, 12]


def test_closing_from_elsewhere_ends_a_loop_that_waits() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        gate.wait(30)
        yield 1

    run = PipelineExecutor(source(), device="cpu")
    iterator = iter(run)
    assert next(iterator) == 0
    closer = threading.Timer(0.2, lambda: (gate.set(), run.close()))
    closer.start()
    seen = []
    with pytest.raises(ClosedError, match="has ended"):
        seen = [next(iterator), next(iterator)]
    closer.join()
    assert seen == []
    assert not threads()


def test_an_iteration_that_nobody_begins_has_no_thread() -> None:
    run = PipelineExecutor([1, 2], device="cpu")
    assert list(zip([], run, strict=False)) == []
    assert not threads()
    run.close()


def test_metrics_are_means_between_calls() -> None:
    metrics = Metrics()
    assert metrics.means() == {}
    for value in (1.0, 2.0, 6.0):
        metrics.log(loss=torch.tensor([value], requires_grad=True), rate=0.5)
    assert metrics.means() == {"loss": 3.0, "rate": 0.5}
    assert metrics.means() == {"loss": 3.0, "rate": 0.5}, "nothing new"
    metrics.log(loss=torch.tensor(4, dtype=torch.int64))
    assert metrics.means(wait=True) == {"loss": 4.0}
    with pytest.raises(ConfigError, match="loss is a tensor"):
        metrics.log(loss=torch.zeros(2))


def test_the_timeline_shows_what_went_on_beside_what() -> None:
    def prepare(number: int) -> int:
        time.sleep(0.03)
        return number

    with PipelineExecutor(list(range(6)), prepare=prepare, device="cpu", timeline=True) as run:
        for _ in run:
            time.sleep(0.05)
        spans = run.timeline()
        hidden = run.hidden()
    assert sum(span.kind == "prepare" for span in spans) == sum(span.kind == "train" for span in spans) == 6
    assert hidden > 0.6, "all but the first are prepared while another trains"
    with PipelineExecutor([1], device="cpu") as run, pytest.raises(ConfigError, match="timeline=True"):
        run.timeline()


def test_overlap_counts_time_once() -> None:
    spans = [Span("a", 0, 0, 10), Span("a", 1, 20, 30), Span("b", 0, 5, 8), Span("b", 1, 6, 12), Span("b", 2, 40, 50)]
    assert overlap(spans, "a", "b") == pytest.approx(5 / 20)
    assert overlap(spans, "b", "a") == pytest.approx((3 + 4) / 19)
    assert overlap([], "a", "b") == 0


@pytest.mark.parametrize("name", ["accumulate", "ahead"])
def test_wrong_numbers_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 is below 1"):
        PipelineExecutor([1], device="cpu", **{name: 0})


def test_a_preparation_that_returns_nothing_is_told() -> None:
    """The loop got None for a batch."""
    with (
        PipelineExecutor([1, 2], prepare=lambda number: None, device="cpu") as run,
        pytest.raises(ConfigError, match="prepare returned None"),
    ):
        list(run)
    assert not threads()


@pytest.mark.parametrize("raised", [ValueError, StopIteration])
def test_an_error_of_the_preparation_names_it_and_the_videos(raised: type[Exception]) -> None:
    """It came bare: nobody could tell which batch it was, nor that it was of prepare=."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        if batch["paths"][0] == "8.mp4":
            raise raised("too large")
        return batch

    batches = [{"paths": [f"{first + k}.mp4" for k in range(2)]} for first in (0, 8)]
    with PipelineExecutor(batches, prepare=encode, device="cpu") as run:
        iterator = iter(run)
        next(iterator)
        with pytest.raises(RuntimeError if raised is StopIteration else raised) as caught:
            next(iterator)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(r"raised by prepare=<function .* for batch 1, 8\.mp4, 9\.mp4", told)
    assert not threads()


def test_an_epoch_is_given_to_the_loader() -> None:
    class Loader(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = Loader([1])
    PipelineExecutor(loader, device="cpu").set_epoch(3)
    assert loader.epoch == 3
    with pytest.raises(ConfigError, match="batches is a list, which takes no epoch"):
        PipelineExecutor([1], device="cpu").set_epoch(3)
