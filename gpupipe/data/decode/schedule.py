"""Which engine decodes which clip: one queue for all, and a second one for what NVDEC cannot decode.

Hardware and software engines take clips from one sequence, so that the oldest batch is finished first. What only software can
decode waits for a software engine, and holds up no hardware. Software engines that may help take a clip meant for the hardware
only when they are sure to have done it before the hardware has worked through the window of clips in flight: a later one would
hold up its batch. How long it takes is learnt as they go, in seconds a unit of the plan's cost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

from gpupipe.data.crew import TakenAway
from gpupipe.data.decode.choice import Decoder
from gpupipe.data.jitter import Closed

_SHARE = 0.5
"""Part of the window within which a helper must be done."""
_MEMORY = 0.8
"""Weight of what has been learnt against the newest measurement."""


class Clip(Protocol):
    """What is scheduled."""

    @property
    def decoder(self) -> Decoder:
        """Who is to decode it."""
        ...

    @property
    def kind(self) -> str:
        """Clips of one kind take like time a unit of cost."""
        ...

    @property
    def cost(self) -> float:
        """Work to decode it, in any unit."""
        ...

    @property
    def decoded(self) -> bool:
        """It needs no decoding: any engine may have it, and how long it takes says nothing of others."""
        ...


Task = TypeVar("Task")
Work = TypeVar("Work", bound=Clip)


class Schedule(Generic[Task, Work]):
    """Hands out the clips of one epoch; for use by all its threads.

    Args:
        tasks: what is to be done, in order; None while there is no room for more, of which :meth:`room` tells. They must not
            block: a clip that comes back may be what everybody waits for.
        prepare: makes a clip of a task, or None when there is nothing to decode.
        hardware: engines that decode with NVDEC, beside others that do not. Without any, every clip is for whoever comes.
        helping: software engines also take clips that NVDEC could decode.
        window: clips in flight at most.
    """

    def __init__(
        self,
        tasks: Generator[Task | None],
        prepare: Callable[[Task], Work | None],
        *,
        hardware: int,
        helping: bool,
        window: int,
    ) -> None:
        self._tasks = tasks
        self._prepare = prepare
        self._hardware = hardware
        self._helping = helping
        self._window = window
        self._repeated: deque[Task] = deque()
        self._pulling = threading.Lock()
        self._lock = threading.RLock()  # garbage collection may close the schedule in a thread that holds the lock
        self._changed: dict[Decoder, threading.Condition] = {
            "nvdec": threading.Condition(self._lock),
            "cpu": threading.Condition(self._lock),
        }
        """One for each kind of engine: a wake-up of threads that have nothing to do would cost the others."""
        self._waiting: dict[Decoder, deque[Work]] = {"nvdec": deque(), "cpu": deque()}
        self._at_work = 0
        """Clips that are being prepared or decoded: any of them may turn out to be for the other kind of engine."""
        self._exhausted = False
        self._rooms = 0
        self._full_at = -1
        """What ``_rooms`` was when there was no room."""
        self._closed = False
        self._pace: float | None = None
        """Seconds from one clip of the hardware to the next."""
        self._last_done: float | None = None
        self._seconds_a_unit: dict[str, float] = {}

    def take(self, decoder: Decoder) -> Work | None:
        """The next clip for an engine, None when there will be none; it must be followed by :meth:`done` or :meth:`pass_on`.

        Raises:
            Closed: when the schedule is closed.
        """
        line = self._line(decoder)
        own = self._waiting[line]
        while True:
            with self._lock:
                self._changed[line].wait_for(lambda: self._closed or own or self._may_pull(decoder) or self._nothing_comes())
                if self._closed:
                    raise Closed
                if own:
                    self._at_work += 1
                    return own.popleft()
                if not self._may_pull(decoder):
                    return None
                self._at_work += 1  # before the pull: others must not believe that nothing comes
            clip = self._pull()
            if clip is None:
                self._less_at_work()
            elif self._suits(clip, decoder):
                return clip
            else:
                self.pass_on(clip)

    def pass_on(self, clip: Work) -> None:
        """Leaves a clip that was taken to the kind of engine that its ``decoder`` now names."""
        with self._lock:
            line = self._line(clip.decoder)
            self._waiting[line].append(clip)
            self._changed[line].notify()
            self._one_less()

    def done(self, clip: Work, decoder: Decoder, seconds: float | None = None) -> None:
        """Says that a clip is decoded by such an engine, and how long that took; None for one that was given up."""
        with self._lock:
            if clip.decoded:
                self._last_done = None  # the time to the next one would be no measure of the hardware
            elif seconds is None:
                pass
            elif decoder == "cpu":
                now = seconds / max(clip.cost, 1e-9)
                self._seconds_a_unit[clip.kind] = _learnt(self._seconds_a_unit.get(clip.kind), now)
            else:
                now = time.monotonic()
                if self._last_done is not None:
                    self._pace = _learnt(self._pace, now - self._last_done)
                self._last_done = now
                if self._helping:
                    self._changed["cpu"].notify()
            self._one_less()

    def again(self, task: Task | None) -> None:
        """Says that a clip was taken away from the thread that had it; ``task`` is to be done in its place."""
        with self._lock:
            if task is not None:
                self._repeated.append(task)
                self._exhausted = False
            self._at_work -= 1
            self._wake_all()

    def room(self) -> None:
        """Says that there may be room for more tasks."""
        with self._lock:
            self._rooms += 1
            self._changed["nvdec"].notify_all()
            if self._helping:
                self._changed["cpu"].notify_all()

    def close(self) -> None:
        """Wakes all who wait."""
        with self._lock:
            self._closed = True
            self._wake_all()

    def let_go(self) -> None:
        """Drops all clips and ends the tasks; when no thread uses the schedule any more."""
        with self._pulling:
            self._tasks.close()
        for waiting in self._waiting.values():
            waiting.clear()
        self._repeated.clear()

    def _line(self, decoder: Decoder) -> Decoder:
        """Where clips for an engine wait: all in one line when there is no hardware."""
        return decoder if self._hardware else "nvdec"

    def _may_pull(self, decoder: Decoder) -> bool:
        if self._exhausted or (self._full_at == self._rooms and not self._repeated):
            return False
        if decoder == "nvdec" or not self._hardware:
            return True
        return self._helping and not self._waiting["nvdec"] and self._pace is not None

    def _nothing_comes(self) -> bool:
        return self._exhausted and self._at_work == 0

    def _pull(self) -> Work | None:
        """The next clip; None when there is nothing to decode for a task, no room for one, or none left."""
        try:
            with self._pulling:  # tasks are handed out in order
                task = self._next_task()
            return self._prepare(task) if task is not None else None
        except TakenAway:  # whoever took it away has told
            raise
        except BaseException:
            self._less_at_work()
            raise

    def _next_task(self) -> Task | None:
        with self._lock:
            if self._repeated:
                return self._repeated.popleft()
            rooms = self._rooms
        try:
            task = next(self._tasks)
        except StopIteration:
            with self._lock:
                self._exhausted = not self._repeated  # one may have come back meanwhile
                self._wake_all()
            return None
        if task is None:
            with self._lock:
                self._full_at = rooms
        return task

    def _suits(self, clip: Work, decoder: Decoder) -> bool:
        if not self._hardware or clip.decoded or clip.decoder == decoder:
            return True
        return decoder == "cpu" and self._in_time(clip)

    def _in_time(self, clip: Work) -> bool:
        """Whether software is done before the hardware is through a share of the window; true for a kind not yet tried."""
        with self._lock:
            expected = self._seconds_a_unit.get(clip.kind, 0.0) * clip.cost
            return self._pace is not None and expected <= _SHARE * self._window * self._pace

    def _less_at_work(self) -> None:
        with self._lock:
            self._one_less()

    def _one_less(self) -> None:
        self._at_work -= 1
        if self._nothing_comes():
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in self._changed.values():
            condition.notify_all()


def _learnt(before: float | None, now: float) -> float:
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
