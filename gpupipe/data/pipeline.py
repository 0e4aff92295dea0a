"""Threads and streams of one epoch: start, work, stop; errors cross threads with the clip's path."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from gpupipe.config import LoaderConfig
from gpupipe.data import index as indices
from gpupipe.data.assembly import Arrival, Assembly
from gpupipe.data.decode import DecodeEngine
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.jitter import Closed, JitterBuffer
from gpupipe.data.order import AUGMENT, FRAMES, Order, clip_generator
from gpupipe.data.plan import make_plan
from gpupipe.data.sample import pick_frames
from gpupipe.data.scan.store import make
from gpupipe.data.source.columns import Kind, start_frame
from gpupipe.data.stop import Stopped
from gpupipe.data.transform import ClipTransform
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import DecodeError, OpenError, SampleError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Batch, ClipRecord, ClipRequest, Entry

_MOST_ATTEMPTS = 32
"""Samples tried for one slot before the run is given up: so many bad ones in a row mean a bad list."""

Ready = tuple[Batch, torch.cuda.Event | None]
"""A batch and the event that completes it; no event on the CPU."""


class _Skipped:
    """Stands for a batch of which every clip was skipped."""


@dataclass
class Job:
    """What a pipeline works on; shared by all epochs of a loader."""

    entries: Sequence[Entry]
    order: Order
    config: LoaderConfig
    transform: ClipTransform
    kinds: Mapping[str, Kind]
    device: torch.device
    stream: torch.cuda.Stream | None
    engines: list[DecodeEngine]
    index_workers: int
    telemetry: Telemetry
    bad_files: dict[str, str] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)
    """Where relative paths start, whatever the working directory becomes."""

    def file_of(self, entry: Entry) -> str:
        """The path by which a video is opened."""
        return os.path.join(self.folder, entry.path)


@dataclass(frozen=True, slots=True)
class _Task:
    number: int
    assembly: Assembly
    slot: int
    request: ClipRequest


_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """At interpreter exit: no thread may still be in FFmpeg or CUDA when these are taken down."""
    for pipeline in list(_running):
        pipeline.stop()


class Pipeline:
    """Makes the batches of one epoch, with one thread for each of the job's engines."""

    def __init__(self, job: Job, groups: list[list[ClipRequest]], epoch: int, first_batch: int = 0) -> None:
        self._job = job
        self._jitter: JitterBuffer[Ready | _Skipped] = JitterBuffer(job.config.jitter.depth, job.telemetry)
        self._stopping = False
        self._pulling = threading.Lock()
        self._owner = os.getpid()
        self._streams = [engine.stream for engine in job.engines if engine.stream is not None]
        paths = [job.file_of(job.entries[request.entry]) for requests in groups[first_batch:] for request in requests]
        self._ahead = IndexAhead(paths, job.index_workers)
        self._tasks = _tasks(job, groups, epoch, first_batch, self._jitter)
        self._threads = [
            threading.Thread(target=self._work, args=(engine,), name=f"gpupipe-clips-{number}", daemon=True)
            for number, engine in enumerate(job.engines)
        ]
        _running.add(self)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no room for one more, or Ctrl-C: those that run would use the engines beside the next epoch's
            self.stop()
            raise

    @property
    def occupancy(self) -> int:
        """Batches ready and not yet taken."""
        return self._jitter.occupancy

    def take(self) -> Ready | None:
        """The next batch and the event that completes it; None after the last.

        Raises:
            GpupipeError: what a thread failed with.
            Closed: when the pipeline was stopped.
        """
        ready = self._jitter.take()
        while isinstance(ready, _Skipped):
            ready = self._jitter.take()
        return ready

    def stop(self) -> None:
        """Ends all threads and waits for them; safe to call again, and from any thread but its own."""
        if self._forked:
            return
        self.abandon()
        for thread in self._threads + self._ahead.threads:
            if thread.ident is not None:  # it was started
                thread.join()
        self._settle()
        with self._pulling:
            self._tasks.close()  # lets go of the batch under construction

    @property
    def _forked(self) -> bool:
        """True in a child process: the threads stayed behind, and may have left locks taken."""
        return os.getpid() != self._owner

    def _settle(self) -> None:
        """Makes the pipeline's stream wait for the engines' streams.

        Kernels may still be writing into batches that were given up half made. Their memory went back to the allocator as the
        pipeline's stream's own, so the next epoch may get it at once: what it writes must come after these kernels.
        """
        if self._job.stream is not None:
            with suppress(RuntimeError):  # after a CUDA fault no memory is used again
                hand_over([], [stream.record_event() for stream in self._streams], self._job.stream)

    def abandon(self) -> None:
        """Tells all threads to end, without waiting for them.

        For finalizers: garbage collection may run one in any thread, one of this pipeline's own that holds a lock included, so
        that waiting there could last for ever.
        """
        if self._forked:
            return
        self._stopping = True
        self._ahead.abandon()
        self._jitter.close()

    def _asked_to_stop(self) -> bool:
        return self._stopping

    def _work(self, engine: DecodeEngine) -> None:
        """A thread's life: take the next clip, make it, and complete the batch if it was the last one."""
        try:
            if engine.stream is not None:  # a new thread's current GPU is the first one, whatever this loader's is
                torch.cuda.set_device(engine.device)
            while not self._stopping:
                with self._pulling:  # tasks are handed out in order, so that the oldest batch is finished first
                    task = next(self._tasks, None)
                if task is None:
                    return
                self._ahead.advance()
                self._serve(engine, task)
                del task  # while this thread waits for the next one, the batch may be used and dropped
        except (Stopped, Closed):
            return
        except BaseException as error:  # crosses to the consumer, who raises it
            self._jitter.fail(error)

    def _serve(self, engine: DecodeEngine, task: _Task) -> None:
        job = self._job
        arrival, request = None, task.request
        while arrival is None:
            entry = job.entries[request.entry]
            try:
                arrival = self._make(engine, task, request, entry)
            except (OpenError, DecodeError, SampleError) as error:
                job.telemetry.count("bad_clips")
                task.assembly.unusable(task.slot, entry.path)
                job.bad_files.setdefault(entry.path, str(error))
                job.telemetry.warn_once(f"bad {entry.path}", f"{entry.path} cannot be used: {error}")
                if job.config.on_bad_file == "raise":
                    raise
                if job.config.on_bad_file == "skip":
                    break
                if request.attempt + 1 >= _MOST_ATTEMPTS:
                    raise DecodeError(
                        f"{_MOST_ATTEMPTS} samples in a row could not be used; the last: {error.message}",
                        fix="check the list of videos: see VideoLoader.bad_files",
                        path=entry.path,
                    ) from error
                job.telemetry.count("substituted")
                request = job.order.substitute(request)
        if task.assembly.arrive(task.slot, arrival):
            with stage("assemble"):
                finished = task.assembly.finish()
            self._jitter.put(task.number, finished or _Skipped())

    def _make(self, engine: DecodeEngine, task: _Task, request: ClipRequest, entry: Entry) -> Arrival:
        job, config = self._job, self._job.config
        with job.telemetry.span("index"):
            self._ahead.wait_for(job.file_of(entry))
            index = indices.load(job.file_of(entry), partial(make, stop=self._asked_to_stop))
        if index.info.damage is not None:
            job.telemetry.warn_once(f"damage {entry.path}", f"{entry.path} is cut or damaged: {index.info.damage}")
        pick = pick_frames(config.clip, index, clip_generator(request, FRAMES), start_frame(entry))
        plan = make_plan(index, pick.indices)
        planes, decoder = engine.decode(index, plan, self._asked_to_stop)
        params = job.transform.draw(index.info, clip_generator(request, AUGMENT))
        with stage("transform", entry.path), torch.cuda.stream(engine.stream), job.telemetry.span("transform"):
            out = task.assembly.slot(task.slot, engine.stream)
            job.transform.apply(planes, index.info, params, plan.frame_map, out)
            done = engine.stream.record_event() if engine.stream is not None else None
        job.telemetry.count("clips")
        job.telemetry.count("frames_used", len(set(pick.indices)))
        record = ClipRecord(entry.path, request, pick, params, decoder)
        return Arrival(record, index.seconds_of(pick.indices), entry.columns, done)


def _tasks(
    job: Job, groups: list[list[ClipRequest]], epoch: int, first_batch: int, jitter: JitterBuffer[Ready | _Skipped]
) -> Generator[_Task]:
    """All clips of the epoch in order; blocks before a batch for which the jitter buffer has no room."""
    for position, requests in enumerate(groups[first_batch:], first_batch):
        number = jitter.reserve()
        with stage("allocate"):
            assembly = Assembly(
                len(requests),
                job.transform.clip_shape,
                job.transform.dtype,
                job.device,
                job.stream,
                job.kinds,
                epoch=epoch,
                index=position,
            )
        for slot, request in enumerate(requests):
            yield _Task(number, assembly, slot, request)
        del assembly  # the wait for room may be long, and the batch dropped meanwhile
    jitter.finish(len(groups) - first_batch)
