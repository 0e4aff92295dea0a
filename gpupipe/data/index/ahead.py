"""Indexing ahead of the decoders, so that an engine seldom waits for a demux and none does one itself."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush

from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity
from gpupipe.data.scan.store import make
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.errors import GpupipeError

_AHEAD = 256
"""Videos indexed before the one whose turn it is, at most."""
_AT_A_TIME = 32
"""Videos for which there is room again before a thread is woken: one for each would cost those that decode, and the user's."""
_TOGETHER = 4
"""Videos that a process is asked for at once, after smaller beginnings. A thread that takes an answer must win the interpreter
lock from those that decode, for which its process would wait at each video."""
_SOON_SECONDS = 1.0
"""What an answer may take for more videos to be asked for at once: none of them is told of before all are done."""
_BEGIN_SECONDS = 1.0
"""How long the first videos are indexed in this process at most, until another is ready to do that."""
_PATIENCE_SECONDS = 20.0
"""How long a decode thread waits for an index before it makes it itself: a process may come to a standstill."""


class IndexAhead:
    """Loads the indices of videos in the order in which they will be decoded; new ones are made by processes.

    A video that cannot be indexed is left for its turn, when the error finds its place. No process is started as long as all
    indices are there. New ones are indexed in this process until another is ready, the first few told of together: as soon as
    decode threads are busy, a demux starves here.

    Args:
        paths: videos in decoding order.
        workers: threads, each with a process that it starts when it first needs one; 0 loads nothing ahead.
        first: videos to tell of together at the beginning, where PyAV has been imported already; 0 leaves all to processes.
    """

    def __init__(self, paths: Sequence[str], workers: int, first: int = 0) -> None:
        self._paths = list(dict.fromkeys(paths)) if workers else []
        self._place = {path: place for place, path in enumerate(self._paths)}
        # On a lock that may be taken again: garbage collection may call abandon() in a thread that is inside advance().
        self._changed = threading.Condition()
        self._room = _AHEAD
        self._first = first if "av" in sys.modules else 0
        self._next_place = 0
        self._left: list[int] = []
        """Places before the next one that are still to be done, as a heap: threads give them back in any order."""
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

    def _next(self, most: int, *, wait: bool = True) -> list[int]:
        """The next places, once there is room for one; none when there are no more, the work is to end, or nobody waits."""
        with self._changed:
            count = len(self._paths)
            if wait:
                self._changed.wait_for(
                    lambda: self._stopping or self._left or self._next_place < self._room or self._next_place >= count
                )
            if self._stopping:
                return []
            if self._left:
                return [heappop(self._left)]
            room = min(count, self._room) - self._next_place
            few = min(most, max(1, room // len(self._processes)), room)  # the others have to have work too
            self._next_place += few
            return list(range(self._next_place - few, self._next_place))

    def _new(self, places: Sequence[int]) -> list[int]:
        """Those whose indices are not there yet; tells of the others."""
        new = []
        for place in places:
            with suppress(GpupipeError, Stopped):
                if not indices.known(self._paths[place]):
                    new.append(place)
        self._tell(place for place in places if place not in new)
        return new

    def _start_others(self) -> None:
        """As many more threads as there are videos for."""
        with self._changed:
            places = len(self._paths) - self._next_place + len(self._left)
        for thread in self.threads[1:places]:
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

    def _begin(self, process: ScanProcess, together: int) -> None:
        """Indexes videos here until one of the processes is ready; tells of as many as ``together`` at once, then of each."""
        process.begin()
        until = time.monotonic() + _BEGIN_SECONDS
        first: list[int] | None = []
        try:
            while not self._is_over(process, until) and (places := self._next(1, wait=False)):
                with suppress(GpupipeError, Stopped):
                    indices.load(self._paths[places[0]], partial(make, stop=lambda: self._stopping))
                first = None if first is None else [*first, *places]
                if first is None or len(first) >= together:
                    self._tell(first or places)
                    first = None
        finally:
            self._tell(first or ())

    def _is_over(self, process: ScanProcess, until: float) -> bool:
        """Whether others take over from here: a scan beside decode threads that have work takes many times as long."""
        return process.heard or any(other.ready for other in self._processes) or time.monotonic() >= until

    def _tell(self, places: Iterable[int]) -> None:
        """Says that videos are done, as far as can be ahead of their turn."""
        done = set(places)
        if done:
            with self._changed:
                self._done |= done
                self._still = False
                self._changed.notify_all()

    def _work(self, process: ScanProcess, is_first: bool) -> None:
        with stoppable(lambda: self._stopping), suppress(Stopped):
            self._index(process, is_first)

    def _index(self, process: ScanProcess, is_first: bool) -> None:
        few = 1
        try:
            while not process.ended and (places := self._next(few)):
                places = self._new(places)
                if places and not process.ready:
                    with self._changed:  # whoever is ready first shall have them
                        for place in places:
                            heappush(self._left, place)
                        self._changed.notify_all()
                    if is_first:
                        self._start_others()
                    if is_first and places[0] < self._first:  # later decode threads are busy
                        self._begin(process, self._first - places[0])
                    if not process.start(lambda: self._stopping):
                        return
                elif places:
                    begin = time.monotonic()
                    self._ask(process, places)
                    few = min(2 * few, _TOGETHER) if time.monotonic() - begin < _SOON_SECONDS else 1
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()
            process.close()

    def _ask(self, process: ScanProcess, places: Sequence[int]) -> None:
        try:
            asked: list[Identity] = []
            for place in places:
                with suppress(GpupipeError, Stopped):
                    asked.append(Identity.of(self._paths[place]))
            with suppress(GpupipeError, Stopped):
                for identity, made in zip(asked, process.make_all(asked), strict=True):
                    if made is not None:
                        indices.take(identity, *made)
        finally:
            self._tell(places)
