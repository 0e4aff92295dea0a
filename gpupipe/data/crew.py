"""The threads of a pipeline, under watch: one that is stuck in native code is given up, its work taken away, and replaced."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gpupipe.data.limit import within_limit

Engine = TypeVar("Engine")
Work = TypeVar("Work")

_LOOKS = 8
"""How often within the limit the watch looks around."""
_lost: list[object] = []
"""Engines that stuck threads still use: they may be freed by nobody."""


class TakenAway(Exception):
    """Raised in a thread that was given up: whatever it was at is another's now."""


class Worker(Generic[Engine, Work]):
    """A thread, its engine and what it is at."""

    def __init__(self, engine: Engine, line: int, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.line = line
        """Number of the worker's place in the crew; a replacement takes it over."""
        self._clock = clock
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._work: Work | None = None
        self._since = 0.0
        self._patience = math.inf
        self._given_up = False

    @property
    def work(self) -> Work | None:
        """What it is at; None when that is the thread's own to deliver, or nothing."""
        return self._work

    @property
    def seconds(self) -> float:
        """How long it has been at its work."""
        return self._clock() - self._since

    def begin(self, work: Work, patience_seconds: float = math.inf) -> None:
        """Says what the thread is at from now on, in which it may get stuck.

        Args:
            work: taken away when it lasts longer than the crew's limit.
            patience_seconds: how long it may have lasted, at most, until the end of the crew no longer waits for it.

        Raises:
            TakenAway: when the thread was given up.
        """
        with self._lock:
            self._check()
            self._work, self._since, self._patience = work, self._clock(), patience_seconds

    def claim(self) -> None:
        """Makes the outcome of the work the thread's own to deliver; from here on it is not taken away.

        Raises:
            TakenAway: when it was.
        """
        with self._lock:
            self._check()
            self._work = None

    def give_up_if_late(self, limit: float, *, ending: bool = False) -> Work | None:
        """Takes the work away from a thread that has been at it for too long."""
        with self._lock:
            work = self._work
            limit = min(limit, self._patience) if ending else limit
            if work is None or self.seconds < limit:
                return None
            self._given_up, self._work = True, None
            return work

    def give_up(self) -> Work | None:
        """Takes away whatever the thread has, for it is not waited for any longer."""
        with self._lock:
            work = self._work
            self._given_up, self._work = True, None
            return work

    def leave(self) -> None:
        """Lets go of the work, when the thread ends: the worker may live on in a cycle that only garbage collection finds."""
        with self._lock:
            self._work = None

    @property
    def given_up(self) -> bool:
        return self._given_up

    def _check(self) -> None:
        if self._given_up:
            raise TakenAway


class Crew(Generic[Engine, Work]):
    """Runs ``work`` in a thread for each engine.

    Args:
        engines: one for each thread.
        work: a thread's life.
        successor: gives the engine that takes the place of a stuck worker's.
        taken: told by the watch what was taken from a stuck worker.
        failed: told what the watch failed with.
        limit_seconds: how long one piece of work may take.
        name: of the threads.
        left: told at the end what a thread is at that is not waited for any longer.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        work: Callable[[Worker[Engine, Work]], None],
        successor: Callable[[Worker[Engine, Work]], Engine],
        taken: Callable[[Work], None],
        failed: Callable[[BaseException], None],
        *,
        limit_seconds: float,
        name: str,
        left: Callable[[Work], None] = lambda work: None,
    ) -> None:
        self._run = work
        self._successor = successor
        self._taken = taken
        self._failed = failed
        self._left = left
        self._limit = limit_seconds
        self._name = name
        self._own = threading.local()
        # On a lock that may be taken again: garbage collection may end the crew in the watch itself.
        self._changed = threading.Condition()
        self._ended = False
        self._looks = 0.0
        self._workers = [Worker[Engine, Work](engine, line, self._seconds) for line, engine in enumerate(engines)]
        self._watch = threading.Thread(target=self._look_around, name=f"{name}-watch", daemon=True)

    def start(self) -> None:
        """Starts all threads. After an error here, :meth:`join` ends those that were started."""
        for worker in self._workers:
            self._start(worker)
        self._watch.start()

    @property
    def me(self) -> Worker[Engine, Work]:
        """The worker of the calling thread."""
        worker: Worker[Engine, Work] = self._own.worker
        return worker

    def end(self) -> None:
        """Ends the watch, without waiting for it; the threads must end by themselves."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread | None]:
        """The thread in each place."""
        return [worker.thread for worker in self._workers]

    def join(self, patience_seconds: float = math.inf) -> None:
        """Waits for all threads but those that are stuck: only ``left`` hears of what they were at.

        Args:
            patience_seconds: how long to wait, at most. A thread that has not ended by then counts as stuck.
        """
        self.end()
        until = time.monotonic() + patience_seconds
        if self._watch.ident is not None:
            self._watch.join()
        for worker in list(self._workers):
            while worker.thread is not None and worker.thread.ident is not None and worker.thread.is_alive():
                if worker.given_up:  # by the join before
                    break
                begin = time.monotonic()
                work = worker.give_up() if begin >= until else worker.give_up_if_late(self._limit, ending=True)
                if worker.given_up:
                    self._forget(worker)
                    if work is not None:
                        self._left(work)
                    break
                worker.thread.join(min(self._interval, max(0.0, until - begin)))
                self._looks += min(1.0, (time.monotonic() - begin) / self._interval)

    @property
    def _interval(self) -> float:
        return min(1.0, self._limit / _LOOKS)

    def _seconds(self) -> float:
        """The time of this crew's clock, which stands still while the process is stopped."""
        return self._looks * self._interval

    @within_limit("a thread cannot be started")
    def _start(self, worker: Worker[Engine, Work]) -> None:
        worker.thread = threading.Thread(target=self._live, args=(worker,), name=f"{self._name}-{worker.line}", daemon=True)
        worker.thread.start()

    def _live(self, worker: Worker[Engine, Work]) -> None:
        self._own.worker = worker
        try:
            self._run(worker)
        finally:
            worker.leave()

    def _look_around(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, self._interval)
                if self._ended:
                    return
            self._looks += 1
            try:
                for worker in list(self._workers):
                    work = worker.give_up_if_late(self._limit)
                    if work is not None:
                        self._replace(worker, work)
            except BaseException as error:  # crosses to the consumer
                self._failed(error)

    def _replace(self, worker: Worker[Engine, Work], work: Work) -> None:
        other = Worker[Engine, Work](self._forget(worker), worker.line, self._seconds)
        self._workers[worker.line] = other
        self._taken(work)
        self._start(other)

    def _forget(self, worker: Worker[Engine, Work]) -> Engine:
        _lost.append(worker.engine)
        return self._successor(worker)
