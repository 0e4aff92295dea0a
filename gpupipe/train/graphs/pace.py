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
"""Latest calls of a kind that decide. What holds one up only makes its times longer: memory that is asked of the driver or a
collection of garbage on the host, on the GPU another process that has its turn. So their least times count, and the GPU is
behind only where it is at all of them."""
LOOK_AGAIN = (10, 100, 1000)
"""Further calls of a kind after which it is measured anew, the first time, the second and from then on: other processes may
have had the GPU at all of these calls, and the rest of the loop may change. To take the host for the bottleneck costs a
capture, to take the GPU for it all that graphs would save."""
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
        """Whether enough calls were measured: one shows that the host is the bottleneck, only several that the GPU is."""
        return len(self._latest) == LOOKS or (bool(self._latest) and self.gpu_bound() is None)

    def gpu_bound(self) -> str | None:
        """The least times of the calls where the GPU was the bottleneck of them; None where the host was."""
        host = min(each.host_ms for each in self._latest)
        done = [spent for each in self._latest if (spent := each.gpu_ms()) is not None]
        behind = all(each.behind for each in self._latest)
        if not done:
            return f"launched in {host:.2f} ms, and not done on the GPU when the next one came"
        if not behind and min(done) <= _HIDDEN * host:
            return None
        late = ", which was busy with earlier work all the while" if behind else ""
        return f"launched in {host:.2f} ms, {min(done):.2f} ms on the GPU{late}"


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
