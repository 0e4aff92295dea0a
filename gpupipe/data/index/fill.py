"""Making the indices of a whole set at once, by many processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial

from gpupipe.data import index as indices
from gpupipe.data.bytes.name import of_entry, working_folder
from gpupipe.data.index.model import VideoIndex
from gpupipe.data.scan.store import make
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.data.stop import Stop, Stopped, stoppable
from gpupipe.errors import GpupipeError
from gpupipe.types import Entry

Outcome = VideoIndex | GpupipeError


def fill(paths: Sequence[str], processes: int, made: set[str] | None = None) -> Generator[tuple[str, Outcome]]:
    """Loads or makes the index of each video, and gives it, or the error that it met, as they come.

    Leaving the iterator early ends the processes; what has been made by then is cached.

    Args:
        paths: videos; one that is named twice is indexed once.
        processes: how many make indices side by side, at least 1.
        made: takes the paths whose index was not there and has been made.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
    leaving = threading.Event()
    unique = list(dict.fromkeys(paths))
    for path in unique:
        waiting.put(path)
    workers = [ScanProcess() for _ in range(min(processes, len(unique)))]
    threads = [
        threading.Thread(target=_work, args=(worker, waiting, done, leaving, made), name=f"gpupipe-index-{number}", daemon=True)
        for number, worker in enumerate(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in unique:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        leaving.set()
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in workers:
            worker.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def survey(
    entries: Iterable[Entry], processes: int, share: tuple[int, int] = (0, 1), made: set[str] | None = None
) -> Generator[tuple[str, Outcome]]:
    """As :func:`fill`, for the videos of a list, by their names there, and for several processes that do the same at once.

    Args:
        share: (rank, ranks) of these: each begins at another video, so that of indices that are missing each finds most made
            by others.
        made: takes the files whose index was not there and has been made.
    """
    folder = working_folder()
    at = {entry.path: of_entry(entry, folder) for entry in entries}
    unique = list(at)
    turn = len(unique) * share[0] // share[1]
    files: dict[str, list[str]] = {}
    for path in unique[turn:] + unique[:turn]:
        files.setdefault(at[path], []).append(path)
    with closing(fill(list(files), processes, made)) as outcomes:
        for file, outcome in outcomes:
            for path in files[file]:
                yield path, outcome


def _work(
    process: ScanProcess,
    waiting: queue.SimpleQueue[str],
    done: queue.SimpleQueue[tuple[str, Outcome] | BaseException],
    leaving: threading.Event,
    made: set[str] | None,
) -> None:
    try:
        with stoppable(leaving.is_set), suppress(Stopped):
            _work_on(process, waiting, done, leaving.is_set, made)
    except BaseException as error:  # crosses to the caller, who raises it
        done.put(error)
    finally:
        process.close()


def _work_on(
    process: ScanProcess,
    waiting: queue.SimpleQueue[str],
    done: queue.SimpleQueue[tuple[str, Outcome] | BaseException],
    stop: Stop,
    made: set[str] | None,
) -> None:
    """Raises: Stopped: when ``stop()`` turned true."""
    make_here = partial(make, stop=stop)
    while True:
        try:
            path = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            if not indices.known(path):
                try:
                    indices.load(path, process.make if process.start(stop) else make_here)
                except GpupipeError:  # says that the process could not: find out here why
                    indices.load(path, make_here)
                if made is not None:
                    made.add(path)
            done.put((path, indices.load(path, make_here)))
        except GpupipeError as error:
            done.put((path, error))
