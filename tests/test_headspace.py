"""Batches that are replayed: the same ones as the loader's, at no cost to the run, with nothing at work beside the loop."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import Batch, VideoLoader
from gpupipe.cli import main
from gpupipe.data import headspace as headspaces
from gpupipe.errors import ClosedError, ConfigError, DeviceMemoryError, GpupipeError, OpenError, SourceError
from gpupipe.observe.headspace import headspace, sleeper
from gpupipe.observe.measure import measure
from gpupipe.types import Clip

OPTIONS: dict[str, Any] = {
    "clip": {"frames": 4},
    "transform": {"size": 24, "dtype": "float32"},
    "device": "cpu",
    "batch": 2,
    "decode": {"threads": 2},
    "seed": 5,
}


@pytest.fixture(scope="module")
def rows(clips: dict[str, Path]) -> list[dict[str, Any]]:
    names = ("h264", "vp9_odd", "mpeg4", "h264_odd", "hevc")
    return [{"path": str(clips[names[k % 5]]), "label": k, "caption": f"clip {k}"} for k in range(10)]


@pytest.fixture
def loader(rows: list[dict[str, Any]]) -> Iterator[VideoLoader]:
    with VideoLoader(rows, **OPTIONS, columns=["caption"]) as made:
        yield made


def labels(batches: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


def same(one: Batch, other: Batch) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one) and one.clips == other.clips


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]


def test_the_loaders_next_batches_come_again_and_again(loader: VideoLoader) -> None:
    loader.set_epoch(3)
    with loader.cached(3, steps=7) as cached:
        assert own_threads() == [], "nothing is to compete with the loop"
        replayed = list(cached)
        assert len(replayed) == len(cached) == 7
        assert labels(cached) == labels(replayed), "an iteration begins with the first one"
    first = list(islice(iter(loader), 3))
    assert [batch.epoch for batch in first] == [3] * 3, "taking them was no epoch"
    for k, batch in enumerate(replayed):
        assert same(batch, first[k % 3]), k
        assert (batch.text, batch.epoch, batch.index) == (first[k % 3].text, 3, k % 3)
        assert (batch.state, batch.substituted, batch.share) == ({}, (), 1.0)


def test_without_steps_there_is_no_end(loader: VideoLoader) -> None:
    with loader.cached(2) as cached:
        with pytest.raises(TypeError, match="steps=… says how many"):
            len(cached)
        many = list(islice(cached, 1001))
        assert labels(many[::2]) == labels(many[:1]) * 501
        one, other = iter(cached), iter(cached)
        next(one)
        assert same(next(one), many[1])
        assert same(next(other), many[0]), "iterators do not share a place"
        assert "2 batches" in repr(cached)
        assert (cached.batches, cached.batch_size, str(cached.device)) == (2, 2, "cpu")
        cached.set_epoch(4)
        assert same(next(iter(cached)), many[0])


def test_nothing_is_copied_and_all_is_let_go(loader: VideoLoader) -> None:
    cached = loader.cached(2, steps=4)
    batches = list(cached)
    assert [batch.video.data_ptr() for batch in batches[:2]] == [batch.video.data_ptr() for batch in batches[2:]]
    assert batches[0] is not batches[2], "what a loop does to one batch's columns is not in the next"
    tensors = [tensor for batch in batches[:2] for tensor in batch.values()]
    assert cached.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert cached.nbytes >= 2 * 2 * 3 * 4 * 24 * 24 * 4
    gone = weakref.ref(batches[0].video)
    iterator = iter(cached)
    cached.close()
    cached.close()
    with pytest.raises(ClosedError, match=r"loader\.cached"):
        next(iterator)
    with pytest.raises(ClosedError, match=r"loader\.cached"):
        iter(cached)
    del batches, tensors, iterator
    gc.collect()
    assert gone() is None, "closed ones hold no memory"


def test_the_run_goes_on_as_if_nothing_had_been_taken(loader: VideoLoader, rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS, columns=["caption"]) as other:
        whole, after = labels(other), labels(other)
    iterator = iter(loader)
    taken = labels(islice(iterator, 2))
    state = loader.state_dict()
    cached = loader.cached(2)
    assert labels(islice(cached, 2)) == after[:2], "the next iter() would begin the next epoch"
    with pytest.raises(ClosedError, match="cached"):
        next(iterator)
    assert taken == whole[:2]
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    assert labels(islice(loader.cached(1), 1)) == whole[2:3], "and behind a state, what comes next there"
    assert labels(loader) == whole[2:]
    assert labels(loader) == after


def test_batches_are_taken_over_the_ends_of_epochs(loader: VideoLoader, rows: list[dict[str, Any]]) -> None:
    with loader.cached(12, steps=12) as cached:
        assert [batch.epoch for batch in cached] == [0] * 5 + [1] * 5 + [2] * 2
    with VideoLoader(rows, **OPTIONS, repeat=True) as endless, endless.cached(7, steps=7) as cached:
        assert [batch.epoch for batch in cached] == [0] * 5 + [1] * 2


@pytest.mark.parametrize("size", [2, "auto"])
def test_steps_in_parts_are_whole(rows: list[dict[str, Any]], size: Any) -> None:
    """Else the shares of a step's parts would not add up to one."""
    options = OPTIONS | {"batch": {"size": 5, "micro_size": size}}
    with VideoLoader(rows, **options) as loader:
        parts = len({batch.part for batch in islice(loader, 3) if batch.index == 0})
        with loader.cached(parts + 1, steps=4 * parts) as cached:
            assert cached.batches == 2 * parts
            done, share = 0, 0.0
            guard = cached.step_guard(lambda: None)
            for batch in cached:
                with guard as step:
                    share += batch.share
                assert not step.failed
                if step.done:
                    assert share == pytest.approx(1)
                    done, share = done + 1, 0.0
            assert done == 4
            assert cached.nbytes < 2 * 5 * 3 * 4 * 24 * 24 * 4 * 1.5, "parts are views: their memory counts once"
        with pytest.raises(ValueError, match="mine"), loader.cached(1).step_guard(lambda: None) as step:
            raise ValueError("mine")
        assert not step.done


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((0,), "batches=0"), ((True,), "batches=True"), ((2.5,), r"batches=2\.5"), ((2, 0), "steps=0"), ((2, "x"), "steps='x'")],
)
def test_numbers_that_count_nothing_are_refused(loader: VideoLoader, arguments: tuple[Any, ...], says: str) -> None:
    steps = {"steps": arguments[1]} if len(arguments) > 1 else {}
    with pytest.raises(ConfigError, match=says):
        loader.cached(arguments[0], **steps)
    assert own_threads() == []


def test_more_than_fits_is_refused_behind_the_first(loader: VideoLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the machine is out of memory, with the number that would do."""
    with loader.cached(1) as cached:
        one = cached.nbytes
    monkeypatch.setattr(headspaces, "_free_bytes", lambda device: 3 * one + 1)
    with pytest.raises(DeviceMemoryError, match=r"5 steps .* do not fit on cpu(.|\n)*take at most 4"):
        loader.cached(5)
    assert own_threads() == []
    with loader.cached(4, steps=4) as cached:
        assert len(list(cached)) == 4
    assert len(list(loader)) == 5


def test_what_the_loader_raises_leaves_no_thread_and_no_step_behind(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    bad = [*rows[:4], {"path": str(tmp_path / "bad.mp4"), "label": 9, "caption": ""}, rows[5]]
    with VideoLoader(bad, **OPTIONS, shuffle=False, on_bad_file="raise") as loader:
        state = loader.state_dict()
        with pytest.raises(OpenError, match=r"bad\.mp4"):
            loader.cached(3)
        assert own_threads() == []
        kept = loader.state_dict()
        assert {k for k in state if state[k] != kept[k]} <= {"bad_files"}, "only what is known of files"
    with pytest.raises(ClosedError, match="is closed"):
        loader.cached(1)


def test_a_call_inside_of_a_transform_is_an_error_and_no_deadlock(rows: list[dict[str, Any]]) -> None:
    def inside(clip: Clip) -> torch.Tensor:
        loader.cached(1)
        return clip.video

    with (
        VideoLoader(rows, **OPTIONS, before=inside) as loader,
        pytest.raises(GpupipeError, match=r"cached\(\) of a VideoLoader"),
    ):
        next(iter(loader))


# What is made of it


def test_data_that_is_slower_than_the_step_costs_what_it_is_slower(rows: list[dict[str, Any]]) -> None:
    """A loader that takes at least 60 ms a batch, in a loop whose steps take 5 ms."""
    gate = threading.Event()

    def slow(clip: Clip) -> torch.Tensor:
        gate.wait(0.06)
        return clip.video

    options = OPTIONS | {"decode": {"threads": 1}}
    with VideoLoader(rows * 2, **options, before=slow, jitter={"depth": 1}) as loader:
        measured = measure(loader, clips=12, step=sleeper(0.005))
        seen: list[int] = []
        found = headspace(loader, measured, 0.005, progress=lambda done, passed: seen.append(done))
        assert own_threads() == []
    assert (found.steps, found.cached_batches, seen) == (5, 4, [1, 2, 3, 4, 5, 6])
    assert found.loader_step_seconds > 0.06 > found.cached_step_seconds >= 0.005
    assert found.cost_percent == pytest.approx(100 * (found.loader_step_seconds / found.cached_step_seconds - 1))
    assert found.cached_bytes > 0
    with pytest.raises(SourceError, match="measure longer"):
        headspace(loader, replace(measured, batch_ends=(1.0,)), 0.005)


def test_bench_tells_what_data_costs(clips: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--frames", "2", "--size", "16", "--batch", "2", "--device", "cpu", "--clips", "12", "--headspace", "3"]

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["bench", str(clips["h264"]), *small, *arguments])
        return int(left.value.code or 0), capsys.readouterr().out

    code, out = run("--json")
    found = json.loads(out)["headspace"]
    assert code == 0
    assert (found["stand_in_seconds"], found["steps"], found["cached_batches"]) == (0.003, 5, 4)
    assert found["loader_step_seconds"] >= 0.003 <= found["cached_step_seconds"]
    shown = run()[1]
    assert "step with data that is there" in shown
    assert "of a step that sleeps 3 ms in place of training" in shown
    assert run("--headspace", "0")[0] == 1
