"""VideoLoader in surroundings of its user's making: forks, another working directory, no room for threads, slow consumers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpupipe import VideoLoader
from gpupipe.data import index, pipeline, tasks
from gpupipe.data.assembly import Assembly
from gpupipe.errors import ConfigError, DeviceError, DeviceMemoryError, OpenError

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "device": "cpu", "batch": 2}


@pytest.fixture(scope="module")
def folder(clips: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("surroundings")
    for number in range(8):
        shutil.copy(clips["mpeg4"], root / f"{number}.avi")
    return root


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpupipe")]


def eventually(holds: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


FORK = """
import os, signal, sys, time
from gpupipe import VideoLoader, errors
loader = VideoLoader([sys.argv[1]] * 100, clip={"frames": 2}, transform={"size": 16}, batch=2, device="cpu")
running = iter(loader)
next(running)
while running.occupancy < 3:  # then a worker waits for room, a lock in its hand
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        BODY
    except errors.ClosedError as error:
        sys.exit(7 if "forked" in str(error) else 8)
    sys.exit(3)
_, status = os.waitpid(child, 0)
assert len(list(running)) == 49
sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 99)
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [("pass", 3), ("loader.close()", 3), ("del running, loader", 3), ("next(running)", 7), ("iter(loader)", 7)],
)
def test_a_forked_child_may_leave_and_is_refused_batches(folder: Path, body: str, code: int) -> None:
    command = [sys.executable, "-c", FORK.replace("BODY", body), str(folder / "0.avi")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr


def test_an_index_can_be_loaded_in_a_child_forked_amid_the_loading_of_it(folder: Path) -> None:
    path = str(folder / "0.avi")
    forked = []

    def make(_: Any) -> Any:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if index.load(path).info.frames == 60 else 1)
        forked.append(child)
        raise OpenError("not here")

    index._indices.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "cached", lambda _: None)
        with pytest.raises(OpenError):
            index.load(path, make)
        _, status = os.waitpid(forked[0], 0)
    assert status == 0


def test_relative_paths_start_where_the_loader_was_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names = [f"{number}.avi" for number in range(4)]
    with VideoLoader(names, **SMALL, shuffle=False) as loader:
        monkeypatch.chdir(tmp_path)
        batches = list(loader)
        assert [path for batch in batches for path in batch.paths] == names, "they are named as they were given"
        assert not loader.bad_files


def test_a_working_folder_that_is_gone_matters_to_relative_paths_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with VideoLoader([str(folder / "0.avi")] * 2, **SMALL) as loader:
        assert len(list(loader)) == 1
    with VideoLoader(["0.avi"] * 2, **SMALL, on_bad_file="raise") as loader, pytest.raises(OpenError, match=r"0\.avi"):
        next(iter(loader))


def test_a_thread_that_cannot_start_leaves_none_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "gpupipe-clips-2":
            raise RuntimeError("can't start new thread")
        original(thread)

    with VideoLoader(folder, **SMALL, decode={"threads": 4}) as loader:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(DeviceError, match="can't start new thread"):
            iter(loader)
        assert not threads()
        monkeypatch.undo()
        assert len(list(loader)) == 4


def watched(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Assembly]]:
    """Gets a reference to each batch under construction from now on."""
    made: list[weakref.ref[Assembly]] = []

    class Watched(Assembly):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr(tasks, "Assembly", Watched)
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_an_epoch_that_was_left_do_not_wait_for_garbage_collection(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes seldom in a large process, so that a GPU would fill with half-made batches."""
    made = watched(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        with VideoLoader(folder, **SMALL, decode={"threads": 3, "cpu_workers": workers}) as loader:
            for _ in range(12):
                next(iter(loader))
        assert len(made) >= 12
        assert not any(reference() for reference in made)
    finally:
        gc.enable()


def test_a_batch_that_was_taken_is_held_by_nobody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait for room must not keep the memory of the batch that they made last."""
    made = watched(monkeypatch)
    with VideoLoader(folder, **SMALL, jitter={"depth": 2}, decode={"threads": 3}) as loader:
        iterator = iter(loader)
        next(iterator)
        assert eventually(lambda: iterator.occupancy == 2)
        assert eventually(lambda: not any(reference() for reference in made)), "finished assemblies are kept"


def test_half_made_batches_are_waited_for_before_their_memory_is_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA rule on the host: at the end of an epoch the pipeline's stream waits for the stream of each engine."""
    waits: list[tuple[list[Any], Any, int]] = []
    with VideoLoader(folder, **SMALL, decode={"threads": 2}) as loader:
        running = iter(loader)
        next(running)
        made = loader._run.pipeline
        assert made is not None
        job, own_streams = made._job, made._streams
        streams = [SimpleNamespace(record_event=lambda name=name: name) for name in ("one", "other")]
        made._job, made._streams = SimpleNamespace(stream="own"), streams  # type: ignore[assignment]
        monkeypatch.setattr(pipeline, "hand_over", lambda tensors, events, to: waits.append((events, to, len(threads()))))
        made.stop()
        made._job, made._streams = job, own_streams
    assert waits[0] == (["one", "other"], "own", 0), "and no worker runs any more"


def test_host_memory_that_is_not_there_is_one_clear_error(folder: Path) -> None:
    with (
        VideoLoader(
            [folder / "0.avi"] * 512, device="cpu", batch=512, clip={"frames": 4096}, transform={"size": 8192}
        ) as loader,
        pytest.raises(DeviceMemoryError, match=r"'allocate'.*this machine is out of memory"),
    ):
        next(iter(loader))


def test_numbers_may_be_numpys(folder: Path) -> None:
    with VideoLoader(folder, **{**SMALL, "batch": np.int64(4)}) as loader:
        loader.set_epoch(np.int64(3))
        assert next(iter(loader)).epoch == 3
        assert len(loader) == 2
        for wrong in ("3", 1.5, None, True):
            with pytest.raises(ConfigError, match="not a whole number"):
                loader.set_epoch(wrong)  # type: ignore[arg-type]


def test_too_many_ranks_are_told_what_to_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one video for each rank"):
        VideoLoader(folder, **SMALL, rank=0, world_size=100)
