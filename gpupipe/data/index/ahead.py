"""Indexing ahead of the decoders, so that an engine seldom waits for a demux."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from gpupipe.data import index as indices
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.errors import GpupipeError

_AHEAD = 256
"""Videos indexed before the one whose turn it is, at most."""


class IndexAhead:
    """Loads the indices of videos in the order in which they will be decoded; new ones are made by processes.

    A video that cannot be indexed is left for its turn, when the error finds its place.

    Args:
        paths: videos in decoding order.
        workers: threads, each with a process that it starts when it first needs one; 0 loads nothing ahead.
        skip: clips at the head of ``paths`` that are left to the decode threads: these start on them at once.
    """

    def __init__(self, paths: Sequence[str], workers: int, skip: int) -> None:
        self._paths = islice(dict.fromkeys(paths), skip, None)
        self._pulling = threading.Lock()
        # On a lock that may be taken again: garbage collection may call abandon() in a thread that is inside advance().
        self._changed = threading.Condition()
        self._room = _AHEAD
        self._stopping = False
        self._processes = [ScanProcess() for _ in range(workers)]
        self.threads = [
            threading.Thread(target=self._work, args=(process,), name=f"gpupipe-index-{number}", daemon=True)
            for number, process in enumerate(self._processes)
        ]
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.abandon()
            raise

    def advance(self) -> None:
        """Says that one more clip's turn has come."""
        with self._changed:
            self._room += 1
            self._changed.notify()

    def abandon(self) -> None:
        """Tells threads and processes to end, without waiting for them."""
        self._stopping = True
        with self._changed:
            self._changed.notify_all()
        for process in self._processes:
            process.end()

    def _next(self) -> str | None:
        """The next path, once there is room for it; None when there are no more or the work is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._room > 0)
            if self._stopping:
                return None
            self._room -= 1
        with self._pulling:
            return next(self._paths, None)

    def _work(self, process: ScanProcess) -> None:
        try:
            started = False
            while (path := self._next()) is not None:
                with suppress(GpupipeError):
                    if indices.known(path):
                        continue
                    # Only a process that is ready takes a path: a decode thread that wants it would wait for the start.
                    if not started and not (started := process.start()):
                        return
                    indices.load(path, process.scan)
        finally:
            process.close()
