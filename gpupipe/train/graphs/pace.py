"""Whether the host or the GPU is the bottleneck of a call, measured without waiting for the call: a graph saves launches, which
gains nothing where the GPU is busy with earlier work all the while."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpupipe.train.timeline import Mark

LOOKS = 3
"""Latest calls of a kind that decide. The GPU is the bottleneck where it was that of half of them: what holds a single call up,
such as memory that is asked of the driver or a collection of garbage, holds up the host."""
LOOK_AGAIN = 1000
"""Further calls of a kind after which it is measured anew."""
_HIDDEN = 1.5
"""Times the host's time of a call that the GPU takes, from which on launches are hidden: below, they still cost something here
and there."""
_BEHIND_S = 0.002
"""Of work before it, by which the GPU is behind: several times what one kernel in a row of launches takes, and less than a full
launch queue holds (about a thousand launches, of some microseconds at least). Where that is full, a launch takes the host as
long as a kernel takes the GPU, and their times of a call say nothing."""
_POLL_S = 2e-5
_SHOWN = 3


class Moment(Protocol):
    """A place in the current stream."""

    def reached(self) -> bool:
        """Whether the GPU has come to it."""
        ...

    def since_ms(self, other: Any) -> float:
        """Milliseconds on the GPU from another one to this one, both of which it has come to."""
        ...


class Clock(Protocol):
    """The host's time and the GPU's."""

    def host_s(self) -> float:
        """Seconds on the host since some moment."""
        ...

    def mark(self) -> Moment:
        """A place behind what the current stream was given so far."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets other threads go on for so long."""
        ...


class DeviceClock:
    """That of a device, and of its current stream; on the CPU both times are the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_s(self) -> float:
        return time.perf_counter()

    def mark(self) -> Moment:
        return Mark(self._device)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class _Measured:
    begin: Moment
    end: Moment
    host_ms: float
    behind: bool
    """The GPU was behind when the host came to the call, and still when it left it."""

    def gpu_ms(self) -> float | None:
        """None while it is not done."""
        return self.end.since_ms(self.begin) if self.end.reached() else None

    def gpu_bound(self) -> bool:
        spent = self.gpu_ms()
        return self.behind or spent is None or spent > _HIDDEN * self.host_ms

    def __str__(self) -> str:
        spent = self.gpu_ms()
        if spent is None:
            return f"launched in {self.host_ms:.2f} ms, and not done on the GPU when the next one came"
        late = ", which was busy with earlier work all the while" if self.behind else ""
        return f"launched in {self.host_ms:.2f} ms, {spent:.2f} ms on the GPU{late}"


class Pace:
    """The latest measurements of one kind of call."""

    def __init__(self) -> None:
        self._latest: deque[_Measured] = deque(maxlen=LOOKS)

    @contextmanager
    def measured(self, clock: Clock) -> Iterator[None]:
        """Measures the call within the block; one that raises does not count.

        It may hold the host up by 2 ms before the call and behind it, and only as long as the GPU has work.
        """
        begin = clock.mark()
        behind = not _reached_soon(clock, begin)
        before = clock.host_s()
        yield
        host_ms = 1000 * (clock.host_s() - before)
        end = clock.mark()
        self._latest.append(_Measured(begin, end, host_ms, behind and not _reached_soon(clock, end)))

    def known(self) -> bool:
        """Whether any call was measured."""
        return bool(self._latest)

    def gpu_bound(self) -> str | None:
        """The times of the latest call that the GPU was the bottleneck of; None where the host is."""
        found = [each for each in self._latest if each.gpu_bound()]
        return str(found[-1]) if found and 2 * len(found) >= len(self._latest) else None


def _reached_soon(clock: Clock, moment: Moment) -> bool:
    until = clock.host_s() + _BEHIND_S
    while not moment.reached():
        if clock.host_s() >= until:
            return False
        clock.sleep(_POLL_S)
    return True


def shown(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes of a call's tensors, the first ones."""
    shapes = ["x".join(map(str, each.shape)) or "a scalar" for each in tensors[:_SHOWN]]
    return ", ".join(shapes + ["…"] * (len(tensors) > _SHOWN)) or "no tensors"
