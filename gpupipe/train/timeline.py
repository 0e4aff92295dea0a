"""When things were done, on the device where there is one: shown, not assumed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

_KEPT = 512
"""Newest spans of each kind that are kept."""


@dataclass(frozen=True)
class Span:
    """One piece of work."""

    kind: str
    index: int
    begin_ms: float
    """Since the first span of the timeline."""
    end_ms: float


class Mark:
    """A moment: on the current stream of a CUDA device, else of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        """Whether it has come; does not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def since_ms(self, other: Mark) -> float:
        """Milliseconds from another moment to this one. Waits until both have come."""
        if self._event is None or other._event is None:
            return 1000 * (self._seconds - other._seconds)
        self._event.synchronize()
        other._event.synchronize()
        return float(other._event.elapsed_time(self._event))


class Timeline:
    """Spans by kind, the newest ones. Different threads may add spans of different kinds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: Mark | None = None
        self._marks: dict[str, deque[tuple[int, Mark, Mark]]] = {}

    def mark(self) -> Mark:
        made = Mark(self._device)
        self._zero = self._zero or made
        return made

    def add(self, kind: str, index: int, begin: Mark, end: Mark) -> None:
        self._marks.setdefault(kind, deque(maxlen=_KEPT)).append((index, begin, end))

    def spans(self) -> list[Span]:
        """All that are kept, by their beginning. Waits for the device."""
        zero = self._zero
        if zero is None:
            return []
        found = [
            Span(kind, index, begin.since_ms(zero), end.since_ms(zero))
            for kind, marks in list(self._marks.items())
            for index, begin, end in list(marks)
        ]
        return sorted(found, key=lambda span: span.begin_ms)


def overlap(spans: list[Span], kind: str, beside: str) -> float:
    """Share of the time of one kind's spans, 0 to 1, in which a span of the other kind was going on; 0 without spans."""
    others = sorted((span.begin_ms, span.end_ms) for span in spans if span.kind == beside)
    total = shared = 0.0
    for span in spans:
        if span.kind != kind:
            continue
        total += span.end_ms - span.begin_ms
        at = span.begin_ms
        for begin, end in others:  # those that overlap one another count once
            begin, end = max(begin, at), min(end, span.end_ms)
            if end > begin:
                shared += end - begin
                at = end
    return shared / total if total else 0.0
