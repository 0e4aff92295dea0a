"""Visits prepared ahead: the same clips, the right bytes, no further than allowed, and never in the way."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.config import ClipConfig
from gpupipe.data import index as indices
from gpupipe.data import prepare as room
from gpupipe.data.bytes import LocalFile
from gpupipe.data.bytes import local as bytes_room
from gpupipe.data.decode.feed import PacketFeed, ranges
from gpupipe.data.files import OpenFiles
from gpupipe.data.plan import make_plan
from gpupipe.data.prepare import Prepared, ReadAhead, prepare
from gpupipe.types import ClipRequest, Entry

CLIP = ClipConfig(frames=4, stride=2)
OPTIONS: dict[str, Any] = {"clip": {"frames": 4, "stride": 2}, "transform": {"size": 32}, "batch": 2, "device": "cpu"}

needs_advice = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on files")


def soon(condition: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(position, bytes) of all advice given from now on."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(bytes_room.os, "posix_fadvise", lambda _, at, size, __: given.append((at, size)))
    return given


class Ahead:
    """A ReadAhead over copies of one video, an epoch of as many visits."""

    def __init__(self, path: Path, visits: int, distance: int, *, wanted: bool = True, clip: ClipConfig = CLIP) -> None:
        indices.load(str(path))
        self.requests = [ClipRequest(0, 0, number, number) for number in range(visits)]
        self.asked: list[Prepared] = []
        self.entry = Entry(str(path))

        def wants(prepared: Prepared) -> bool:
            self.asked.append(prepared)
            return wanted

        self.it = ReadAhead(
            self.requests, lambda _: clip, lambda _: self.entry, lambda entry: entry.path, OpenFiles(0), wants, distance
        )

    def __enter__(self) -> Ahead:
        self.it.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.it.abandon()
        self.it.join()


@pytest.mark.parametrize("name", ["h264", "hevc", "vp9", "mpeg4"])
def test_ranges_cover_what_a_feed_reads(name: str, clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    index = indices.load(str(clips[name]))
    plan = make_plan(index, [2, 3, 40, 58])
    reads: list[tuple[int, int]] = []
    original = LocalFile.read_into

    def watched(self: LocalFile, position: int, memory: memoryview) -> int:
        reads.append((position, len(memory)))
        return original(self, position, memory)

    monkeypatch.setattr(LocalFile, "read_into", watched)
    with PacketFeed(index) as feed:
        for run in plan.passes:
            list(feed.packets(run))
    told = ranges(index, plan)
    assert all(any(at <= first and first + size <= at + length for at, length in told) for first, size in reads)
    assert bool(reads) == bool(told) == index.mapped
    ends = [(at, at + length) for at, length in told]
    assert all(end < begin for (_, end), (begin, _) in pairwise(ends)), "ascending, and none touches another"


@needs_advice
def test_advice_comes_in_pieces_that_the_kernel_honours_in_full(tmp_path: Path, advice: list[tuple[int, int]]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with LocalFile(str(path)) as file:
        file.will_need([(10, 300_000), (900_000, 5)])
    assert max(size for _, size in advice) <= 128 << 10
    covered = sorted(advice)
    assert covered[0][0] == 10
    assert [at + size for at, size in covered[:-2]] == [at for at, _ in covered[1:-1]], "without a gap"
    assert sum(size for _, size in advice) == 300_005


@needs_advice
def test_the_kernel_reads_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def resident(position: int) -> bool:
            try:
                return os.preadv(file.fileno(), [bytearray(1)], position, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False
            except OSError:
                pytest.skip("this file system does not say what it holds")

        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if resident(900_000):
            pytest.skip("this file system lies in memory")
    with LocalFile(str(path)) as told:
        told.will_need([(300_000, 650_000)])
    with open(path, "rb") as file:
        assert soon(lambda: all(resident(at) for at in (300_000, 600_000, 900_000, 949_000)))


@needs_advice
def test_visits_are_prepared_as_they_would_be_in_their_turn(clips: dict[str, Path], advice: list[tuple[int, int]]) -> None:
    with Ahead(clips["h264"], 20, 8) as ahead:
        made = []
        for request in ahead.requests:
            assert soon(lambda which=request: which in ahead.it._prepared)  # type: ignore[misc]
            made.append(ahead.it.take(request))
        assert soon(lambda: not ahead.it._thread.is_alive()), "it ends when all is done"
    index = indices.load(str(clips["h264"]))
    assert made == [prepare(CLIP, request, ahead.entry, index) for request in ahead.requests]
    assert len(advice) >= 20


def test_no_visit_is_prepared_too_early_or_twice(clips: dict[str, Path]) -> None:
    with Ahead(clips["h264"], 100, 12) as ahead:
        assert soon(lambda: len(ahead.asked) == 12)
        time.sleep(0.05)
        assert len(ahead.asked) == len(ahead.it._prepared) == 12
        for begun, request in enumerate(ahead.requests[:50], 1):
            ahead.it.take(request)
            assert len(ahead.asked) <= begun + 12
        assert soon(lambda: ahead.it._next + 3 > 50 + 12), "woken for three at a time"
        assert len(ahead.it._prepared) <= 24


def test_a_substitute_does_not_count_as_a_turn(clips: dict[str, Path]) -> None:
    with Ahead(clips["h264"], 100, 8) as ahead:
        assert soon(lambda: len(ahead.asked) == 8)
        for attempt in range(1, 20):
            assert ahead.it.take(ClipRequest(0, 0, 0, 5, attempt)) is None
        time.sleep(0.05)
        assert len(ahead.asked) == 8


@needs_advice
def test_visits_that_read_nothing_are_not_read_ahead(clips: dict[str, Path], advice: list[tuple[int, int]]) -> None:
    with Ahead(clips["h264"], 8, 8, wanted=False) as ahead:
        assert soon(lambda: len(ahead.asked) == 8)
    assert not advice


def test_what_cannot_be_prepared_is_left_for_its_turn(clips: dict[str, Path], tmp_path: Path) -> None:
    with Ahead(clips["h264"], 8, 8, clip=ClipConfig(frames=100, pad="error")) as ahead:
        assert soon(lambda: not ahead.it._thread.is_alive())
        assert not ahead.it._prepared
    path = Path(shutil.copy(clips["h264"], tmp_path / "gone.mp4"))
    ahead = Ahead(path, 8, 8)
    path.unlink()
    with ahead:
        assert soon(lambda: not ahead.it._thread.is_alive())
        assert not ahead.it._prepared


def test_nothing_is_indexed_ahead(clips: dict[str, Path], tmp_path: Path, fresh_cache: Path) -> None:
    """A demux in this process would keep the decode threads from the interpreter lock."""
    path = Path(shutil.copy(clips["h264"], tmp_path / "new.mp4"))
    ahead = Ahead(clips["h264"], 4, 4)
    ahead.entry = Entry(str(path))
    with ahead:
        assert soon(lambda: not ahead.it._thread.is_alive())
        assert not ahead.it._prepared
    assert not indices.known(str(path))


def test_a_thread_that_hangs_in_a_disk_keeps_nobody(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    monkeypatch.setattr(room, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(room.indices, "at_hand", lambda _: hung.wait(20) and None)
    begin = time.monotonic()
    with VideoLoader([clips["h264"]] * 6, **OPTIONS, cache={"read_ahead": 4}) as loader:
        assert len(list(loader)) == 3
    assert time.monotonic() - begin < 10
    hung.set()


@pytest.mark.parametrize("distance", [1, 5, 64])
def test_a_loader_that_reads_ahead_gives_the_same_and_plans_once(
    distance: int, clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.mp4").touch()
    videos = [*(clips[name] for name in ("h264", "vp9", "mpeg4", "hevc")), tmp_path / "empty.mp4"] * 4
    with VideoLoader(videos, **OPTIONS) as loader:
        expected = [batch for _ in range(2) for batch in loader]
        bad = loader.bad_files
    plans: list[Any] = []
    original = room.make_plan
    monkeypatch.setattr(room, "make_plan", lambda *arguments: plans.append(1) or original(*arguments))
    with VideoLoader(videos, **OPTIONS, decode={"threads": 3}, cache={"read_ahead": distance}) as loader:
        ours = [batch for _ in range(2) for batch in loader]
        assert loader.bad_files == bad
    assert all(a.clips == b.clips and torch.equal(a.video, b.video) for a, b in zip(ours, expected, strict=True))
    assert len(plans) <= 40 + 8, "but for those whose turn came while they were prepared"


def test_a_file_that_changes_after_it_was_prepared_is_planned_anew(clips: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    shutil.copy(clips["h264"], path)
    indices.load(str(path))
    options = {**OPTIONS, "decode": {"threads": 1}, "jitter": {"depth": 1}}
    with VideoLoader([path] * 40, **options, cache={"read_ahead": 64}) as loader:
        iterator = iter(loader)
        next(iterator)
        assert soon(lambda: len(loader._run.pipeline._read_ahead._prepared) > 30)  # type: ignore[union-attr]
        shutil.copy(clips["h264_odd"], tmp_path / "other.mp4")
        os.replace(tmp_path / "other.mp4", path)
        rest = list(iterator)
        assert not loader.bad_files
    with VideoLoader([path] * 40, **options) as loader:
        expected = list(loader)
    assert torch.equal(rest[-1].video, expected[-1].video)
