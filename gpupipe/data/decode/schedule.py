"""Which engine decodes which clip: one sequence for all, and a second line for what NVDEC cannot decode.

The hardware takes the oldest clip that is not done, so that the oldest batch is finished first, within the ``depth`` of batches
that may be begun. What only software can decode waits for a software engine, oldest first, and holds up no hardware.

Software engines that may help prepare clips further ahead and take those that the hardware comes to last, if they will have
done them long before (:mod:`.helping` says when, and how many may help). How far ahead is no more than that needs. The hardware
skips what helpers have taken. Where it gets to a clip that a helper is still at, it takes that back: no batch ever waits for a
helper. Whoever comes second finds that the clip is not his any more.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Literal, Protocol, TypeVar

from gpupipe.data.crew import TakenAway
from gpupipe.data.decode.choice import Decoder
from gpupipe.data.decode.helping import Helping
from gpupipe.data.jitter import Closed

_LOOKS = 64
"""Clips at the far end of the line among which a helper chooses."""


class Clip(Protocol):
    """What is scheduled."""

    @property
    def number(self) -> int:
        """Its place in the sequence, from 0."""
        ...

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


class _Line(Generic[Work]):
    """Clips that wait, in the order of their numbers."""

    def __init__(self) -> None:
        self._clips: list[Work] = []
        self.cost = 0.0
        """Of all of them together."""

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, place: int) -> Work:
        return self._clips[place]

    def add(self, clip: Work) -> None:
        insort(self._clips, clip, key=lambda one: one.number)
        self.cost += _cost(clip)

    def take(self, number: int) -> Work:
        clip = self._clips.pop(bisect_left(self._clips, number, key=lambda one: one.number))
        self.cost = self.cost - _cost(clip) if self._clips else 0.0  # so that errors of rounding do not add up
        return clip

    def clear(self) -> None:
        self._clips.clear()
        self.cost = 0.0


class Schedule(Generic[Task, Work]):
    """Hands out the clips of one epoch; for use by all its threads.

    Args:
        tasks: what is to be done, in order; None while there is no room for more, of which :meth:`room` tells. They must not
            block: a clip that comes back may be what everybody waits for. While :attr:`far` is set, up to ``further`` more.
        prepare: makes a clip of a task, or None when there is nothing to decode.
        hardware: engines that decode with NVDEC, beside others that do not. Without any, every clip is for whoever comes.
        helping: what is known of software engines that also take clips that NVDEC could decode; None: they take none.
        window: tasks that the hardware may have begun and not delivered, at most.
        further: tasks beyond these that may be prepared for helpers, at most.
        reach: the number before which the hardware may take clips: it grows as batches are delivered.
        behind: whether the consumer waits for a batch. Called with the schedule's lock held: it must take no lock.
        waits: makes the context in which an engine waits, of why: ``room``: there is none for more tasks; ``idle``: nothing is
            left for it, or it is not wanted.
    """

    def __init__(
        self,
        tasks: Generator[Task | None],
        prepare: Callable[[Task], Work | None],
        *,
        hardware: int,
        helping: Helping | None = None,
        window: int,
        further: int = 0,
        reach: Callable[[], float] = lambda: math.inf,
        behind: Callable[[], bool] = lambda: True,
        waits: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._tasks = tasks
        self._prepare = prepare
        self._hardware = hardware
        self._helping = helping
        self._window = window
        self._further = further
        self._reach = reach
        self._behind = behind
        self._waits = waits
        self.far = False
        """Whether the task asked for is one that a helper may have beyond the hardware's reach."""
        self._repeated: deque[Task] = deque()
        self._pulling = threading.Lock()
        self._lock = threading.RLock()  # garbage collection may close the schedule in a thread that holds the lock
        self._changed: dict[Decoder, threading.Condition] = {
            "nvdec": threading.Condition(self._lock),
            "cpu": threading.Condition(self._lock),
        }
        """One for each kind of engine: a wake-up of threads that have nothing to do would cost the others, the user's among
        them. So what comes wakes one, which wakes the next one once it has found something (see :meth:`_wake_next`)."""
        self._resting = threading.Condition(self._lock)
        """For software engines that may not help now."""
        self._waiting: dict[Decoder, _Line[Work]] = {"nvdec": _Line(), "cpu": _Line()}
        self._lent: dict[int, Work] = {}
        """The hardware's clips that helpers are at, by number."""
        self._refused: set[int] = set()
        """Numbers of clips that a helper could not do."""
        self._at_work = 0
        """Clips that are being prepared or decoded: any of them may turn out to be for the other kind of engine."""
        self._pulled = 0
        self._exhausted = False
        self._rooms = 0
        self._full_at = {False: -1, True: -1}
        """What ``_rooms`` was when there was no room for the hardware, and for helpers."""
        self._closed = False
        if helping is not None:
            helping.begin(hardware)

    def take(self, decoder: Decoder, place: int = 0, *, wait: bool = True) -> Work | None:
        """The next clip for an engine, None when there will be none; it must be followed by :meth:`done` or :meth:`pass_on`.

        One of the hardware's clips that a software engine gets (see :meth:`is_lent`) is not its own until :meth:`claim`;
        :meth:`give_back` ends it too.

        Args:
            place: the engine's number among its kind: helpers with low ones are asked first.
            wait: False: None also when there is nothing now.

        Raises:
            Closed: when the schedule is closed.
        """
        decoder = decoder if self._hardware else "nvdec"  # all in one line when there is no hardware
        while True:
            with self._lock:
                found = self._wait_for(decoder, place) if wait else self._offer(decoder, place)
                if isinstance(found, int):
                    return self._handed(decoder, found)
                if found is None:
                    return None
                self._at_work += 1  # before the pull: others must not believe that nothing comes
            clip = self._pull(far=decoder == "cpu")
            if clip is None:
                self._less_at_work()
            elif decoder == "nvdec" and self._is_hardwares(clip):
                return clip
            else:
                self.pass_on(clip)

    @property
    def waiting(self) -> int:
        """Clips that are prepared and wait for an engine."""
        with self._lock:
            return sum(len(line) for line in self._waiting.values())

    def wait_until_wanted(self, place: int) -> bool:
        """For a software engine that is not ready yet: waits until it is of use; False when nothing comes any more.

        Raises:
            Closed: when the schedule is closed.
        """
        with self._lock:
            while True:
                if self._closed:
                    raise Closed
                if self._waiting["cpu"] or self._may_help(place):
                    return True
                if self._nothing_comes():
                    return False
                self._resting.wait()

    def is_lent(self, clip: Work, decoder: Decoder) -> bool:
        """Whether a clip that such an engine got from :meth:`take` is one of the hardware's, with which it helps."""
        return bool(self._hardware) and decoder == "cpu" and self._is_hardwares(clip)

    def claim(self, clip: Work, seconds: float) -> bool:
        """Makes a lent clip the helper's own, once it is decoded; False: the hardware has taken it back, nothing is to follow.

        Args:
            seconds: what the decode took.
        """
        with self._lock:
            if self._helping is not None:
                self._helping.learn(clip.kind, clip.cost, seconds)
                self._helping.ended(clip.kind)
            if self._lent.get(clip.number) is not clip:
                return False
            del self._lent[clip.number]
            if self._helping is not None:
                before = self._helping.count
                self._helping.helped(clip.cost)
                self._helpers_may_have_changed(before)
            return True

    def give_back(self, clip: Work) -> None:
        """Leaves a lent clip that a helper cannot do to the hardware, if that has not taken it back before."""
        with self._lock:
            if self._helping is not None:
                self._helping.ended(clip.kind)
            if self._lent.get(clip.number) is clip:
                del self._lent[clip.number]
                self._refused.add(clip.number)
                self.pass_on(clip)

    def pass_on(self, clip: Work) -> None:
        """Leaves a clip that was taken to the kind of engine that its ``decoder`` now names."""
        with self._lock:
            line: Decoder = "nvdec" if not self._hardware or self._is_hardwares(clip) else "cpu"
            self._waiting[line].add(clip)
            self._changed[line].notify()
            if line == "cpu":
                self._resting.notify()
            self._one_less()

    def done(self, clip: Work, decoder: Decoder, seconds: float | None = None) -> None:
        """Says that a clip is decoded by such an engine, and how long that took; None for one that was given up."""
        with self._lock:
            if self._helping is not None and seconds is not None:
                if decoder != "cpu":
                    before = self._helping.count
                    self._helping.hardware_did(_cost(clip))
                    self._helpers_may_have_changed(before)
                elif not clip.decoded and not self.is_lent(clip, decoder):
                    self._helping.learn(clip.kind, clip.cost, seconds)
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
            for kind in self._changed:
                self._wake_next(kind)

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
        self._lent.clear()
        self._repeated.clear()

    # Who gets what; all with the lock held

    def _wait_for(self, decoder: Decoder, place: int) -> int | Literal["pull"] | None:
        """What :meth:`_offer` has for an engine, waiting for it; None when nothing comes any more."""
        while (found := self._offer(decoder, place)) is None:
            if self._nothing_comes():
                return None
            if decoder == "cpu":
                with self._waits("idle"):
                    (self._changed["cpu"] if self._may_help(place) else self._resting).wait()
                continue
            held_up, since = not self._behind(), self._helping.clock() if self._helping is not None else 0.0
            with self._waits("idle" if self._exhausted else "room"):
                self._changed["nvdec"].wait()
            if held_up and self._helping is not None:
                self._helping.held_up(self._helping.clock() - since)
        return found

    def _offer(self, decoder: Decoder, place: int) -> int | Literal["pull"] | None:
        """The number of the clip that an engine is to have; or that it is to prepare another; None: nothing now.

        Raises:
            Closed: when the schedule is closed.
        """
        if self._closed:
            raise Closed
        if decoder == "nvdec":
            return self._for_hardware()
        if self._waiting["cpu"]:
            return self._waiting["cpu"][0].number
        return self._for_helper() if self._may_help(place) else None

    def _for_hardware(self) -> int | Literal["pull"] | None:
        if self._repeated:
            return "pull"
        line = self._waiting["nvdec"]
        oldest = min(line[0].number if line else math.inf, min(self._lent, default=math.inf))
        reach = self._reach()
        if oldest < reach:
            return int(oldest)
        # At its reach it asks all the same: that there is no room is counted there.
        return "pull" if self._pulled <= reach and self._has_room(far=False) else None

    def _for_helper(self) -> int | Literal["pull"] | None:
        assert self._helping is not None
        line, pace, reach = self._waiting["nvdec"], self._helping.clip_seconds, self._reach()
        if pace is None:
            return None
        if self._pulled < reach and self._has_room(far=True):
            return "pull"
        cost = line.cost
        for place in range(len(line) - 1, max(-1, len(line) - 1 - _LOOKS), -1):
            clip = line[place]
            cost -= _cost(clip)
            if not clip.decoded and clip.number not in self._refused and self._helping.in_time(clip.kind, clip.cost, cost):
                return clip.number
        return "pull" if self._worth_going_further(pace, reach) else None

    def _worth_going_further(self, pace: float, reach: float) -> bool:
        """Whether clips further ahead would be far enough, and may be prepared."""
        line = self._waiting["nvdec"]
        if self._helping is None or not line or self._pulled >= reach + self._further or not self._has_room(far=True):
            return False
        last = line[len(line) - 1]
        distance = self._helping.distance(last.kind, last.cost)
        if distance is None:  # it is on trial just now
            return False
        if distance > pace * (self._window + self._further):
            self._helping.forget(last.kind)
            return False
        return self._behind()

    def _may_help(self, place: int) -> bool:
        return self._helping is not None and bool(self._hardware) and place < self._helping.count

    def _handed(self, decoder: Decoder, number: int) -> Work:
        """Takes the clip of this number out of its line, or out of a helper's hands."""
        clip = self._lent.pop(number, None)
        if clip is None:  # else it counts as at work already
            self._at_work += 1
            if decoder == "cpu" and not self._waiting["cpu"]:
                clip = self._lent[number] = self._waiting["nvdec"].take(number)
                if self._helping is not None:
                    self._helping.took(clip.kind)
            else:
                clip = self._waiting[decoder].take(number)
        self._wake_next(decoder)
        return clip

    def _is_hardwares(self, clip: Work) -> bool:
        return not self._hardware or clip.decoded or clip.decoder != "cpu"

    def _has_room(self, *, far: bool) -> bool:
        return not self._exhausted and self._full_at[far] != self._rooms

    def _nothing_comes(self) -> bool:
        return self._exhausted and self._at_work == 0 and not any(self._waiting.values())

    def _helpers_may_have_changed(self, before: int) -> None:
        """Wakes those whom it concerns, after :attr:`_helping` was told of a clip."""
        if self._helping is not None and self._helping.count != before:
            self._changed["cpu"].notify_all()
            self._resting.notify_all()
        else:
            self._changed["cpu"].notify()

    def _less_at_work(self) -> None:
        with self._lock:
            self._one_less()

    def _wake_next(self, decoder: Decoder) -> None:
        """Wakes one engine of a kind, where one waits and there may be something for it too."""
        if decoder != "nvdec" or self._for_hardware() is not None:
            self._changed[decoder].notify()

    def _one_less(self) -> None:
        self._at_work -= 1
        if self._nothing_comes():
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in (*self._changed.values(), self._resting):
            condition.notify_all()

    # Tasks become clips; without the lock

    def _pull(self, *, far: bool) -> Work | None:
        """The next clip; None when there is nothing to decode for a task, no room for one, or none left."""
        try:
            with self._pulling:  # tasks are handed out in order
                task = self._next_task(far)
            return self._prepare(task) if task is not None else None
        except TakenAway:  # whoever took it away has told
            raise
        except BaseException:
            self._less_at_work()
            raise

    def _next_task(self, far: bool) -> Task | None:
        with self._lock:
            if self._repeated:
                return self._repeated.popleft()
            rooms = self._rooms
        self.far = far
        try:
            task = next(self._tasks)
        except StopIteration:
            with self._lock:
                self._exhausted = not self._repeated  # one may have come back meanwhile
                self._wake_all()
            return None
        with self._lock:
            if task is None:
                self._full_at[far] = rooms
            else:
                self._pulled += 1
                self._wake_next("cpu" if far else "nvdec")
        return task


def _cost(clip: Clip) -> float:
    """Units of cost that an engine has to do for a clip."""
    return 0.0 if clip.decoded else clip.cost
