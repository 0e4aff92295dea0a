"""One epoch as its consumer has it: batches handed over, what was received counted, every way out ending the threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from gpupipe.data.group import Position
from gpupipe.data.jitter import Closed
from gpupipe.data.job import Job
from gpupipe.data.pipeline import Pipeline
from gpupipe.device import heap
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import ClosedError, GraphError
from gpupipe.types import Batch

if TYPE_CHECKING:
    from gpupipe.data.loader import VideoLoader


class BatchIterator(Iterator[Batch]):
    """One epoch's iterator. Its end, by exhaustion, ``break``, an error or garbage collection, ends the pipeline's threads."""

    def __init__(self, pipeline: Pipeline, position: Position, job: Job, loader: VideoLoader) -> None:
        self._pipeline = pipeline
        self._position = position
        """What the trainer has received."""
        self._job = job
        self._loader: VideoLoader | None = loader  # which may have no other name: ``for batch in VideoLoader(…)``
        self._ended: str | None = None
        self._finished = False
        self._owner = os.getpid()
        weakref.finalize(self, pipeline.abandon)

    @property
    def occupancy(self) -> int:
        return self.levels["occupancy"]

    @property
    def queues(self) -> dict[str, int]:
        """What waits for a stage now, as :attr:`Pipeline.queues` has it."""
        return self._pipeline.queues

    @property
    def levels(self) -> dict[str, int]:
        return self._pipeline.levels

    def __next__(self) -> Batch:
        if os.getpid() != self._owner:
            raise forked()
        refuse_inside(self._job, "next() of a VideoLoader's iterator")
        if self._finished:
            raise StopIteration
        if self._ended is not None:
            raise ClosedError(f"this iterator cannot go on: {self._ended}", fix="use the newer iterator, or iterate again")
        try:
            while (ready := self._pipeline.take()) is None:
                self._pass_end()
            batch, complete = ready
            if complete is not None:
                with stage("hand-over"), self._job.telemetry.span("hand_over", self._pipeline.consumer.clock):
                    hand_over(batch.values(), [complete], torch.cuda.current_stream(self._job.device))
        except Closed:
            raise ClosedError(f"this iterator cannot go on: {self._ended or 'it was ended'}", fix="iterate again") from None
        except StopIteration:
            raise
        except BaseException as error:
            self.end(f"it failed with {type(error).__name__}: {error}")
            raise
        self._job.telemetry.count("batches")
        if self._job.device.type == "cpu":
            heap.tidy()
        for index in (*self._pipeline.skipped, batch.index):
            self._position = self._job.grouping.after(self._position, index)
        self._pipeline.skipped.clear()
        if self._loader is not None:
            batch.state = self._loader._receive(self._position)
        return batch

    def _pass_end(self) -> None:
        """Goes on with the next epoch, where the loader repeats.

        Raises:
            StopIteration: where it does not.
        """
        loader = self._loader
        if loader is not None:
            loader._receive(None)
        if loader is None or not self._job.config.repeat:
            self._finish()
            raise StopIteration
        self._pipeline.stop()
        self._pipeline, self._position = loader._go_on()
        weakref.finalize(self, self._pipeline.abandon)

    def _finish(self) -> None:
        self._finished = True
        self._pipeline.stop()
        self._loader = None
        if self._job.bad_files:
            count = len(self._job.bad_files)
            names = ", ".join(sorted(self._job.bad_files)[:10])
            message = f"{count} files could not be used so far: {names} (see VideoLoader.bad_files)"
            self._job.telemetry.warn_once(f"{count} bad files", message)

    def close(self) -> None:
        """Ends this epoch and its threads; may be called again."""
        refuse_inside(self._job, "close() of a VideoLoader's iterator")
        self.end("it was closed")

    def end(self, why: str) -> None:
        """Ends the pipeline; a later ``next()`` says why."""
        if not self._finished and self._ended is None:
            self._ended = why
        self._pipeline.stop()
        self._loader = None


def forked() -> ClosedError:
    return ClosedError(
        "a VideoLoader cannot be iterated in a forked or worker process: CUDA and threads do not survive a fork",
        fix="iterate it in the process that made it, not through torch's DataLoader: it has threads of its own",
    )


def refuse_inside(job: Job, call: str) -> None:
    """Raises GraphError in a transform of this loader's user, whose own thread the call would wait for."""
    if job.custom.calling:
        raise GraphError(
            f"{call} was called while it makes a clip, in its own before= or after= transform",
            fix="iterate it from outside; a transform that needs other clips takes a VideoLoader or VideoReader of its own",
        )
