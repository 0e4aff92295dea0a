"""Counters and durations that every room may write to. Knows nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("gpupipe")

_KEPT = 8192
"""Durations kept per name for percentiles: the newest ones."""


class Telemetry:
    """Counts events and collects durations in seconds; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._durations: dict[str, deque[float]] = {}
        self._totals: Counter[str] = Counter()
        self._told: set[str] = set()

    def count(self, name: str, by: float = 1) -> None:
        with self._lock:
            self._counts[name] += by  # type: ignore[assignment]

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._durations.setdefault(name, deque(maxlen=_KEPT)).append(seconds)
            self._totals[name] += seconds  # type: ignore[assignment]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measures the wall time of its block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe(name, time.perf_counter() - start)

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

    def percentile(self, name: str, share: float) -> float:
        """The duration in seconds that ``share`` (0 to 1) of the newest observations do not exceed; 0.0 without any."""
        with self._lock:
            values = sorted(self._durations.get(name, ()))
        return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    def snapshot(self) -> dict[str, Any]:
        """All counts by name, and for each duration its total, median and 99th percentile in seconds.

        A duration ``x`` gives ``x_seconds``, ``x_p50_seconds`` and ``x_p99_seconds``.
        """
        with self._lock:
            result: dict[str, Any] = dict(self._counts)
            names = list(self._durations)
            result.update({f"{name}_seconds": self._totals[name] for name in names})
        for name in names:
            result[f"{name}_p50_seconds"] = self.percentile(name, 0.50)
            result[f"{name}_p99_seconds"] = self.percentile(name, 0.99)
        return result
