"""How deep the jitter buffer is to be: as deep as the spread of the times between a batch's beginning and its end asks for.

A consumer that takes ``rate`` batches a second never waits if each batch is begun ``make`` seconds before its turn, ``make``
being what this batch takes. With ``depth`` batches begun and not yet taken, batch k is begun when batch k - depth is taken,
``depth / rate`` seconds before its own turn. So the depth that leaves one batch in a hundred late is ``rate x p99(make)``, the
sum of two parts::

    rate x mean(make)                   batches under construction (Little's law)
    rate x (p99(make) - mean(make))     finished ones in reserve, for the spread

That is the playout delay of packet audio, where the buffer is set to a high quantile of the newest delays: Moon, Kurose and
Towsley, Packet audio playout delay adjustment: performance bounds and algorithms, Multimedia Systems 6 (1998). A quantile,
since these delays have heavy tails (one slow file, a disk's hiccup) from which a mean deviation, as in RFC 3550, tells little.

What the formula cannot know (a consumer that takes several at once, a pause longer than any in the window) the consumer's own
waits tell: :class:`DepthControl` has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean

_WINDOW = 128
"""Newest batches whose times count: the smallest window in which one in a hundred is not simply the worst."""
_PACE = 32
"""Newest batches taken that tell the consumer's rate."""
_LEARN = 8
"""Batches of which both times must be known until they count."""
_HOLD = 32
"""Batches without a wait until the depth goes down by one."""
_SHARE = 4
"""The high mark lies a part in so many above the low one, and a wait that begins raises the depth by as much."""
_START = 4
"""The depth before anything is known."""
_LATE = 0.99


class DepthControl:
    """Sets the depth from events alone: it has no clock and no lock, so recorded and made-up traces can be replayed.

    - The **low mark** is ``ceil(rate x p99(make)) + 1``, one being on its way to the consumer. A depth below it rises to it at
      once.
    - When the consumer finds nothing, the depth rises at once by a quarter, and at the end of the wait to what would have
      bridged it: by ``rate x wait``. Not where the buffer was never full since the wait before: then the depth was no limit.
    - The **high mark** lies a quarter above the low one. A depth above it goes down by one after 32 batches in a row of which
      each left another one ready, and none was waited for.
    - Between the marks it stays as it is, so that it does not flap.

    What was learnt stays for the next epoch. Batches begun before the first one of an epoch is taken do not count: theirs is
    the time of a cold start.

    Args:
        lowest, highest: bounds of the depth in batches; equal: a fixed depth.
        start: the depth at first, brought within the bounds.
    """

    def __init__(self, lowest: int, highest: int, start: int = _START) -> None:
        if not 1 <= lowest <= highest:
            raise ValueError(f"a depth of {lowest} to {highest} batches")
        self.lowest = lowest
        self.highest = highest
        self.depth = self._within(start)
        """Batches that may be in preparation or ready, not yet taken."""
        self._make: deque[float] = deque(maxlen=_WINDOW)
        self._pace: deque[float] = deque(maxlen=_PACE)
        self._low = lowest
        self._quiet = 0
        """Batches taken without a wait since the depth last rose, or since it was last judged."""
        self._spare = True
        """Whether each of these left another one ready."""
        self.begin()

    @classmethod
    def fixed(cls, depth: int) -> DepthControl:
        """A depth that stays."""
        return cls(depth, depth, depth)

    @property
    def low_water(self) -> int:
        """The depth that the times of the newest batches ask for, within the bounds; the lowest one until they are known."""
        return self._low

    @property
    def high_water(self) -> int:
        """The depth above which it goes down."""
        return min(self.highest, self._low + max(1, self._low // _SHARE))

    @property
    def levels(self) -> dict[str, int]:
        """The depth and its marks, as statistics have them."""
        return {
            "jitter_depth": self.depth,
            "jitter_low_water": self.low_water,
            "jitter_high_water": self.high_water,
        }

    def begin(self) -> None:
        """An epoch begins: batches are numbered anew, and the time since the one before tells nothing."""
        self._begun: dict[int, float | None] = {}
        """When each batch under construction was begun; None: amid the cold start."""
        self._last: float | None = None
        """When the batch before was taken; none in this epoch yet."""
        self._waiting: float | None = None
        """Since when the consumer waits."""
        self._full = False
        """Whether the depth was a limit since the wait before."""
        self._before: int | None = None
        """The depth when the wait began that raised it."""

    def begun(self, number: int, now: float) -> None:
        """Work on a batch began at ``now`` (seconds); only the first time counts.

        To prepare one far ahead of need is no beginning: it would lie in wait for longer the greater the depth is.
        """
        self._begun.setdefault(number, now if self._last is not None else None)

    def arrived(self, number: int, now: float) -> None:
        """A batch was finished."""
        since = self._begun.pop(number, None)
        if since is not None:
            self._make.append(now - since)

    def refused(self) -> None:
        """A batch could not be begun, for the sake of the depth."""
        self._full = True

    def waits(self, now: float, *, more: bool = True) -> None:
        """The consumer came and found nothing.

        Args:
            more: False where all batches of the epoch are begun: then a greater depth is of no use.
        """
        self._waiting = now
        if self._last is None:
            return
        if self._full and more:
            self._before = self.depth
            self._raise(self.depth + max(1, self.depth // _SHARE))
        self._full = False

    def taken(self, now: float, ready: int, *, more: bool = True) -> None:
        """The consumer took a batch.

        Args:
            ready: finished batches that are left.
            more: False where all batches of the epoch are begun: then that few are left says nothing.
        """
        since, self._waiting = self._waiting, None
        waited = now - since if since is not None else 0.0
        last, self._last = self._last, now
        if last is None:  # the first one of an epoch is always waited for
            return
        # Of a wait no more counts than a batch takes: a pause is no pace.
        self._pace.append(now - last - waited + (min(waited, fmean(self._make)) if self._make else 0.0))
        if self._before is not None:
            before, self._before = self._before, None
            self._raise(before + self._ceil(waited))
        self._settle(waited > 0, spare=ready > 0 or not more)

    def _settle(self, waited: bool, *, spare: bool) -> None:
        if len(self._make) >= _LEARN <= len(self._pace):
            late = sorted(self._make)[min(len(self._make) - 1, int(_LATE * len(self._make)))]
            self._low = self._within(self._ceil(late) + 1)
        self._raise(self._low)
        if waited:
            self._quiet, self._spare = 0, True
            return
        self._quiet, self._spare = self._quiet + 1, self._spare and spare
        if self._quiet >= _HOLD:
            if self._spare and self.depth > self.high_water:
                self.depth -= 1
            self._quiet, self._spare = 0, True

    def _ceil(self, seconds: float) -> int:
        """Batches that the consumer takes in a time, rounded up."""
        mean = fmean(self._pace) if self._pace else 0.0
        return self.highest if seconds >= mean * self.highest else math.ceil(seconds / mean)

    def _raise(self, depth: int) -> None:
        if self._within(depth) > self.depth:
            self.depth = self._within(depth)
            self._quiet, self._spare = 0, True

    def _within(self, depth: int) -> int:
        return max(self.lowest, min(self.highest, depth))
