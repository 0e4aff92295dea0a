"""One epoch as its consumer has it: batches handed over, what was received counted, every way out ending the threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import torch

from gpupipe.data.group.base import parts_of
from gpupipe.data.jitter import Closed
from gpupipe.data.job import Job
from gpupipe.data.micro import Parts, agree
from gpupipe.data.run import Run
from gpupipe.device import heap
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import ClosedError, GraphError
from gpupipe.types import Batch


class BatchIterator(Iterator[Batch]):
    """One epoch's iterator. Its end, by exhaustion, ``break``, an error or garbage collection, ends the pipeline's threads."""

    def __init__(self, run: Run, job: Job, loader: object) -> None:
        self._run = run
        self._job = job
        self._loader: object | None = loader  # which may have no other name: ``for batch in VideoLoader(…)``
        self._pipeline, self._position = run.begin()
        """What the trainer has received."""
        self._before = self._position
        """And before its last batch."""
        self._parts: Parts | None = None
        """The step that is handed out in parts."""
        self._ended: str | None = None
        self._finished = False
        self._owner = os.getpid()
        self._leaving = weakref.finalize(self, self._pipeline.abandon)

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
        if self._job.sizes is None:
            return self._received(self._take())
        if self._parts is None or self._parts.next == self._parts.count:
            self._parts = None  # before the wait for the next one: it may be large
            self._parts = self._cut(self._take())
        self._job.sizes.free_after_failure()  # only now has the error let go of what it held
        part = self._parts.take()
        if self._parts.next == self._parts.count:
            part.state = self._received(self._parts.batch).state
        else:
            part.state = self._run.state()  # a step that is begun is done again
        return part

    def _take(self) -> Batch:
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
        return batch

    def _received(self, batch: Batch) -> Batch:
        """Counts a batch that the trainer now has, whole."""
        self._before = self._position
        for index in (*self._pipeline.skipped, batch.index):
            self._position = self._job.grouping.after(self._position, index)
        self._pipeline.skipped.clear()
        batch.state = self._run.receive(self._position)
        return batch

    # Steps in parts, for StepGuard

    def _cut(self, batch: Batch) -> Parts:
        sizes, job = self._job.sizes, self._job
        assert sizes is not None
        clips, size = len(batch.clips), job.config.batch.micro_size
        count = sizes.parts(clips)
        visits = job.grouping.visits(self._position, batch.index)
        if visits and isinstance(size, int):
            count = min(parts_of(visits, job.config.clip.clips_per_video, size), clips)
        if job.config.batch.micro_size == "auto":  # with as many parts for all ranks as the one needs that needs most
            count, fewest = agree((count, -clips), job.device, job.order.world_size)
            count = min(count, -fewest)
        return Parts(batch, count)

    def any_rank(self, mine: bool) -> bool:
        job = self._job
        if job.config.batch.micro_size != "auto":
            return mine
        return bool(agree((int(mine),), job.device, job.order.world_size)[0])

    def succeed(self) -> bool:
        sizes, parts = self._job.sizes, self._parts
        if sizes is None or parts is None:
            return True
        sizes.measured(parts.largest)
        done = parts.next == parts.count
        if done:
            sizes.succeeded()
        return done

    def retry(self) -> int | None:
        sizes, parts = self._job.sizes, self._parts
        if sizes is None or parts is None or self._job.config.batch.micro_size != "auto":
            return None
        sizes.failed(parts.largest)
        finer = self._cut(parts.batch)
        if finer.count <= parts.count:  # on all ranks alike
            return None
        if parts.next == parts.count:  # it was counted as received
            self._position = self._before
            self._run.receive(self._position)
        self._parts = finer
        return finer.count

    def _pass_end(self) -> None:
        """Goes on with the next epoch, where the loader repeats.

        Raises:
            StopIteration: where it does not.
        """
        self._run.receive(None)
        if not self._job.config.repeat:
            self._finish()
            raise StopIteration
        self._pipeline.stop()
        self._leaving.detach()  # it would keep the epoch that has ended
        self._pipeline, self._position = self._run.begin()
        self._leaving = weakref.finalize(self, self._pipeline.abandon)

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
