"""Which stage limits a loader, in words.

The rule. Two shares of a stretch of time are held against each other: *waiting*, of the training loop's time, which faster data
could win; and *room*, of the threads' time, in which they stand still since enough batches are ahead, which a faster loop could
win.

1. Both are under 10 %: data and loop keep pace. The stage that takes the most of the threads is named beside the loop. Where
   waiting is under 2 % nothing is advised, for there is nothing to gain.
2. Waiting is at least twice room: the data limits. The stage named is the one that takes the most of the threads' time; with it
   any other that takes at least 60 % as much. What threads wait for an index counts for the index.
3. Room is at least twice waiting: the training loop limits, and nothing is advised.
4. Else batches come unevenly: slow videos hold up those behind them, or the loop takes batches in bursts.

Each epoch starts empty. The wait for its first batch is left out of *waiting*, and told beside it where it takes 10 % or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpupipe.data.stages import CREW, StageFigures

_LITTLE = 0.10
_NOTHING = 0.02
"""Waiting below which faster data would gain nothing, so that nothing is advised."""
_TIMES = 2.0
_ALIKE = 0.60
_WORTH_TELLING = 0.25

_NO_GAIN = "faster data would gain nothing"
_HELP = {
    "index": "`gpupipe index` makes indices ahead of training",
    "plan": "more clip.clips_per_video: a visit is planned once for all of them",
    "read": "cache={'read_ahead': 32}, or faster storage",
    "decode": "more decode.threads or cpu_workers, a cache of clips, smaller videos or ones with more keyframes",
    "transform": "fewer or cheaper changes of the picture, a smaller size",
    "custom": "your own before= or after= transform",
    "assemble": "fewer columns, or no transform.mix",
    "uneven": "a larger jitter.depth, or jitter={'in_order': False}",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a loader over a stretch of time."""

    stages: tuple[str, ...]
    """Names as in ``stats()["stages"]``, the most limiting first; ``consumer`` is the training loop. Empty where no stage does:
    nothing has run, or batches come unevenly."""
    text: str
    """A sentence for people."""
    help: str = ""
    """What to try; empty where faster data would gain little or nothing."""
    waiting: float = 0.0
    """Share of the loop's time, 0 to 1, in which it waits for a batch."""
    room: float = 0.0
    """Share of the threads' time, 0 to 1, in which they wait for the loop."""

    def __str__(self) -> str:
        return self.text


def limit(now: Mapping[str, StageFigures], before: Mapping[str, StageFigures] | None = None) -> Limit:
    """Which stage limits, between two looks at ``loader.stats()["stages"]``, or since the loader was made."""

    def of(name: str, key: str) -> float:
        figures: Mapping[str, object] = now[name]
        earlier: Mapping[str, object] = (before or {}).get(name) or {}
        value, less = figures[key], earlier.get(key, 0.0)
        assert isinstance(value, int | float)
        assert isinstance(less, int | float)
        return max(0.0, value - less)

    names = [name for name in CREW if name in now]
    last = names[-1]
    busy = {name: of(name, "busy_seconds") for name in names}
    busy["index"] += of("index", "input_seconds")
    blocked = of(last, "output_seconds")
    crew = sum(busy.values()) + blocked
    step, waited = of("consumer", "busy_seconds"), of("buffer", "input_seconds") + of("buffer", "busy_seconds")
    start = max(0.0, of("consumer", "input_seconds") - waited)
    loop, wall = step + waited, of("consumer", "seconds")
    if crew <= 0 or wall <= 0:
        return Limit((), "nothing has run yet")
    threads = _threads(_thread_seconds(now) - _thread_seconds(before), wall)
    shares = {name: busy[name] / crew for name in names}
    ordered = sorted(names, key=lambda name: -shares[name])
    top = tuple(name for name in ordered if shares[name] >= _ALIKE * shares[ordered[0]])
    room = blocked / crew
    if loop <= 0:
        return Limit((), f"no batch has been taken yet: {_busy(top, shares, threads)}", "", 0.0, room)
    found = _weigh(waited / loop, room, top, shares, threads)
    share = start / (start + loop)
    if share >= _LITTLE:
        text = f"{found.text}; besides, {_percent(share)} of the time went into waits for the first batches of epochs"
        found = replace(found, text=text)
    return found


def _weigh(waiting: float, room: float, top: tuple[str, ...], shares: Mapping[str, float], threads: str) -> Limit:
    """The rule itself; ``top``: the stages to be named where the data limits."""
    waits = f"the training loop waits {_percent(waiting)} of the time"
    if waiting < _LITTLE and room < _LITTLE:
        text = f"data and training loop keep pace: {_busy(top, shares, threads)}, {waits}"
        if waiting < _NOTHING:
            return Limit(("consumer", *top), f"{text}; {_NO_GAIN}", "", waiting, room)
        return Limit(("consumer", *top), text, _HELP[top[0]], waiting, room)
    if room >= _TIMES * waiting:
        blocked = f"{threads} {_verb('waits', 'wait', threads)} for room {_percent(room)} of it"
        text = f"the training loop limits: it is busy {_percent(1 - waiting)} of the time, {blocked}"
        text += f"; {_NO_GAIN}" if waiting < _NOTHING else ""
        return Limit(("consumer",), text, "", waiting, room)
    if waiting >= _TIMES * room:
        verb = "limits" if len(top) == 1 else "limit together"
        text = f"{_and(top)} {verb}: {_busy(top, shares, threads, 'there')}, {waits}"
        if room >= _WORTH_TELLING:
            text += f"; {_percent(room)} of it threads stand still behind slow videos"
        return Limit(top, text, _HELP[top[0]], waiting, room)
    text = f"batches come unevenly: {waits}, {threads} {_verb('waits', 'wait', threads)} for room {_percent(room)} of it"
    return Limit((), text, _HELP["uneven"], waiting, room)


def _busy(names: tuple[str, ...], shares: Mapping[str, float], threads: str, where: str = "") -> str:
    spent = " and ".join(_percent(shares[name]) for name in names)
    whose = "its" if threads == "1 thread" else "their"
    return f"{threads} {_verb('spends', 'spend', threads)} {spent} of {whose} time {where or f'on {_and(names)}'}"


def _thread_seconds(stages: Mapping[str, StageFigures] | None) -> float:
    return stages["decode"]["threads"] * stages["decode"]["seconds"] if stages else 0.0


def _threads(thread_seconds: float, wall_seconds: float) -> str:
    number = max(1, math.ceil(thread_seconds / wall_seconds - 0.1))  # threads end a little before their epoch
    return f"{number} thread{'s' if number > 1 else ''}"


def _verb(one: str, several: str, threads: str) -> str:
    return one if threads == "1 thread" else several


def _and(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"
