"""What a visit to a video is to do, worked out ahead of its turn, so that its bytes can be on their way from a cold disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpupipe.config import CacheConfig, ClipConfig
from gpupipe.data import index as indices
from gpupipe.data.bytes import look_ahead, open_file
from gpupipe.data.bytes.name import is_remote
from gpupipe.data.decode.feed import ranges
from gpupipe.data.draws import FRAMES, clip_generator
from gpupipe.data.files import OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan, make_plan
from gpupipe.data.sample import pick_frames
from gpupipe.data.source.columns import start_frame
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.errors import GpupipeError
from gpupipe.types import ClipRequest, Entry, FramePick

_MOST_BYTES = 32 << 20
"""Asked for ahead of one visit, at most; the kernel reads on by itself where a file is read from front to back."""
_FAR_AHEAD = 32
"""Visits that a store far away is asked for before their turn: without that each thread would wait for its own requests."""
_PATIENCE_SECONDS = 5.0
"""How long the end of an epoch waits for a thread that may hang in a disk's answer."""


def far_ahead(config: CacheConfig, entries: Iterable[Entry]) -> int:
    """Visits whose bytes are asked for before their turn, by ``config.read_ahead``."""
    if config.read_ahead != "auto":
        return config.read_ahead
    return _FAR_AHEAD if any(is_remote(entry.path) for entry in entries) else 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The clips of one visit, as they follow from its request and the video's index: which frames, and how to decode them."""

    index: VideoIndex
    picks: list[FramePick]
    plan: Plan


def prepare(clip: ClipConfig, request: ClipRequest, entry: Entry, index: VideoIndex, crops: int = 1) -> Prepared:
    """Picks a visit's frames and plans their decode; ``crops`` clips that follow one another show the same frames.

    Raises:
        SampleError: when the video has not enough frames, and ``clip.pad`` is ``error``.
    """
    shown = clip.clips_per_video // crops
    places = [number // crops for number in range(clip.clips_per_video)]
    draws = [clip_generator(request, FRAMES, place) for place in places]
    picks = [
        pick_frames(clip, index, draw, start_frame(entry), (place, shown)) for draw, place in zip(draws, places, strict=True)
    ]
    return Prepared(index, picks, make_plan(index, [frame for pick in picks for frame in pick.decoded]))


class ReadAhead:
    """A thread that prepares visits ahead of their turn and asks for the bytes that they will read: the kernel, or a
    store far away.

    The work is not done twice: what was prepared is left for the visit. A visit whose turn comes first, or whose index is not
    at hand, is left alone. Nothing waits for this thread, which may hang as long as a disk does.

    Args:
        requests: the visits of an epoch in order.
        clip_of: how a request's clips take frames.
        entry_of: the video of a request.
        file_of: the path by which it is opened.
        wanted: whether the bytes of a prepared visit will be read.
        crops: as for :func:`prepare`.
        distance: visits before the one whose turn it is, at most; 0: nothing is done ahead.
    """

    def __init__(
        self,
        requests: Sequence[ClipRequest],
        clip_of: Callable[[ClipRequest], ClipConfig],
        entry_of: Callable[[ClipRequest], Entry],
        file_of: Callable[[Entry], str],
        files: OpenFiles,
        wanted: Callable[[Prepared], bool],
        distance: int,
        crops: int = 1,
    ) -> None:
        self._requests = requests
        self._clip_of = clip_of
        self._entry_of = entry_of
        self._file_of = file_of
        self._files = files
        self._wanted = wanted
        self._distance = distance
        self._crops = crops
        self._at_a_time = max(1, distance // 4)
        """Visits prepared in one go: to wake a thread for each would cost those that decode."""
        # On a lock that may be taken again: garbage collection may call abandon() in a thread that is inside take().
        self._changed = threading.Condition()
        self._begun = 0
        self._next = 0
        self._looked = 0
        """Visits up to here have been asked for in stores far away."""
        self._stopping = False
        self._prepared: dict[ClipRequest, Prepared] = {}
        self._thread = threading.Thread(target=self._work, name="gpupipe-readahead", daemon=True)

    def start(self) -> None:
        """Starts the thread, if there is anything to do ahead."""
        if self._distance and self._requests:
            self._thread.start()

    def take(self, request: ClipRequest) -> Prepared | None:
        """Says that a visit's turn has come; what was prepared for it, if it was."""
        if not self._distance:
            return None
        with self._changed:
            self._begun += request.attempt == 0  # a substitute has its sample's turn
            if self._due:
                self._changed.notify()
            return self._prepared.pop(request, None)

    @property
    def _room(self) -> int:
        return min(self._begun + self._distance, len(self._requests)) - self._next

    @property
    def _due(self) -> bool:
        """Whether there is enough to do to wake the thread for, or nothing left for ever."""
        return self._room >= min(self._at_a_time, len(self._requests) - self._next)

    def abandon(self) -> None:
        """Tells the thread to end, without waiting for it."""
        self._stopping = True
        with self._changed:
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for the thread, unless it hangs."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(_PATIENCE_SECONDS)
        self._prepared.clear()

    def _work(self) -> None:
        with stoppable(lambda: self._stopping):
            self._prepare_all()

    def _prepare_all(self) -> None:
        while (request := self._take_next()) is not None:
            with suppress(GpupipeError, Stopped):  # found again, and told, when its turn comes
                prepared = self._prepare(request)
                if prepared is not None:
                    self._leave(request, prepared)
                    if not self._stopping and self._wanted(prepared):
                        self._ask_for(prepared)

    def _take_next(self) -> ClipRequest | None:
        """The next visit that has room and whose turn has not come; None at the end."""
        with self._changed:
            if self._room <= 0:
                self._changed.wait_for(lambda: self._stopping or self._due)
            self._next = max(self._next, self._begun)
            if self._stopping or self._next >= len(self._requests):
                return None
            self._next += 1
            looked, self._looked = max(self._looked, self._next), self._next + self._room
        for request in self._requests[looked : self._looked]:
            look_ahead(self._file_of(self._entry_of(request)))
        return self._requests[self._next - 1]

    def _prepare(self, request: ClipRequest) -> Prepared | None:
        entry = self._entry_of(request)
        path = self._file_of(entry)
        index = indices.at_hand(path)
        if index is not None:
            return prepare(self._clip_of(request), request, entry, index, self._crops)
        if look_ahead(path):  # whoever makes its index will read all of it
            with open_file(path) as file:
                file.will_need([(0, _MOST_BYTES)])
        return None

    def _leave(self, request: ClipRequest, prepared: Prepared) -> None:
        with self._changed:
            self._prepared[request] = prepared
            while len(self._prepared) > 2 * self._distance:  # visits whose turn came while they were prepared
                del self._prepared[next(iter(self._prepared))]

    def _ask_for(self, prepared: Prepared) -> None:
        bounded, left = [], _MOST_BYTES
        for position, size in ranges(prepared.index, prepared.plan):
            bounded.append((position, min(size, left)))
            left -= size
            if left <= 0:
                break
        if bounded:
            with self._files.lend(prepared.index.identity) as file:
                file.will_need(bounded)
