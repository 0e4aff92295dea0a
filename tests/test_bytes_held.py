"""Videos that the program holds: bytes, binary files and functions in the place of a path."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader, VideoReader
from gpupipe.config import SourceConfig
from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, held, open_file
from gpupipe.data.decode import DecodeProcess
from gpupipe.data.decode.cpu import decode
from gpupipe.data.plan import make_plan
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.data.source import collect
from gpupipe.device.doing import doing
from gpupipe.errors import OpenError, SourceError

OPTIONS: dict[str, Any] = {"clip": {"frames": 4}, "transform": {"size": 32}, "batch": 2, "device": "cpu", "shuffle": False}


def test_bytes_have_the_pixels_of_their_file(clips: dict[str, Path]) -> None:
    data = clips["vp9"].read_bytes()
    with VideoReader(clips["vp9"], device="cpu") as plain, open(clips["vp9"], "rb") as file:
        for video in (data, bytearray(data), memoryview(data), io.BytesIO(data), file):
            with VideoReader(video, device="cpu") as ours:  # type: ignore[arg-type]
                assert torch.equal(ours.frames([0, 59]), plain.frames([0, 59]))
        with VideoReader(data, device="cpu") as ours, pickle.loads(pickle.dumps(ours)) as copy:
            assert torch.equal(copy.frames([5]), plain.frames([5]))


def test_a_loader_takes_bytes_beside_paths(clips: dict[str, Path]) -> None:
    paths = [clips["h264"], clips["vp9"]]
    with VideoLoader(paths, **OPTIONS) as loader:
        (expected,) = [batch["video"] for batch in loader]
    data = [path.read_bytes() for path in paths]
    for videos in ([data[0], paths[1]], [{"path": data[0], "label": 1}, {"path": io.BytesIO(data[1]), "label": 2}]):
        for decode_by in ({}, {"cpu_workers": 1}):
            with VideoLoader(videos, **OPTIONS, decode=decode_by) as loader:
                (ours,) = list(loader)
                assert loader.bad_files == {}
            assert torch.equal(ours["video"], expected)


def test_a_function_is_asked_when_its_video_is_needed(clips: dict[str, Path], fresh_cache: Path) -> None:
    calls: list[int] = []

    def fetch() -> bytes:
        calls.append(1)
        return clips["h264"].read_bytes()

    video = held.hold(fetch, "set/17")
    assert (video.name, calls) == ("held://set/17", [])
    assert indices.load(video.name).info.frames == 60
    assert len(calls) == 1, "the identity, the index and the packets are made of one answer"
    other = held.hold(clips["vp9"].read_bytes(), "set/17")
    assert other.name == "held://set/17~2", "two that live at once have names of their own"
    assert indices.load(other.name).info.codec == "vp9"


def test_other_bytes_are_another_video(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["h264", "hevc", "hevc"])
    video = held.hold(lambda: clips[next(names)].read_bytes(), "changing")
    monkeypatch.setattr(held, "_MOST_BYTES", 0)
    before = Identity.of(video.name)
    keep = held.hold(lambda: b"pushes the other out", "other")
    Identity.of(keep.name)
    assert Identity.of(video.name) != before
    Identity.of(keep.name)
    assert not open_file(video.name).is_still(before)


def test_processes_get_held_bytes(clips: dict[str, Path], fresh_cache: Path) -> None:
    video = held.hold(clips["h264"].read_bytes())
    scanner, process = ScanProcess(), DecodeProcess()
    try:
        index = indices.load(video.name, scanner.make)
        ours, expected = process.decode(index, make_plan(index, [3, 40])), decode(index, make_plan(index, [3, 40]))
        assert all(torch.equal(a, b) for a, b in zip(ours.parts, expected.parts, strict=True))
    finally:
        scanner.close()
        process.close()


def test_a_scan_has_its_whole_time_however_long_the_bytes_take(
    clips: dict[str, Path], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = clips["h264"].read_bytes()
    video = held.hold(lambda: time.sleep(3) or data, "slow", like=data)
    monkeypatch.setattr("gpupipe.data.scan.worker._LIMIT_SECONDS", 2.0)
    monkeypatch.setattr("gpupipe.data.child._ASK_SECONDS", 0.0)
    scanner = ScanProcess()
    try:
        assert scanner.start()
        assert scanner.make(Identity.of(video.name))[1] == ""
    finally:
        scanner.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="bytes are lent in a file")
def test_bytes_that_cannot_be_lent_end_no_process(
    clips: dict[str, Path], fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> int:
        raise OSError(24, "Too many open files")

    video = held.hold(clips["h264"].read_bytes())
    monkeypatch.setattr(os, "memfd_create", refused)
    scanner = ScanProcess()
    try:
        made = scanner.make_all([Identity.of(video.name), Identity.of(str(clips["vp9"]))])
        assert [one is None for one in made] == [True, False]
    finally:
        scanner.close()


def test_a_name_lives_as_long_as_what_keeps_it(clips: dict[str, Path]) -> None:
    entries = collect([clips["h264"].read_bytes()], SourceConfig())
    name = entries[0].path
    assert Identity.of(name).size_bytes == clips["h264"].stat().st_size
    del entries
    gc.collect()
    assert name not in held._fetched, "nor does it keep the bytes"
    with pytest.raises(OpenError, match=f"{name} is held no more"):
        Identity.of(name)


def test_the_same_bytes_are_one_video(clips: dict[str, Path]) -> None:
    """Else a state or an index would depend on which loaders are alive, and a pickle would double them."""
    data = clips["h264"].read_bytes()
    video = held.hold(data)
    assert held.hold(bytearray(data)) is video
    assert held.hold(video) is video
    assert pickle.loads(pickle.dumps(video)) is video
    mine = held.hold(data, "mine")
    other, again = held.hold(b"other", "mine"), held.hold(lambda: data, "mine", like=data)
    assert (mine.name, other.name, again.name) == ("held://mine", "held://mine~2", "held://mine")
    del mine
    with open_file(again.name) as file:
        assert file.read(0, 64) == data[:64], "the other one still has it"


def test_a_video_that_was_given_before_is_known_without_a_call(clips: dict[str, Path]) -> None:
    answers = [clips["vp9"].read_bytes()]
    video = held.hold(lambda: answers.pop(), "known", like=clips["h264"].read_bytes())
    assert Identity.of(video.name).size_bytes == clips["h264"].stat().st_size
    assert len(answers) == 1
    with pytest.raises(OpenError, match="held://known gives other bytes than before"):
        indices.load(video.name)


def test_a_held_video_that_hangs_is_named() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def fetch() -> bytes:
        asked.set()
        go_on.wait(60)
        return b"x"

    video = held.hold(fetch, "slow")
    thread = threading.Thread(target=Identity.of, args=(video.name,))
    thread.start()
    assert asked.wait(60)
    at = doing(thread)
    go_on.set()
    thread.join()
    assert at is not None
    assert at[:2] == ("bytes", "held://slow")


def test_what_gives_no_bytes_is_named() -> None:
    def fail() -> bytes:
        raise KeyError("row 17")

    broken, wrong = held.hold(fail, "broken"), held.hold(lambda: "text", "wrong")
    with pytest.raises(OpenError, match=r"held://broken cannot be had: KeyError: 'row 17'"):
        Identity.of(broken.name)
    with pytest.raises(OpenError, match=r"held://wrong is str, not bytes"):
        Identity.of(wrong.name)
    with pytest.raises(OpenError, match="needs a label"):
        held.hold(fail)
    with pytest.raises(SourceError, match="cannot be read"):
        collect([io.FileIO(1, "w", closefd=False)], SourceConfig())
    with pytest.raises(OpenError, match=r"held://\w+ cannot be opened as a video"):
        VideoReader(b"no video at all", device="cpu")
