"""Where a loader stands: the epoch at work and the next one, and what the trainer has received."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpupipe.data import state as states
from gpupipe.data.group import Group, Position
from gpupipe.data.jitter import Closed
from gpupipe.data.job import Job
from gpupipe.data.pipeline import Pipeline
from gpupipe.telemetry import log


class Run:
    """The epochs of a loader, one at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.next = Position()
        """Where the next epoch begins."""
        self._received = Position()
        self.pipeline: Pipeline | None = None
        self.closed = False
        self.lock = threading.RLock()
        """Held while an epoch begins or ends; a signal handler may close the loader amid that."""

    def set_epoch(self, epoch: int) -> None:
        """Makes the next epoch this one; the one that is to be taken up within stays so."""
        if epoch != self.next.epoch:
            if self.next.within:
                log.warning("set_epoch(%d) leaves the place within epoch %d where the run was to go on", epoch, self.next.epoch)
            self.next = Position(epoch)
        self._received = self.next

    def load(self, state: Mapping[str, Any]) -> None:
        """Makes the next epoch go on where a state says.

        Raises:
            ConfigError: when it is no state of such a run.
        """
        self.next = self._received = states.from_dict(self._job, state)

    def state(self) -> dict[str, Any]:
        """What the trainer has received, as :mod:`.state` has it."""
        return states.to_dict(self._job, self._received)

    def receive(self, position: Position | None) -> dict[str, Any]:
        """Notes what the trainer has received, None: all of its epoch; the state after that."""
        self._received = position or self.next
        return self.state()

    @property
    def steps(self) -> int:
        """Batches of this rank in the next epoch, whole."""
        return self._job.grouping.count(self.next.epoch)

    def groups(self) -> list[Group]:
        """This rank's batches of what is left of the next epoch."""
        return self._job.grouping.groups(self.next)

    def begin(self) -> tuple[Pipeline, Position]:
        """Starts the next epoch, or what is left of it, when no other is at work; and where it begins.

        Raises:
            Closed: when the loader is closed.
        """
        with self.lock:
            if self.closed:
                raise Closed
            start = self.next
            groups = self.groups()
            if not groups and not start.within:
                log.warning(
                    "epoch %d has no batch: no %d ranks' clips of one shape come together",
                    start.epoch,
                    self._job.order.world_size,
                )
            self.pipeline = Pipeline(self._job, groups, start.epoch, resumed=start.within)
            self.next, self._received = Position(start.epoch + 1), start
            return self.pipeline, start

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around epochs that are no part of the run: behind it, it stands where it stood."""
        with self.lock:
            kept = self.next, self._received
            try:
                yield
            finally:
                self.next, self._received = kept

    def stop(self) -> None:
        """Ends the epoch at work and waits for its threads, which use the engines of the next one."""
        with self.lock:
            if self.pipeline is not None:
                self.pipeline.stop()
            self.pipeline = None
