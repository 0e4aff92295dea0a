"""Jitter buffer: finished batches come in in any order and at any pace, and go out in sequence, unless order does not matter.

It never drops one. How deep it is follows the times of arrival (:mod:`.depth`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gpupipe.data.depth import DepthControl
from gpupipe.telemetry import Telemetry

Item = TypeVar("Item")
NO_LEVELS = {"occupancy": 0, "in_flight": 0, "jitter_bytes": 0}
"""The levels where there is no buffer."""


class Closed(Exception):
    """The buffer was closed while a caller waited, or before it asked."""


class Late(Exception):
    """No batch came within the time that the consumer gives."""


class JitterBuffer(Generic[Item]):
    """A bounded reorder buffer between many producers and one consumer.

    A producer reserves the next sequence number before it starts on a batch, of which there is none while ``depth`` batches
    are reserved and not yet taken, unless it asks for one further ahead; it puts the batch under that number when done. The
    consumer takes batches in the order of their numbers, or with ``in_order`` False as they come: then a slow one holds up no
    other.

    Args:
        depth: batches in preparation or ready, at most: a number, or a control that is told what happens and may change it.
        telemetry: gets ``wait`` (the consumer waited for a batch), ``stall`` (the same, but for the first batch and for those
            that were ready) and ``blocked`` (producers were without room), in seconds, and the counts ``stalls`` and
            ``jitter_peak_bytes``.
        on_room: called when there is room for another batch. Nothing of this buffer may wait for it.
        most_bytes: bytes in preparation or ready, at most; but where there is no batch, one of any size has room.
        clock: seconds.
    """

    def __init__(
        self,
        depth: DepthControl | int,
        telemetry: Telemetry,
        on_room: Callable[[], None] = lambda: None,
        *,
        in_order: bool = True,
        most_bytes: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._control = depth if isinstance(depth, DepthControl) else DepthControl.fixed(depth)
        self._in_order = in_order
        self._on_room = on_room
        self._most_bytes = most_bytes
        self._clock = clock
        self._full_since: float | None = None
        self._telemetry = telemetry
        self._changed = threading.Condition()
        self._ready: dict[int, Item] = {}
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._reserved = 0
        self._taken = 0
        self._reach = self._control.depth
        self._end: int | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._control.begin()
        for name in ("stalls", "jitter_peak_bytes"):
            telemetry.count(name, 0)

    @property
    def occupancy(self) -> int:
        """Batches that are ready and not yet taken."""
        with self._changed:
            return len(self._ready)

    @property
    def in_flight(self) -> int:
        """Batches that are reserved and not yet taken, ready ones included; beyond the depth only where that was asked for."""
        with self._changed:
            return self._reserved - self._taken

    @property
    def taken(self) -> int:
        """Batches that the consumer has taken. Takes no lock, for callers that hold one of their own."""
        return self._taken

    @property
    def reach(self) -> int:
        """The number before which the depth lets batches be begun; those that are begun stay before it when it shrinks.

        Takes no lock, like :attr:`taken`.
        """
        return self._reach

    @property
    def behind(self) -> bool:
        """True while there is no batch for the consumer to take. Takes no lock, for callers that hold one of their own."""
        return not (self._taken in self._ready if self._in_order else self._ready)

    def levels(self) -> dict[str, int]:
        """``occupancy``, ``in_flight``, and ``jitter_bytes`` of these batches; nothing of a closed buffer."""
        with self._changed:
            if self._closed:
                return dict(NO_LEVELS)
            in_flight = self._reserved - self._taken
            return {"occupancy": len(self._ready), "in_flight": in_flight, "jitter_bytes": self._bytes}

    def reserve(self, further: int | None = None, size_bytes: int = 0) -> int | None:
        """The next sequence number, or None while there is no room for a batch. Does not wait.

        Args:
            further: for those who look ahead: batches beyond the depth that there is room for. None: the batch is begun now;
                else :meth:`begin` tells when.
            size_bytes: of the batch that is to be begun.

        Raises:
            Closed: when the buffer is closed.
        """
        with self._changed:
            if self._closed:
                raise Closed
            now = self._clock()
            fits = self._most_bytes is None or self._bytes + size_bytes <= self._most_bytes or self._reserved == self._taken
            if self._reserved >= self._reach + (further or 0) or not fits:
                self._full_since = self._full_since if self._full_since is not None else now
                if fits and not further:
                    self._control.refused()
                return None
            number = self._reserved
            self._reserved += 1
            self._sizes[number] = size_bytes
            self._bytes += size_bytes
            self._telemetry.count("jitter_peak_bytes", max(0, self._bytes - self._telemetry.value("jitter_peak_bytes")))
            if further is None:
                self._control.begun(number, now)
            since, self._full_since = self._full_since, None
        self._telemetry.observe("blocked", now - since if since is not None else 0.0)
        return number

    def begin(self, number: int) -> None:
        """Says that work on a batch has begun whose time tells what batches take; only the first time counts."""
        with self._changed:
            self._control.begun(number, self._clock())

    def put(self, number: int, item: Item) -> None:
        """Hands in the batch of a reserved number; there is always room for it. A closed buffer lets go of it."""
        with self._changed:
            assert (self._taken if self._in_order else 0) <= number < self._reserved, (self._taken, number, self._reserved)
            assert number not in self._ready, number
            if self._closed:  # nobody will take it
                return
            self._control.arrived(number, self._clock())
            self._ready[number] = item
            self._changed.notify_all()

    def finish(self, count: int) -> None:
        """Says that ``count`` batches are all there will be."""
        with self._changed:
            self._end = count
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Closes the buffer; the consumer's next :meth:`take` raises ``error``, the first one of several."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._closed = True
            self._changed.notify_all()

    def take(self, timeout_seconds: float | None = None) -> Item | None:
        """The next batch, waiting for it; None after the last one.

        Args:
            timeout_seconds: how long to wait, at most; None: for ever.

        Raises:
            Closed: when the buffer is closed.
            Late: when no batch came in time.
            BaseException: what a producer failed with.
        """
        start = self._clock()
        missing = self._misses(start)
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled, timeout_seconds):
                raise Late
            if self._error is not None:
                raise self._error
            if self._taken == self._end:  # asked first: of several consumers the one that sees the end closes the buffer
                return None
            if self._closed:
                raise Closed
            number = self._next
            assert number is not None
            item = self._ready.pop(number)
            self._bytes -= self._sizes.pop(number)
            stalled = missing and self._taken > 0
            self._taken += 1
            now = self._clock()
            self._control.taken(now, 0 if self._next is None else len(self._ready), more=self._more)
            self._move_reach()
            self._changed.notify_all()
        self._telemetry.observe("wait", now - start)
        if stalled:
            self._telemetry.count("stalls")
            self._telemetry.observe("stall", now - start)
        self._on_room()
        return item

    def _misses(self, now: float) -> bool:
        """Whether the consumer, who comes now, has to wait; makes room where that helps."""
        with self._changed:
            if self._settled:
                return False
            before = self._reach
            self._control.waits(now, more=self._more)
            self._move_reach()
            grown = self._reach > before
        if grown:
            self._on_room()
        return True

    @property
    def _next(self) -> int | None:
        """The number of the batch that goes out next; None while it is not there."""
        if self._in_order:
            return self._taken if self._taken in self._ready else None
        return next(iter(self._ready), None)

    @property
    def _settled(self) -> bool:
        """Whether :meth:`take` has an answer."""
        return self._next is not None or self._closed or self._taken == self._end

    @property
    def _more(self) -> bool:
        """Whether there are batches that are not begun."""
        return self._reserved != self._end

    def _move_reach(self) -> None:
        """Follows the depth."""
        self._reach = max(self._taken + self._control.depth, min(self._reach, self._reserved))

    def close(self) -> None:
        """Wakes all who wait and lets go of the batches."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
