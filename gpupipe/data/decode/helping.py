"""How much software helps hardware: which clips helpers may have, and how many helpers are at it.

In time: a helper gets a clip only when the hardware, at its rate of late, needs ``_MARGIN`` times as long to get there as the
helper is expected to take. That is learnt in seconds a unit of cost for each kind of clip, while everything else runs too. A
kind not yet tried is tried by one helper alone. One that turned out too slow is tried again ``_FORGET`` clips later, then
ever more seldom: it may have been measured at a bad time.

How many: none until the hardware's own rate is known, from a window of clips; then one. Their number doubles after each
window in which hardware and helpers together were faster than the hardware alone, and halves after two windows in a row in
which they were not, or one in which they were much slower; from where it was halved it grows by one. When none are left, all
pause, each time ``_PATIENCE`` times as long. Now and then all pause for one window, so that the hardware's own rate is known
as it is now. A window opens when the last change has had its effect. Time in which the consumer is the slow one does not
count.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_MARGIN = 2.0
"""How many times as long as a helper the hardware must need to get to a clip."""
_MEMORY = 0.8
"""Weight of what has been learnt against the newest measurement of a clip."""
_FORGET = 512
"""Clips after which a kind that was too slow is tried again, the first time."""
_PATIENCE = 4
"""How many times as long it takes after each trial in vain, of a kind or of the first helper."""
_RECENT = 32
"""Clips from which the hardware's rate of late is taken."""
_FEWEST = 8
"""Clips before it is known."""
_SETTLE = 16
"""Clips at least between a change and the window that judges it."""
_WINDOW = 48
"""Clips in a window at least."""
_WORTH = 1.01
"""What hardware and helpers must do together, against the hardware alone, for helpers to be of use."""
_MUCH_SLOWER = 0.95
"""One window below this part of the hardware's own rate is enough to halve the helpers."""
_OWN_TIME = 0.5
"""Part of a window in which the consumer must not have been the slow one, or the window says nothing."""
_LONGEST_PAUSE = 64
"""Windows without helpers at most before they get another chance."""
_FIRST_CHECK, _LAST_CHECK = 4, 32
"""Good windows before the hardware's own rate is measured again: doubling from the first to the last."""


class Helping:
    """What a loader has learnt of its helpers, over all its epochs. Called by the schedule alone, which holds its lock.

    Args:
        most: helpers that there are.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.count = 0
        """Helpers that may help now: those whose place is lower."""
        self.clock = clock
        self._hardware = 1
        self._held_up = 0.0
        self._seconds_a_unit: dict[str, float] = {}
        self._tried: dict[str, tuple[int, int]] = {}
        """For each kind: clips done in all when it was last measured, and after how many more it may be tried again."""
        self._total = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        """Times at which the hardware finished its last clips, and their costs."""
        self.clip_seconds: float | None = None
        """Seconds from one of the hardware's clips to the next; None while they are not known."""
        self._unit_seconds = 0.0
        """The same for a unit of cost."""
        self._at_work = 0
        self._on_trial: str | None = None
        self._helper_seconds = 0.0
        """What helpers have taken for a clip of late."""
        self._alone: float | None = None
        """Units of cost a second without helpers."""
        self._pause = self._pauses_left = 1
        self._resume = 1
        """Helpers after a pause."""
        self._safe = most
        """Up to here their number doubles; from there on it grows by one."""
        self._slower = 0
        """Windows in a row that were no faster than the hardware alone."""
        self._check = self._check_in = _FIRST_CHECK
        self._restart(settling=True)

    def begin(self, hardware: int) -> None:
        """Says that an epoch begins, with so many hardware engines: nobody is at work, and its start-up teaches nothing."""
        self._hardware = hardware
        self._recent.clear()
        self.clip_seconds = None
        self._at_work, self._on_trial = 0, None
        self._restart(settling=True)

    # Which clips

    def distance(self, kind: str, cost: float) -> float | None:
        """Seconds that the hardware must be away from a clip for a helper to have it; None for a kind that is to be tried."""
        a_unit = self._seconds_a_unit.get(kind)
        return None if a_unit is None else _MARGIN * a_unit * cost

    def in_time(self, kind: str, cost: float, before: float) -> bool:
        """Whether a helper may have a clip when the hardware has ``before`` units of cost to do until it gets there."""
        distance = self.distance(kind, cost)
        if distance is None:
            return self._on_trial is None
        return before * self._unit_seconds >= distance

    def forget(self, kind: str) -> None:
        """Says that clips of a kind are out of reach; it is tried again when its measurement is old."""
        since, patience = self._tried[kind]
        if self._total - since >= patience:
            self._tried[kind] = self._total, _PATIENCE * patience
            del self._seconds_a_unit[kind]

    # What happens

    def took(self, kind: str) -> None:
        """A helper has taken one of the hardware's clips."""
        self._at_work += 1
        if kind not in self._seconds_a_unit:
            self._on_trial = kind

    def ended(self, kind: str) -> None:
        """A helper is no longer at such a clip, whatever came of it."""
        self._at_work -= 1
        if self._on_trial == kind:
            self._on_trial = None

    def learn(self, kind: str, cost: float, seconds: float) -> None:
        """A helper has decoded a clip of any sort in this time."""
        before = self._seconds_a_unit.get(kind)
        self._seconds_a_unit[kind] = _learnt(before, seconds / max(cost, 1e-9))
        self._tried[kind] = self._total, self._tried.get(kind, (0, _FORGET))[1]
        self._helper_seconds = _learnt(self._helper_seconds or None, seconds)

    def helped(self, cost: float) -> None:
        """A helper has done one of the hardware's clips, and before the hardware."""
        self._helped += 1
        self._did(cost)

    def hardware_did(self, cost: float) -> None:
        """The hardware has done a clip; of cost 0 where there was nothing to decode."""
        self._recent.append((self._now(), cost))
        if len(self._recent) >= _FEWEST:
            seconds = max(0.0, self._recent[-1][0] - self._recent[0][0])
            self.clip_seconds = seconds / (len(self._recent) - 1)
            self._unit_seconds = seconds / (sum(one for _, one in self._recent) - self._recent[0][1] or math.inf)
        self._did(cost)

    def held_up(self, seconds: float) -> None:
        """One hardware engine had nothing to do for so long, since the consumer had batches to take and did not."""
        self._held_up += seconds / self._hardware

    # How many

    def _now(self) -> float:
        """The time, less what the consumer has held up."""
        return self.clock() - self._held_up

    def _restart(self, *, settling: bool) -> None:
        self._settling = settling
        self._since, self._opened = self._now(), self.clock()
        self._clips = self._helped = 0
        self._cost = 0.0

    def _did(self, cost: float) -> None:
        self._total += 1
        self._clips += 1
        self._cost += cost
        seconds = self._now() - self._since
        if seconds <= self._helper_seconds or (self.count == 0 and self._at_work):
            return
        if self._settling and self._clips >= _SETTLE:
            self._restart(settling=False)
        elif not self._settling and self._clips >= _WINDOW:
            if seconds >= _OWN_TIME * (self.clock() - self._opened):
                self._judge(self._cost / seconds)
            else:
                self._restart(settling=False)

    def _judge(self, rate: float) -> None:
        before = self.count
        if before == 0:
            self._without_helpers(rate)
        elif self._helped:  # else there was none to judge
            self._with_helpers(rate)
        self._restart(settling=self.count != before)

    def _without_helpers(self, rate: float) -> None:
        self._alone = _learnt(self._alone, rate)
        self._pauses_left -= 1
        if self._pauses_left <= 0:
            self.count, self._resume, self._slower = self._resume, 1, 0

    def _with_helpers(self, rate: float) -> None:
        alone = self._alone or 0.0
        if rate > _WORTH * alone:
            self._slower = 0
            self._check_in -= 1
            if self._check_in > 0:
                self.count = min(self.most, 2 * self.count if 2 * self.count <= self._safe else self.count + 1)
            else:
                self._check = self._check_in = min(_LAST_CHECK, 2 * self._check)
                self._resume, self.count, self._pauses_left = self.count, 0, 1
                self._pause = 1  # help has added for so long
            return
        self._slower += 1
        if self._slower > 1 or rate < _MUCH_SLOWER * alone:
            self._slower = 0
            self._safe = self.count = self.count // 2
            if self.count == 0:
                self._pause = self._pauses_left = min(_LONGEST_PAUSE, _PATIENCE * self._pause)


def _learnt(before: float | None, now: float) -> float:
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
