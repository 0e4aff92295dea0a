"""A loop that gets no batch hears which stage starves it, and can close the loader all the same."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.data import pipeline
from gpupipe.data.decode import cpu
from gpupipe.data.starving import starved
from gpupipe.data.transform import ClipTransform
from gpupipe.device.doing import Doing, at, doing
from gpupipe.errors import ClosedError, ConfigError, GpupipeError, StarvedError
from gpupipe.types import Clip

SMALL: dict[str, Any] = {
    "clip": {"frames": 4},
    "transform": {"size": 16, "dtype": "float32"},
    "device": "cpu",
    "batch": 2,
    "decode": {"threads": 2},
}
SOON = 0.3
"""Seconds after which the loops of these tests have waited long enough."""


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What hangs in a test waits for this, which comes at its end."""
    monkeypatch.setattr(pipeline, "_HUNG_SECONDS", 0.2)
    event = threading.Event()
    yield event
    event.set()


def hangs(event: threading.Event, original: Callable[..., Any], begun: threading.Event) -> Callable[..., Any]:
    """The same function, which waits for ``event`` at first."""

    def function(*arguments: Any, **named: Any) -> Any:
        begun.set()
        event.wait(60)
        return original(*arguments, **named)

    return function


def starves(loader: VideoLoader) -> StarvedError:
    """The error of a loop that gets no batch; the loader is closed by then, in a time that is bounded."""
    iterator = iter(loader)
    begin = time.monotonic()
    with pytest.raises(StarvedError) as caught:
        list(iterator)
    with pytest.raises(ClosedError, match="no batch came within"):
        next(iterator)
    loader.close()
    assert time.monotonic() - begin < 20, "it does not wait for what hangs"
    return caught.value


STAGES: dict[str, tuple[Any, str, str]] = {
    "index": (pipeline, "make", r"indexing 2 visits, the longest for \d+\.\d s, in .*\.mp4"),
    "decode": (cpu, "decode", "decoding 2 visits"),
    "transform": (ClipTransform, "apply_batch", "transforming 2 visits"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_that_hangs_is_named_with_its_file(
    stage: str, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, released: threading.Event, fresh_cache: Path
) -> None:
    place, name, words = STAGES[stage]
    monkeypatch.setattr("gpupipe.data.index._indices", type(pipeline.indices._indices)())  # none is known yet
    monkeypatch.setattr(place, name, hangs(released, getattr(place, name), threading.Event()))
    error = starves(VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=SOON))
    assert error.message.startswith("no batch came within 0.3 s: ")
    assert error.path == str(clips["h264"])
    assert str(clips["h264"]) in error.message
    assert re.search(words, error.message), error.message
    assert error.fix


def test_a_disk_that_does_not_answer_is_named(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(os, "preadv", hangs(released, os.preadv, threading.Event()))
    error = starves(VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=SOON))
    assert "waiting for bytes of 2 visits" in error.message
    assert "read_ahead" in (error.fix or "")


def test_threads_that_index_ahead_are_not_waited_for_either(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, released: threading.Event, fresh_cache: Path
) -> None:
    """On a GPU machine they do, and a disk that hangs has them first."""
    monkeypatch.setattr("gpupipe.data.index._indices", type(pipeline.indices._indices)())
    monkeypatch.setattr("gpupipe.data.loader.index_workers", lambda device: 1)
    monkeypatch.setattr(pipeline.indices, "known", hangs(released, pipeline.indices.known, threading.Event()))
    error = starves(VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=SOON))
    assert "indexing 2 visits" in error.message


@pytest.mark.parametrize("name", ["before", "after"])
def test_a_transform_of_the_users_own_is_named(name: str, clips: dict[str, Path], released: threading.Event) -> None:
    def stuck(clip: Clip) -> None:
        released.wait(60)

    error = starves(VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=SOON, **{name: stuck}))  # type: ignore[arg-type]
    assert f"your transform {name}= on 2 visits" in error.message
    assert "does it wait for something" in (error.fix or "")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
def test_a_process_that_stands_still_is_named(clips: dict[str, Path], released: threading.Event) -> None:
    options = {**SMALL, "decode": {"cpu_workers": 1}, "jitter": {"depth": 1}}
    loader = VideoLoader([clips["h264"]] * 40, **options, timeout_seconds=60)
    iterator = iter(loader)
    next(iterator)
    child = loader._job.engines[0]._process._child._process  # type: ignore[union-attr]
    os.kill(child.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    loader._job.config = loader._job.config.model_copy(update={"timeout_seconds": SOON})
    with pytest.raises(StarvedError, match=r"decoding 1 visit, for .* s, in .*\.mp4"):
        list(iterator)
    loader.close()


def test_only_what_hangs_is_waited_for_no_longer(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    """After the error the same loader goes on with another epoch, to the same bits."""
    with VideoLoader([clips["h264"]] * 8, **SMALL) as reference:
        expected = [batch.video for batch in reference]
    hang = threading.Event()
    original = cpu.decode
    monkeypatch.setattr(cpu, "decode", hangs(hang, original, threading.Event()))
    with VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=SOON) as loader:
        with pytest.raises(StarvedError):
            next(iter(loader))
        monkeypatch.setattr(cpu, "decode", original)
        loader._job.config = loader._job.config.model_copy(update={"timeout_seconds": 60})
        loader.set_epoch(0)
        assert all(torch.equal(ours.video, theirs) for ours, theirs in zip(loader, expected, strict=True))
        hang.set()
        loader.set_epoch(0)
        assert all(torch.equal(ours.video, theirs) for ours, theirs in zip(loader, expected, strict=True)), (
            "the threads that came back have spoilt nothing"
        )


def test_a_loop_that_is_slow_itself_is_not_starved(clips: dict[str, Path]) -> None:
    """The time counts from next() on."""
    with VideoLoader([clips["h264"]] * 8, **SMALL, timeout_seconds=5) as loader:
        iterator = iter(loader)
        next(iterator)
        loader._job.config = loader._job.config.model_copy(update={"timeout_seconds": 0.05})
        assert loader._pipeline is not None
        deadline = time.monotonic() + 20
        while loader.stats()["occupancy"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(list(iterator)) == 3


def test_bad_files_that_are_skipped_are_no_silence(clips: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    videos = [clips["h264"]] * 2 + [tmp_path / "empty.mp4"] * 20 + [clips["h264"]] * 2
    with VideoLoader(videos, **SMALL, shuffle=False, on_bad_file="skip", timeout_seconds=20) as loader:
        assert len(list(loader)) == 2


def test_the_time_is_checked() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds"):
        VideoLoader(["a.mp4"], timeout_seconds=0)
    with pytest.raises(ConfigError) as caught:
        VideoLoader(["a.mp4"], timeout=5)
    assert "timeout_seconds" in str(caught.value)


# The words


def test_all_stages_are_told_the_one_that_lasts_longest_first() -> None:
    decoding = [Doing("decode", "a.mp4", 1.0), Doing("decode", "c.mp4", 0.5)]
    error = starved(2.5, [Doing("index", "b.mp4", 8.0), None, *decoding, Doing("polish", None, 9.0)], now=10.0)
    assert error.message == (
        "no batch came within 2.5 s: decoding 2 visits, the longest for 9.5 s, in c.mp4; "
        "indexing 1 visit, for 2.0 s, in b.mp4; polish of 1 visit, for 1.0 s"
    )
    assert (error.path, error.code) == ("c.mp4", "TT_ERR_STARVED")
    assert "decode.limit_seconds" in (error.fix or "")


def test_where_no_thread_is_at_work_it_says_so() -> None:
    assert "none of the 3 threads is at work" in starved(1.0, [None] * 3, now=0.0).message


def test_it_is_a_timeout_for_those_who_catch_these() -> None:
    assert issubclass(StarvedError, TimeoutError)
    assert issubclass(StarvedError, GpupipeError)


def test_a_thread_is_at_the_innermost_stage_and_then_at_the_outer_one_again() -> None:
    me = threading.current_thread()
    assert doing(me) is None
    with at("decode", "a.mp4"):
        outer = doing(me)
        with suppress(KeyError), at("bytes", "b.mp4"):
            inner = doing(me)
            raise KeyError
        assert inner is not None
        assert inner[:2] == ("bytes", "b.mp4")
        assert doing(me) is outer
    assert doing(me) is None
    assert doing(None) is None
    assert doing(threading.Thread()) is None
