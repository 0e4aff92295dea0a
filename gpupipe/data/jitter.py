"""Jitter buffer: finished batches come in in any order and at any pace, and go out in sequence, unless order does not matter.

It never drops one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gpupipe.telemetry import Telemetry

Item = TypeVar("Item")


class Closed(Exception):
    """The buffer was closed while a caller waited, or before it asked."""


class JitterBuffer(Generic[Item]):
    """A bounded reorder buffer between many producers and one consumer.

    A producer reserves the next sequence number before it starts on a batch, of which there is none while ``depth`` batches
    are reserved and not yet taken, unless it asks for one further ahead; it puts the batch under that number when done. The
    consumer takes batches in the order of their numbers, or with ``in_order`` False as they come: then a slow one holds up no
    other.

    Args:
        depth: batches in preparation or ready, at most.
        telemetry: gets ``wait`` (the consumer waited for a batch) and ``blocked`` (producers were without room), in seconds.
        on_room: called when a batch has been taken, so that there is room for another.
    """

    def __init__(
        self, depth: int, telemetry: Telemetry, on_room: Callable[[], None] = lambda: None, *, in_order: bool = True
    ) -> None:
        self._depth = depth
        self._in_order = in_order
        self._on_room = on_room
        self._full_since: float | None = None
        self._telemetry = telemetry
        self._changed = threading.Condition()
        self._ready: dict[int, Item] = {}
        self._reserved = 0
        self._taken = 0
        self._end: int | None = None
        self._error: BaseException | None = None
        self._closed = False

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
    def behind(self) -> bool:
        """True while there is no batch for the consumer to take. Takes no lock, for callers that hold one of their own."""
        return not (self._taken in self._ready if self._in_order else self._ready)

    def reserve(self, further: int = 0) -> int | None:
        """The next sequence number, or None while there is no room for a batch. Does not wait.

        Args:
            further: batches beyond the depth that there is room for.

        Raises:
            Closed: when the buffer is closed.
        """
        with self._changed:
            if self._closed:
                raise Closed
            if self._reserved - self._taken >= self._depth + further:
                self._full_since = self._full_since or time.perf_counter()
                return None
            number = self._reserved
            self._reserved += 1
            since, self._full_since = self._full_since, None
        self._telemetry.observe("blocked", time.perf_counter() - since if since is not None else 0.0)
        return number

    def put(self, number: int, item: Item) -> None:
        """Hands in the batch of a reserved number; there is always room for it. A closed buffer lets go of it."""
        with self._changed:
            assert (self._taken if self._in_order else 0) <= number < self._reserved, (self._taken, number, self._reserved)
            assert number not in self._ready, number
            if self._closed:  # nobody will take it
                return
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

    def take(self) -> Item | None:
        """The next batch, waiting for it; None after the last one.

        Raises:
            Closed: when the buffer is closed.
            BaseException: what a producer failed with.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._closed or self._taken == self._end)
            if self._error is not None:
                raise self._error
            if self._taken == self._end:  # asked first: of several consumers the one that sees the end closes the buffer
                return None
            if self._closed:
                raise Closed
            number = self._next
            assert number is not None
            item = self._ready.pop(number)
            self._taken += 1
            self._changed.notify_all()
        self._telemetry.observe("wait", time.perf_counter() - start)
        self._on_room()
        return item

    @property
    def _next(self) -> int | None:
        """The number of the batch that goes out next; None while it is not there."""
        if self._in_order:
            return self._taken if self._taken in self._ready else None
        return next(iter(self._ready), None)

    def close(self) -> None:
        """Wakes all who wait and lets go of the batches."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
