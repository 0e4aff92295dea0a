"""Counters, durations and what threads spend their time on, for every room to write to. Knows nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

log = logging.getLogger("gpupipe")

_KEPT = 2048
"""Durations kept per name for percentiles: the newest ones. To sort many more would hold up other threads for milliseconds."""


class Marker(Protocol):
    """Shows ranges of a thread's time to a profiler. The two calls come in pairs, nested, in one thread."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class Clock:
    """Divides one thread's time among the things that it is at, one at a time, up to :meth:`end`."""

    __slots__ = ("_ended", "_telemetry", "about", "at", "since")

    def __init__(self, telemetry: Telemetry, at: str) -> None:
        self._telemetry = telemetry
        self._ended: float | None = None
        self.at = at
        self.since = telemetry.now()
        self.about = ""
        """What the thread's ranges in a profiler are about."""

    def turn(self, at: str) -> str:
        """Says what the thread is at from now on; what it was at before."""
        return self._telemetry.turn(self, at)

    def end(self) -> None:
        """Stops the clock. Takes no lock: finalizers may call it in a thread that holds any."""
        if self._ended is None:
            self._ended = self._telemetry.now()

    @property
    def ended(self) -> float | None:
        """When, by the telemetry's time; None while it runs."""
        return self._ended


class _Span:
    """The context of one block. A class: a generator would cost twice as much, several times a clip."""

    __slots__ = ("_before", "_clock", "_name", "_start", "_telemetry", "_timed")

    def __init__(self, telemetry: Telemetry, name: str, clock: Clock | None, *, timed: bool) -> None:
        self._telemetry = telemetry
        self._name = name
        self._clock = clock
        self._timed = timed

    def __enter__(self) -> None:
        telemetry, clock = self._telemetry, self._clock
        if telemetry.marker is not None:
            about = f" {clock.about}" if clock is not None and clock.about else ""
            telemetry.marker.push(f"gpupipe {self._name}{about}")
        self._before = clock.turn(self._name) if clock is not None else ""
        self._start = clock.since if clock is not None else telemetry.now()

    def __exit__(self, *exc: object) -> None:
        telemetry, clock = self._telemetry, self._clock
        if clock is not None:
            clock.turn(self._before)
        if self._timed:
            end = clock.since if clock is not None else telemetry.now()
            telemetry.observe(self._name, end - self._start)
        if telemetry.marker is not None:
            telemetry.marker.pop()


class Telemetry:
    """Counts events, collects durations in seconds and adds up threads' time; safe to use from any thread.

    Args:
        marker: told of each span's begin and end.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, marker: Marker | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self.marker = marker
        self.now = now
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._durations: dict[str, deque[float]] = {}
        self._totals: Counter[str] = Counter()
        self._observed: Counter[str] = Counter()
        self._told: set[str] = set()
        self._spent: Counter[str] = Counter()
        self._clocks: list[Clock] = []
        self._own = threading.local()

    def count(self, name: str, by: float = 1) -> None:
        with self._lock:
            self._counts[name] += by  # type: ignore[assignment]

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._durations.setdefault(name, deque(maxlen=_KEPT)).append(seconds)
            self._totals[name] += seconds  # type: ignore[assignment]
            self._observed[name] += 1

    def span(self, name: str, clock: Clock | None = None) -> AbstractContextManager[None]:
        """Measures the time of its block, nested ones included. Meanwhile the thread's clock, or this, runs for ``name``."""
        return _Span(self, name, clock or self.own_clock, timed=True)

    def at(self, name: str) -> AbstractContextManager[None]:
        """As :meth:`span`, for the thread's clock alone: no duration is kept."""
        return _Span(self, name, self.own_clock, timed=False)

    def clock(self, at: str, *, own: bool = False) -> Clock:
        """A new clock that runs for ``at``, to be ended.

        Args:
            own: it is the calling thread's, which :meth:`span`, :meth:`at` and :attr:`own_clock` go by.
        """
        clock = Clock(self, at)
        with self._lock:
            self._gather()
            self._clocks.append(clock)
        if own:
            self._own.clock = clock
        return clock

    @property
    def own_clock(self) -> Clock | None:
        """The calling thread's clock."""
        return getattr(self._own, "clock", None)

    def turn_own(self, at: str) -> None:
        """Says what the calling thread is at from now on, where it has a clock."""
        if (clock := self.own_clock) is not None:
            clock.turn(at)

    def about(self, what: str) -> None:
        """Says what the calling thread's ranges in a profiler are about from now on."""
        if (clock := self.own_clock) is not None:
            clock.about = what

    def turn(self, clock: Clock, at: str) -> str:
        """For :meth:`Clock.turn`."""
        now = self.now()
        with self._lock:
            before = clock.at
            self._add(clock, now)
            clock.at, clock.since = at, now
        return before

    def spent(self) -> dict[str, float]:
        """Thread-seconds by what threads were at, up to this moment."""
        with self._lock:
            self._gather()
            now, spent = self.now(), Counter(self._spent)
            for clock in self._clocks:
                spent[clock.at] += max(0.0, now - clock.since)  # type: ignore[assignment]
        return dict(spent)

    def _add(self, clock: Clock, now: float) -> None:
        end = now if clock.ended is None else clock.ended
        self._spent[clock.at] += max(0.0, end - clock.since)  # type: ignore[assignment]

    def _gather(self) -> None:
        """Adds up the clocks that have ended, which are forgotten then. With the lock held."""
        running = []
        for clock in self._clocks:
            if clock.ended is None:
                running.append(clock)
            else:
                self._add(clock, clock.ended)
                clock.since = clock.ended  # its thread may still turn it: nothing counts twice
        self._clocks = running

    def warn_once(self, key: str, message: str) -> None:
        """Logs a warning the first time that ``key`` comes up."""
        with self._lock:
            if key in self._told:
                return
            self._told.add(key)
        log.warning(message)

    def value(self, name: str) -> float:
        with self._lock:
            return self._counts[name]

    def observed(self, name: str) -> int:
        """How many durations of this name were collected."""
        with self._lock:
            return self._observed[name]

    def percentile(self, name: str, share: float) -> float:
        """The duration in seconds that ``share`` (0 to 1) of the newest observations do not exceed; 0.0 without any."""
        return self._percentiles(name, share)[0]

    def _percentiles(self, name: str, *shares: float) -> list[float]:
        with self._lock:
            values = list(self._durations.get(name, ()))
        values.sort()  # without the lock, for which threads that work would wait
        return [values[min(len(values) - 1, int(share * len(values)))] if values else 0.0 for share in shares]

    def snapshot(self) -> dict[str, Any]:
        """All counts by name, and for each duration its total, median and 99th percentile in seconds.

        A duration ``x`` gives ``x_seconds``, ``x_p50_seconds`` and ``x_p99_seconds``.
        """
        with self._lock:
            result: dict[str, Any] = dict(self._counts)
            names = list(self._durations)
            result.update({f"{name}_seconds": self._totals[name] for name in names})
        for name in names:
            result[f"{name}_p50_seconds"], result[f"{name}_p99_seconds"] = self._percentiles(name, 0.50, 0.99)
        return result
