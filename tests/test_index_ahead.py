"""Indexing ahead, in processes: the same indices, bad files left for their turn, and nothing that stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpupipe.data import index
from gpupipe.data.bytes import Identity
from gpupipe.data.bytes.held import hold
from gpupipe.data.child import Child
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.index.fill import fill
from gpupipe.data.scan import store
from gpupipe.data.scan.worker import ScanProcess, _tell_of_the_late
from gpupipe.data.stop import Stop
from gpupipe.errors import OpenError


@pytest.fixture
def videos(clips: dict[str, Path], tmp_path: Path, fresh_cache: Path) -> list[str]:
    """Four videos that nobody has indexed, a bad one among them."""
    (tmp_path / "1.mp4").touch()
    return [str(tmp_path / "1.mp4") if k == 1 else str(shutil.copy(clips["h264"], tmp_path / f"{k}.mp4")) for k in range(4)]


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started from now on: each is stopped at once, so that it gets ready no more than it ends."""
    made: list[subprocess.Popen[bytes]] = []
    original = Child._started

    def start(child: Child) -> subprocess.Popen[bytes]:
        process = original(child)
        if process not in made:
            process.send_signal(signal.SIGSTOP)
            made.append(process)
        return process

    monkeypatch.setattr(Child, "_started", start)
    _tell_of_the_late.cache_clear()
    return made


def started(paths: list[str], workers: int, first: int = 0) -> IndexAhead:
    ahead = IndexAhead(paths, workers, first)
    ahead.start()
    return ahead


def ended(ahead: IndexAhead) -> None:
    """Waits for the threads that were started."""
    for thread in ahead.threads:
        if thread.ident is not None:
            thread.join(10)
            assert not thread.is_alive()


def test_a_process_makes_the_same_index_and_survives_a_bad_file(videos: list[str]) -> None:
    process = ScanProcess()
    assert process.start()
    with pytest.raises(OpenError, match=r"1\.mp4"):
        process.make(Identity.of(videos[1]))
    identity = Identity.of(videos[0])
    there = process.make(identity)
    assert index.cached(identity) is not None, "stored by the process"
    assert there == store.make(identity)
    assert there[1] == ""
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
            process.make(Identity.of(videos[0]))
    assert process.make_all([]) == [], "as where all files are gone"
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_ended_before_it_starts(videos: list[str]) -> None:
    process = ScanProcess()
    process.end()
    assert not process.start()
    process.close()


def test_what_lies_ahead_is_indexed_and_bad_files_wait_for_their_turn(videos: list[str]) -> None:
    ahead = started([videos[0], videos[0], *videos[1:]], workers=2)
    ended(ahead)
    assert [index.known(path) for path in videos if path != videos[1]] == [True] * 3
    with pytest.raises(OpenError, match="cannot be opened"):
        index.load(videos[1])


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_the_first_videos_are_indexed_here_and_told_of_together(
    seconds: float, videos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    released = threading.Event()

    def watched(identity: Identity, stop: Stop) -> tuple[bytes, str]:
        made.append(identity.path)
        assert identity.path != videos[2] or released.wait(60)
        return store.make(identity, stop)

    monkeypatch.setattr("gpupipe.data.index.ahead.make", watched)
    monkeypatch.setattr("gpupipe.data.index.ahead._BEGIN_SECONDS", seconds)
    monkeypatch.setattr(ScanProcess, "heard", False)
    monkeypatch.setattr(ScanProcess, "start", lambda *_: released.wait(60) and False)
    ahead = IndexAhead(videos, workers=2, first=3)
    waiting = threading.Thread(target=ahead.wait_for, args=(videos[0],))
    waiting.start()
    waiting.join(0.1)
    ahead.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it is told when all three are done"
    released.set()
    for path in videos:
        ahead.wait_for(path)
    assert made == (videos if seconds else []), "until a process is ready"
    waiting.join(10)
    assert not waiting.is_alive()
    ended(ahead)


@pytest.mark.parametrize("own", [True, False])
def test_a_process_takes_over_once_it_is_ready(own: bool, videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for first goes to whoever is ready first, that of the thread which indexes here or another."""
    begun = threading.Event()
    here: list[str] = []

    def watched(identity: Identity, stop: Stop) -> tuple[bytes, str]:
        here.append(identity.path)
        begun.set()
        until = time.monotonic() + 60
        while not own and not any(process.ready for process in ahead._processes) and time.monotonic() < until:
            time.sleep(0.001)
        return store.make(identity, stop)

    start = ScanProcess.start

    def late(process: ScanProcess, stop: Stop) -> bool:
        assert begun.wait(60)
        return (own or process is not ahead._processes[0]) and start(process, stop)

    monkeypatch.setattr("gpupipe.data.index.ahead.make", watched)
    monkeypatch.setattr(ScanProcess, "heard", property(lambda _: own and begun.is_set()))
    monkeypatch.setattr(ScanProcess, "start", late)
    ahead = IndexAhead(videos, workers=2, first=4)
    ahead.start()
    ended(ahead)
    assert here == videos[:1]
    assert [index.in_memory(path) for path in videos] == [True, False, True, True]


def test_a_process_is_asked_for_several_videos_while_there_are_enough(
    clips: dict[str, Path], tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = [str(shutil.copy(clips["h264"], tmp_path / f"{k}.mp4")) for k in range(12)]
    asked: list[int] = []
    make_all = ScanProcess.make_all

    def watched(process: ScanProcess, identities: Sequence[Identity]) -> list[tuple[bytes, str] | None]:
        asked.append(len(identities))
        return make_all(process, identities)

    monkeypatch.setattr(ScanProcess, "make_all", watched)
    ended(started(videos, workers=1))
    assert asked == [1, 2, 4, 4, 1]
    assert all(index.in_memory(path) for path in videos)
    index._indices.clear()
    for file in fresh_cache.rglob("*.gpx"):
        file.unlink()
    asked.clear()
    ended(started(videos, workers=4))
    assert max(asked) <= 2, "each has a share"


def test_a_bad_video_is_alone_to_fail_among_those_asked_for_together(videos: list[str]) -> None:
    held = hold(lambda: 1 / 0, "gone", like=b"something")
    process = ScanProcess()
    assert process.start()
    identities = [*map(Identity.of, videos), Identity(held.name, 9, 0, "digest")]
    made = process.make_all(identities)
    assert [one is None for one in made] == [False, True, False, False, True]
    assert made[0] == store.make(identities[0])
    process.close()


def test_what_is_needed_first_is_made_first_whoever_gave_it_back(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads whose processes are not ready give back one video each, that of the first turn before the others."""
    ahead = IndexAhead(videos, workers=4)
    looking: set[str] = set()
    ready: list[ScanProcess] = []
    released = threading.Event()
    made: list[str] = []

    def known(path: str) -> bool:
        if threading.current_thread() is not ahead.threads[0] and not released.is_set():
            looking.add(path)
            while len(looking) < 3 or len(ahead._left) != videos.index(path):
                time.sleep(0.001)
        return False

    def start(process: ScanProcess, stop: Stop) -> bool:
        assert released.wait(60)
        if not ready:
            ready.append(process)
        return process in ready

    def make_all(process: ScanProcess, identities: Sequence[Identity]) -> list[None]:
        made.extend(identity.path for identity in identities)
        return [None] * len(identities)

    monkeypatch.setattr(index, "known", known)
    monkeypatch.setattr(ScanProcess, "start", start)
    monkeypatch.setattr(ScanProcess, "ready", property(ready.__contains__))
    monkeypatch.setattr(ScanProcess, "make_all", make_all)
    ahead.start()
    while len(ahead._left) < 3:
        time.sleep(0.001)
    released.set()
    ended(ahead)
    assert made == videos


def test_videos_that_take_long_are_asked_for_one_by_one(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those asked for together is told of before all are done, and who waits for the first has patience for one."""
    asked: list[int] = []

    def slow(process: ScanProcess, identities: Sequence[Identity]) -> list[None]:
        asked.append(len(identities))
        time.sleep(0.1 * len(identities))
        return [None] * len(identities)

    monkeypatch.setattr("gpupipe.data.index.ahead._SOON_SECONDS", 0.05)
    monkeypatch.setattr(ScanProcess, "make_all", slow)
    ended(started(videos, workers=1))
    assert asked == [1, 1, 1, 1]


def test_only_the_new_ones_of_a_first_batch_are_told_of_together(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    index.load(videos[0])
    released = threading.Event()

    def watched(identity: Identity, stop: Stop) -> tuple[bytes, str]:
        assert identity.path != videos[2] or released.wait(60)
        return store.make(identity, stop)

    monkeypatch.setattr("gpupipe.data.index.ahead.make", watched)
    monkeypatch.setattr("gpupipe.data.index.ahead._BEGIN_SECONDS", 60.0)
    monkeypatch.setattr(ScanProcess, "heard", False)
    ahead = started(videos, workers=1, first=2)
    waiting = threading.Thread(target=ahead.wait_for, args=(videos[1],))
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive(), "the second one of two was the only one to be made"
    released.set()
    ended(ahead)


def test_as_many_processes_as_videos(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = started(videos[2:], workers=4)
    ended(ahead)
    assert [thread.ident is None for thread in ahead.threads] == [False, False, True, True]


def test_no_process_is_started_while_all_indices_are_there(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = [videos[0], *videos[2:]]
    ended(started(good, workers=2))
    index._indices.clear()  # a later process
    monkeypatch.setattr(ScanProcess, "start", lambda *_: pytest.fail("a process was started"))
    ahead = started(good, workers=2, first=2)
    ended(ahead)
    assert [thread.ident is None for thread in ahead.threads] == [False, True]
    assert all(index.in_memory(path) for path in good)


def test_new_videos_behind_known_ones_are_made_by_processes(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    index.load(videos[0])
    monkeypatch.setattr("gpupipe.data.index.ahead.make", lambda *_, **__: pytest.fail("it was made here"))
    ahead = started([videos[0], videos[2], videos[3]], workers=2, first=1)
    for path in videos[2:]:
        ahead.wait_for(path)
        assert index.in_memory(path)
    ended(ahead)


def test_collection_while_room_is_made_does_not_lock_up() -> None:
    """Garbage collection may abandon the work in a thread that holds the lock of advance()."""
    ahead = started([], workers=1)
    with ahead._changed:
        ahead.abandon()
    ended(ahead)


def test_abandoning_ends_threads_and_processes_at_once(videos: list[str]) -> None:
    ahead = started(videos, workers=2)
    time.sleep(0.02)
    begin = time.monotonic()
    ahead.abandon()
    ended(ahead)
    assert time.monotonic() - begin < 8


def test_a_process_tells_why_a_record_was_not_stored(
    videos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUPIPE_CACHE", str(tmp_path / "1.mp4" / "below"))
    ahead = started(videos, workers=1)
    for path in videos:
        ahead.wait_for(path)
    assert "indices are not kept" in caplog.text
    assert index._remembered(Identity.of(videos[0])) is not None
    ahead.abandon()
    ended(ahead)


def test_waiting_ends_when_an_index_is_there_or_nobody_makes_it(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = started(videos, workers=2)
    for path in videos:
        ahead.wait_for(path)
        assert path == videos[1] or index._remembered(Identity.of(path)) is not None
    ahead.wait_for("/not/of/this/list.mp4")
    ended(ahead)
    started(videos, workers=0).wait_for(videos[0])


def test_waiting_ends_when_the_processes_cannot_be_had(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.data.child.sys.executable", "/no/such/python")
    ahead = started(videos, workers=2)
    for path in videos:
        ahead.wait_for(path)
    assert index.load(videos[0]).info.frames == 60, "made here instead"
    ahead.abandon()
    ended(ahead)


def test_a_worker_whose_process_died_leaves_the_rest_to_the_others(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own video is given up at once, and it takes no further one."""
    taken: list[str] = []

    def dying(process: ScanProcess, identities: Sequence[Identity]) -> list[tuple[bytes, str] | None]:
        taken.extend(identity.path for identity in identities)
        process.end()
        raise OpenError("it died", path=taken[-1])

    monkeypatch.setattr(ScanProcess, "make_all", dying)
    ahead = started(videos, workers=1)
    for path in videos:
        ahead.wait_for(path)
    assert taken == videos[:1]
    ended(ahead)


def test_what_lies_far_ahead_is_not_waited_for(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute for a bad file may come from anywhere in the list."""
    monkeypatch.setattr("gpupipe.data.index.ahead._AHEAD", 1)
    ahead = started(videos, workers=1)
    ahead.wait_for(videos[3])
    assert index._remembered(Identity.of(videos[3])) is None
    ahead.abandon()
    ended(ahead)


def test_a_process_does_not_import_what_lies_in_the_working_directory(
    videos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base64.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    process = ScanProcess()
    assert process.start()
    assert process.make(Identity.of(videos[0]))[1] == ""
    process.close()


def test_a_process_that_is_ended_leaves_no_part_of_a_file(videos: list[str], fresh_cache: Path) -> None:
    for round_number in range(12):
        ahead = started(videos, workers=2)
        ahead.wait_for(videos[0])
        time.sleep(0.001 * round_number)
        ahead.abandon()
        ended(ahead)
        assert not list(fresh_cache.rglob("*.part"))
        for file in fresh_cache.rglob("*.gpx"):
            file.unlink()
        index._indices.clear()


def test_a_process_that_never_gets_ready_is_not_waited_for(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.data.index.ahead._PATIENCE_SECONDS", 0.2)
    waiting = threading.Event()
    monkeypatch.setattr(ScanProcess, "start", lambda *_: waiting.wait(20) and False)
    ahead = started(videos, workers=1)
    begin = time.monotonic()
    ahead.wait_for(videos[0])
    assert time.monotonic() - begin < 10
    assert index.load(videos[0]).info.frames == 60
    waiting.set()
    ahead.abandon()
    ended(ahead)


def test_after_one_wait_in_vain_no_other_video_is_waited_for(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.data.index.ahead._PATIENCE_SECONDS", 1.0)
    going_on = threading.Event()

    def standing(process: ScanProcess, identities: Sequence[Identity]) -> list[tuple[bytes, str] | None]:
        going_on.wait(60)
        raise OpenError("it was ended", path=identities[0].path)

    monkeypatch.setattr(ScanProcess, "make_all", standing)
    ahead = started(videos, workers=1)
    begin = time.monotonic()
    for path in [videos[0], *videos[2:] * 5]:
        ahead.wait_for(path)
    assert time.monotonic() - begin < 5
    assert ahead._still
    ahead._tell([0])
    assert not ahead._still, "what goes on is waited for again"
    ahead.abandon()
    going_on.set()
    ended(ahead)


def test_a_process_that_is_halted_as_it_starts_is_given_up(
    videos: list[str], halted: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpupipe.data.scan.worker._START_SECONDS", 0.5)
    ahead = started(videos, workers=2)
    begin = time.monotonic()
    for path in videos:
        ahead.wait_for(path)
    assert time.monotonic() - begin < 10, "not as long as is waited for a video"
    ended(ahead)
    assert {process.poll() for process in halted} == {-signal.SIGKILL}, "of one or both"
    assert caplog.text.count("was not ready within 0.5 s") == 1


def test_a_whole_set_is_indexed_though_each_process_is_halted(
    videos: list[str], halted: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupipe.data.scan.worker._START_SECONDS", 0.5)
    begin = time.monotonic()
    outcomes = dict(fill(videos, 2))
    assert [isinstance(outcomes[path], OpenError) for path in videos] == [False, True, False, False]
    assert time.monotonic() - begin < 10
    assert {process.poll() for process in halted} == {-signal.SIGKILL}


def test_leaving_a_set_does_not_wait_for_halted_processes(videos: list[str], halted: list[subprocess.Popen[bytes]]) -> None:
    outcomes = fill(videos, 2)
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
    begin = time.monotonic()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(outcomes)
    assert time.monotonic() - begin < 3, "less than the grace of a process that may have something to clear up"
    assert [process.poll() for process in halted] == [-signal.SIGKILL] * 2


def test_a_whole_set_is_indexed_without_processes_too(videos: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("gpupipe.data.child.subprocess.Popen", refused)
    outcomes = dict(fill(videos, 2))
    assert [isinstance(outcomes[path], OpenError) for path in videos] == [False, True, False, False]


def test_a_thread_is_woken_for_several_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that it wakes it takes the interpreter lock from those that decode, and from the training loop."""
    looked: list[str] = []

    def known(path: str) -> bool:
        looked.append(path)
        return True

    def looks(count: int) -> bool:
        until = time.monotonic() + 5
        while len(looked) < count and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(0.02)
        return len(looked) == count

    monkeypatch.setattr("gpupipe.data.index.ahead._AHEAD", 4)
    monkeypatch.setattr("gpupipe.data.index.ahead._AT_A_TIME", 3)
    monkeypatch.setattr(index, "known", known)
    ahead = started([f"{number}.mp4" for number in range(9)], 1)
    try:
        seen = [looks(4)]
        for count in (4, 4, 7, 7, 9):
            ahead.advance()
            seen.append(looks(count))
        assert all(seen), "three at a time, or what is left"
        ended(ahead)
    finally:
        ahead.abandon()
        ended(ahead)
