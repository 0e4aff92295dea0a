"""Making the indices of a whole set at once, by many processes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress

from gpupipe.data import index as indices
from gpupipe.data.index.model import VideoIndex
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.errors import GpupipeError
from gpupipe.types import Entry

Outcome = VideoIndex | GpupipeError


def fill(paths: Sequence[str], processes: int) -> Generator[tuple[str, Outcome]]:
    """Loads or makes the index of each video, and gives it, or the error that it met, as they come.

    Leaving the iterator early ends the processes; what has been made by then is cached.

    Args:
        paths: videos; one that is named twice is indexed once.
        processes: how many make indices side by side, at least 1.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Outcome] | BaseException] = queue.SimpleQueue()
    unique = list(dict.fromkeys(paths))
    for path in unique:
        waiting.put(path)
    workers = [ScanProcess() for _ in range(min(processes, len(unique)))]
    threads = [
        threading.Thread(target=_work, args=(worker, waiting, done), name=f"gpupipe-index-{number}", daemon=True)
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
        with suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        for worker in workers:
            worker.end()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def survey(entries: Iterable[Entry], processes: int, share: tuple[int, int] = (0, 1)) -> Generator[tuple[str, Outcome]]:
    """As :func:`fill`, for the videos of a list, by their names there, and for several processes that do the same at once.

    Args:
        share: (rank, ranks) of these: each begins at another video, so that of indices that are missing each finds most made
            by others.
    """
    at = {entry.path: entry.file or entry.path for entry in entries}
    unique = list(at)
    turn = len(unique) * share[0] // share[1]
    folder = os.getcwd() if not all(map(os.path.isabs, unique)) else ""
    files = {os.path.join(folder, at[path]): path for path in unique[turn:] + unique[:turn]}
    with closing(fill(list(files), processes)) as outcomes:
        for file, outcome in outcomes:
            yield files[file], outcome


def _work(
    process: ScanProcess, waiting: queue.SimpleQueue[str], done: queue.SimpleQueue[tuple[str, Outcome] | BaseException]
) -> None:
    try:
        while True:
            try:
                path = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                if not indices.known(path):
                    process.start()
                    try:
                        indices.load(path, process.make)
                    except GpupipeError:  # says that the process could not: find out here why
                        indices.load(path)
                done.put((path, indices.load(path)))
            except GpupipeError as error:
                done.put((path, error))
    except BaseException as error:  # crosses to the caller, who raises it
        done.put(error)
    finally:
        process.close()
