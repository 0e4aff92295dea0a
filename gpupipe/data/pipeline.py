"""Threads and streams of one epoch: start, work, stop; errors cross threads with the clip's path."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from gpupipe.config import LoaderConfig
from gpupipe.data import index as indices
from gpupipe.data.assembly import Arrival, Assembly
from gpupipe.data.decode import Choice, DecodeEngine, Decoder, Schedule, Unsupported
from gpupipe.data.index import VideoIndex
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.jitter import Closed, JitterBuffer
from gpupipe.data.order import AUGMENT, FRAMES, Order, clip_generator
from gpupipe.data.plan import Plan, make_plan
from gpupipe.data.sample import pick_frames
from gpupipe.data.scan.store import make
from gpupipe.data.source.columns import Kind, start_frame
from gpupipe.data.stop import Stopped
from gpupipe.data.transform import ClipTransform
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import DecodeError, GpupipeError, OpenError, SampleError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Batch, ClipRecord, ClipRequest, Entry, FramePick

_BAD = (OpenError, DecodeError, SampleError)
"""Errors that are a sample's own."""
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
    """One a thread: with NVDEC where the device has it."""
    helpers: list[DecodeEngine]
    """Further ones, a thread each, that decode in software what NVDEC cannot, or help it; none without NVDEC."""
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


@dataclass(frozen=True, slots=True)
class _Clip:
    """A task of which all is known but the pixels."""

    task: _Task
    request: ClipRequest
    entry: Entry
    index: VideoIndex
    pick: FramePick
    plan: Plan
    choice: Choice

    @property
    def decoder(self) -> Decoder:
        return self.choice.decoder

    @property
    def kind(self) -> str:
        return f"{self.index.info.codec} {self.index.info.pix_fmt}"

    @property
    def cost(self) -> float:
        """Pixels to decode."""
        return self.plan.packets * self.index.info.width * self.index.info.height


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
        self._owner = os.getpid()
        self._streams = [engine.stream for engine in [*job.engines, *job.helpers] if engine.stream is not None]
        paths = [job.file_of(job.entries[request.entry]) for requests in groups[first_batch:] for request in requests]
        self._ahead = IndexAhead(paths, job.index_workers)
        self._tasks = _tasks(job, groups, epoch, first_batch, self._jitter)
        self._schedule: Schedule[_Task, _Clip] = Schedule(
            self._tasks,
            self._prepare,
            hardware=len(job.engines) if job.helpers else 0,
            helping=job.config.decode.cpu_workers != 0,
            window=job.config.jitter.depth * job.config.batch.size,
        )
        # Without NVDEC all engines stand in one line, whatever they are called.
        pairs: list[tuple[DecodeEngine, Decoder]] = [(engine, "nvdec") for engine in job.engines]
        pairs += [(engine, "cpu") for engine in job.helpers]
        self._threads = [
            threading.Thread(target=self._work, args=pair, name=f"gpupipe-clips-{number}", daemon=True)
            for number, pair in enumerate(pairs)
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
        self._schedule.let_go()  # of the batch under construction

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
        self._schedule.close()
        self._jitter.close()

    def _asked_to_stop(self) -> bool:
        return self._stopping

    def _work(self, engine: DecodeEngine, kind: Decoder) -> None:
        """A thread's life: take the next clip, make it, and complete the batch if it was the last one."""
        try:
            if engine.stream is not None:  # a new thread's current GPU is the first one, whatever this loader's is
                torch.cuda.set_device(engine.device)
            while not self._stopping:
                clip = self._schedule.take(kind)
                if clip is None:
                    return
                self._serve(engine, kind, clip)
                del clip  # while this thread waits for the next one, the batch may be used and dropped
        except (Stopped, Closed):
            return
        except BaseException as error:  # crosses to the consumer, who raises it
            self._jitter.fail(error)
            self._schedule.close()

    def _serve(self, engine: DecodeEngine, kind: Decoder, clip: _Clip) -> None:
        """Makes a clip; what fails is left to the other kind of engine, substituted, skipped or raised."""
        begin = time.perf_counter()
        try:
            try:
                arrival = self._make(engine, "cpu" if kind == "cpu" else clip.decoder, clip)
            except Unsupported:  # NVDEC gave up on it
                self._schedule.pass_on(replace(clip, choice=engine.choose(clip.index)))
                return
        except _BAD as error:
            request = self._after_failure(clip.task, clip.request, clip.entry, error)
            following = self._usable(clip.task, request) if request is not None else None
            if following is not None:
                self._schedule.pass_on(following)
            else:
                self._schedule.done(clip, kind)
            return
        self._schedule.done(clip, kind, time.perf_counter() - begin)
        self._arrived(clip.task, arrival)

    def _prepare(self, task: _Task) -> _Clip | None:
        """The clip of a task, or a substitute where that cannot be had; None when the slot is skipped."""
        self._ahead.advance()
        return self._usable(task, task.request)

    def _usable(self, task: _Task, request: ClipRequest) -> _Clip | None:
        job = self._job
        while True:
            entry = job.entries[request.entry]
            try:
                with job.telemetry.span("index"):
                    self._ahead.wait_for(job.file_of(entry))
                    index = indices.load(job.file_of(entry), partial(make, stop=self._asked_to_stop))
                if index.info.damage is not None:
                    job.telemetry.warn_once(f"damage {entry.path}", f"{entry.path} is cut or damaged: {index.info.damage}")
                pick = pick_frames(job.config.clip, index, clip_generator(request, FRAMES), start_frame(entry))
                choice = job.engines[0].choose(index)
                return _Clip(task, request, entry, index, pick, make_plan(index, pick.indices), choice)
            except _BAD as error:
                substitute = self._after_failure(task, request, entry, error)
                if substitute is None:
                    return None
                request = substitute

    def _after_failure(self, task: _Task, request: ClipRequest, entry: Entry, error: GpupipeError) -> ClipRequest | None:
        """Counts and names a bad sample; the request that stands in for it, or None when its slot is skipped, which is done."""
        job = self._job
        job.telemetry.count("bad_clips")
        task.assembly.unusable(task.slot, entry.path)
        job.bad_files.setdefault(entry.path, str(error))
        job.telemetry.warn_once(f"bad {entry.path}", f"{entry.path} cannot be used: {error}")
        if job.config.on_bad_file == "raise":
            raise error
        if job.config.on_bad_file == "skip":
            self._arrived(task, None)
            return None
        if request.attempt + 1 >= _MOST_ATTEMPTS:
            raise DecodeError(
                f"{_MOST_ATTEMPTS} samples in a row could not be used; the last: {error.message}",
                fix="check the list of videos: see VideoLoader.bad_files",
                path=entry.path,
            ) from error
        job.telemetry.count("substituted")
        return job.order.substitute(request)

    def _make(self, engine: DecodeEngine, decoder: Decoder, clip: _Clip) -> Arrival:
        job, info, task = self._job, clip.index.info, clip.task
        planes = engine.run(decoder, clip.index, clip.plan, self._asked_to_stop)
        params = job.transform.draw(info, clip_generator(clip.request, AUGMENT))
        with stage("transform", clip.entry.path), torch.cuda.stream(engine.stream), job.telemetry.span("transform"):
            out = task.assembly.slot(task.slot, engine.stream)
            job.transform.apply(planes, info, params, clip.plan.frame_map, out)
            done = engine.stream.record_event() if engine.stream is not None else None
        job.telemetry.count("clips")
        job.telemetry.count("frames_used", len(set(clip.pick.indices)))
        record = ClipRecord(clip.entry.path, clip.request, clip.pick, params, decoder)
        return Arrival(record, clip.index.seconds_of(clip.pick.indices), clip.entry.columns, done)

    def _arrived(self, task: _Task, arrival: Arrival | None) -> None:
        if task.assembly.arrive(task.slot, arrival):
            with stage("assemble"):
                finished = task.assembly.finish()
            self._jitter.put(task.number, finished or _Skipped())


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
