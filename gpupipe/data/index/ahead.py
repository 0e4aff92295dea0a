"""Indexing ahead of the decoders, so that an engine seldom waits for a demux and none does one itself."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from gpupipe.data import index as indices
from gpupipe.data.scan.store import make
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.errors import GpupipeError

_AHEAD = 256
"""Videos indexed before the one whose turn it is, at most."""
_AT_A_TIME = 32
"""Videos for which there is room again before a thread is woken: one for each would cost those that decode, and the user's."""
_BEGIN_SECONDS = 0.1
"""How long the first videos are indexed in this process: about what the others take to get ready."""
_PATIENCE_SECONDS = 20.0
"""How long a decode thread waits for an index before it makes it itself: a process may come to a standstill."""


class IndexAhead:
    """Loads the indices of videos in the order in which they will be decoded; new ones are made by processes.

    A video that cannot be indexed is left for its turn, when the error finds its place. No process is started as long as all
    indices are there. The first few new ones are indexed in this process while the others get ready, and told of together: as
    soon as decode threads are busy, a demux would starve here.

    Args:
        paths: videos in decoding order.
        workers: threads, each with a process that it starts when it first needs one; 0 loads nothing ahead.
        first: videos to index in this process, at most, where PyAV has been imported already.
    """

    def __init__(self, paths: Sequence[str], workers: int, first: int = 0) -> None:
        self._paths = list(dict.fromkeys(paths)) if workers else []
        self._place = {path: place for place, path in enumerate(self._paths)}
        # On a lock that may be taken again: garbage collection may call abandon() in a thread that is inside advance().
        self._changed = threading.Condition()
        self._room = _AHEAD
        self._first = min(first, len(self._paths)) if "av" in sys.modules else 0
        self._next_place = 0
        self._left: deque[int] = deque()
        """Places before the next one that are still to be done."""
        self._done: set[int] = set()
        self._working = min(workers, 1)
        self._still = False
        """A wait ran out, and nothing was done since: nobody waits for the like again."""
        self._stopping = False
        self._processes = [ScanProcess() for _ in range(workers)]
        self.threads = [
            threading.Thread(target=self._work, args=(process, number == 0), name=f"gpupipe-index-{number}", daemon=True)
            for number, process in enumerate(self._processes)
        ]
        """Of which all but the first are started when there is work for them."""

    def start(self) -> None:
        """Begins."""
        for thread in self.threads[:1]:
            thread.start()

    def advance(self) -> None:
        """Says that one more clip's turn has come."""
        with self._changed:
            self._room += 1
            left = len(self._paths) - self._next_place
            if 0 < min(left, _AT_A_TIME) <= self._room - self._next_place:
                self._changed.notify_all()

    def wait_for(self, path: str) -> None:
        """Waits until a video's index has been loaded, or is not going to be soon: then it is for the caller to load."""
        place = self._place.get(path)
        if place is None or place in self._done or indices.in_memory(path):
            return
        with self._changed:
            over = self._changed.wait_for(
                lambda: place in self._done or place >= self._room or not self._working or self._stopping or self._still,
                _PATIENCE_SECONDS,
            )
            if not over:
                self._still = True
                self._changed.notify_all()

    def abandon(self) -> None:
        """Tells threads and processes to end, without waiting for them."""
        self._stopping = True
        with self._changed:
            self._changed.notify_all()
        for process in self._processes:
            process.end()

    def _next(self) -> int | None:
        """The next place, once there is room for it; None when there are no more or the work is to end."""
        with self._changed:
            count = len(self._paths)
            self._changed.wait_for(
                lambda: self._stopping or self._left or self._next_place < self._room or self._next_place >= count
            )
            if self._left and not self._stopping:
                return self._left.popleft()
            if self._stopping or self._next_place >= count:
                return None
            self._next_place += 1
            return self._next_place - 1

    def _pass_known(self) -> int | None:
        """Goes through the videos whose indices are there already; the place of the first one that is new, or None."""
        while (place := self._next()) is not None:
            with suppress(GpupipeError, Stopped):
                if indices.known(self._paths[place]):
                    self._tell([place])
                    continue
            return place
        return None

    def _begin(self, place: int) -> None:
        """Starts the other threads; meanwhile indexes the first videos here, from ``place`` on, for as long as is worth it."""
        first = range(place, self._first)
        with self._changed:
            self._next_place = max(self._next_place, self._first)
            self._left.extend([] if first else [place])
        for thread in self.threads[1:]:
            with self._changed:
                if self._stopping:
                    break
                self._working += 1
            try:
                thread.start()
            except RuntimeError:  # no room for one more: the others do
                with self._changed:
                    self._working -= 1
                break
        until = time.monotonic() + _BEGIN_SECONDS
        done = place
        try:
            while done < first.stop and not self._stopping and time.monotonic() < until:
                with suppress(GpupipeError, Stopped):
                    indices.load(self._paths[done], partial(make, stop=lambda: self._stopping))
                done += 1
        finally:
            with self._changed:
                self._left.extend(range(done, first.stop))
            self._tell(range(place, done))

    def _tell(self, places: Iterable[int]) -> None:
        """Says that videos are done, as far as can be ahead of their turn."""
        with self._changed:
            self._done.update(places)
            self._still = False
            self._changed.notify_all()

    def _work(self, process: ScanProcess, is_first: bool) -> None:
        with stoppable(lambda: self._stopping):
            self._index(process, is_first)

    def _index(self, process: ScanProcess, is_first: bool) -> None:
        try:
            if is_first:
                place = self._pass_known()
                if place is None:
                    return
                self._begin(place)
            while not process.ended and (place := self._next()) is not None:
                try:
                    with suppress(GpupipeError, Stopped):
                        path = self._paths[place]
                        if not indices.known(path) and process.start(lambda: self._stopping):
                            indices.load(path, process.make)
                finally:
                    self._tell([place])
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()
            process.close()
