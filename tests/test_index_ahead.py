"""Indexing ahead, in processes: the same indices, bad files left for their turn, and nothing that stays behind."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from gpupipe.data import index
from gpupipe.data.bytes import Identity
from gpupipe.data.index import build, cache
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.errors import OpenError


@pytest.fixture
def videos(clips: dict[str, Path], tmp_path: Path, fresh_cache: Path) -> list[str]:
    """Four videos that nobody has indexed, a bad one among them."""
    (tmp_path / "1.mp4").touch()
    return [str(tmp_path / "1.mp4") if k == 1 else shutil.copy(clips["h264"], tmp_path / f"{k}.mp4") for k in range(4)]


def test_a_process_makes_the_same_index_and_survives_a_bad_file(videos: list[str]) -> None:
    process = ScanProcess()
    assert process.start()
    with pytest.raises(OpenError, match=r"1\.mp4"):
        process.scan(Identity.of(videos[1]))
    identity = Identity.of(videos[0])
    assert cache.serialise(build.build(identity, process.scan)) == cache.serialise(build.build(identity))
    process.close()
    process.close()


def test_a_process_that_died_is_an_error_and_leaves_no_zombie(videos: list[str]) -> None:
    process = ScanProcess()
    assert process.start()
    child = process._process
    assert child is not None
    child.kill()
    child.wait()
    for _ in range(2):
        with pytest.raises(OpenError, match="scanning process ended"):
            process.scan(Identity.of(videos[0]))
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_ended_before_it_starts(videos: list[str]) -> None:
    process = ScanProcess()
    process.end()
    assert not process.start()
    process.close()


def test_what_lies_ahead_is_indexed_and_bad_files_wait_for_their_turn(videos: list[str]) -> None:
    ahead = IndexAhead([videos[0], videos[0], *videos[1:]], workers=2, skip=1)
    for thread in ahead.threads:
        thread.join(30)
        assert not thread.is_alive(), "the list is done"
    assert [index.known(path) for path in videos if path != videos[1]] == [False, True, True], "the first is left out"
    with pytest.raises(OpenError, match="cannot be opened"):
        index.load(videos[1])


def test_collection_while_room_is_made_does_not_lock_up() -> None:
    """Garbage collection may abandon the work in a thread that holds the lock of advance()."""
    ahead = IndexAhead([], workers=1, skip=0)
    with ahead._changed:
        ahead.abandon()
    for thread in ahead.threads:
        thread.join(5)
        assert not thread.is_alive()


def test_abandoning_ends_threads_and_processes_at_once(videos: list[str]) -> None:
    ahead = IndexAhead(videos, workers=2, skip=0)
    time.sleep(0.02)
    begin = time.monotonic()
    ahead.abandon()
    for thread in ahead.threads:
        thread.join(5)
        assert not thread.is_alive()
    assert time.monotonic() - begin < 2
