"""Threads and streams of one epoch: start, work, stop; errors cross threads with the clip's path."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from gpupipe.data import index as indices
from gpupipe.data.assembly import Arrival, Assembly
from gpupipe.data.crew import Crew, TakenAway, Worker
from gpupipe.data.decode import DecodeEngine, Decoder, Schedule, Unsupported
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.jitter import Closed, JitterBuffer
from gpupipe.data.job import Job
from gpupipe.data.limit import within_limit
from gpupipe.data.order import AUGMENT, clip_generator
from gpupipe.data.prepare import ReadAhead, prepare
from gpupipe.data.scan.store import make
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.data.transform import ClipInput
from gpupipe.data.transform.custom import Call, CallFailed
from gpupipe.data.visit import Skipped, Task, Visit, all_skipped, further_batches, visits_per_batch
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import DecodeError, GpupipeError, OpenError, SampleError
from gpupipe.types import Batch, ClipRecord, ClipRequest, Planes

_BAD = (OpenError, DecodeError, SampleError)
"""Errors that are a sample's own."""
_GRACE_SECONDS = 5.0
"""How much longer than a video may take until its thread counts as stuck: by then it would have noticed by itself."""
_PATIENCE_SECONDS = 2.0
"""How long a user's own transform may have run until the end of the pipeline no longer waits for it."""
_LATE = "leave the file out, or raise decode.limit_seconds"
_MOST_ATTEMPTS = 32
"""Samples tried for one slot before the run is given up: so many bad ones in a row mean a bad list."""

Ready = tuple[Batch, torch.cuda.Event | None]
"""A batch and the event that completes it; no event on the CPU."""
Work = Task | Visit | Call
"""What a thread may get stuck in."""


class _Skipped:
    """Stands for a batch of which every clip was skipped."""


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
        self._jitter: JitterBuffer[Ready | _Skipped] = JitterBuffer(
            job.config.jitter.depth,
            job.telemetry,
            on_room=lambda: self._schedule.room(),
            in_order=job.config.jitter.in_order,
        )
        self._stopping = False
        self._delivered = first_batch > 0  # an epoch that goes on has delivered before
        self._skipped: list[Skipped] = []
        self._owner = os.getpid()
        self._streams = _streams(job)
        requests = [request for requests in groups[first_batch:] for request in requests]
        paths = [job.file_of(job.entries[request.entry]) for request in requests]
        self._ahead = IndexAhead(paths, job.index_workers, first=job.config.batch.size)
        depth, visits = job.config.jitter.depth, visits_per_batch(job.config)
        further = further_batches(job.config, job.transform) if job.helping is not None else 0
        self._schedule: Schedule[Task, Visit] = Schedule(
            _tasks(job, groups, epoch, first_batch, lambda: self._jitter.reserve(further if self._schedule.far else 0)),
            self._prepare,
            hardware=len(job.engines) if job.helpers else 0,
            helping=job.helping,
            window=depth * visits,
            further=further * visits,
            reach=lambda: (self._jitter.taken + depth) * visits,
            behind=lambda: self._jitter.behind,
        )
        self._jitter.finish(len(groups) - first_batch)
        self._crew: Crew[DecodeEngine, Work] = Crew(
            [*job.engines, *job.helpers],
            self._work,
            self._successor,
            self._taken,
            self._fail,
            limit_seconds=job.config.decode.limit_seconds + _GRACE_SECONDS,
            name="gpupipe-clips",
            left=self._left,
        )
        self._read_ahead = ReadAhead(
            requests,
            job.config.clip,
            lambda request: job.entries[request.entry],
            job.file_of,
            job.files,
            lambda prepared: job.kept(prepared) is None,
            job.read_ahead,
            job.config.transform.crops,
        )
        _running.add(self)
        try:
            self._read_ahead.start()
            self._ahead.start()
            self._crew.start()
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
            GpupipeError: what a thread failed with; or, at the end, that every clip was skipped.
            Closed: when the pipeline was stopped.
        """
        ready = self._jitter.take()
        while isinstance(ready, _Skipped):
            ready = self._jitter.take()
        if ready is None and not self._delivered and self._skipped:
            raise all_skipped(self._skipped, self._job.bad_files)
        self._delivered = True
        return ready

    def stop(self) -> None:
        """Ends all threads and waits for them; safe to call again, and from any thread but its own."""
        if self._forked:
            return
        self.abandon()
        self._crew.join()
        for thread in self._ahead.threads:
            if thread.ident is not None:  # it was started
                thread.join()
        self._read_ahead.join()
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
        self._crew.end()
        self._ahead.abandon()
        self._read_ahead.abandon()
        self._schedule.close()
        self._jitter.close()

    def _give_up(self) -> bool:
        """Asked by long work: whether the pipeline is to end.

        Raises:
            DecodeError: when the work has taken longer than it may.
        """
        limit, work = self._job.config.decode.limit_seconds, self._crew.me.work
        if work is not None and not isinstance(work, Call) and self._crew.me.seconds > limit:
            path = self._job.entry_of(work.task if isinstance(work, Visit) else work).path
            self._job.stuck_in.add(path)  # the next visit would take as long
            raise DecodeError(f"{path}: a visit to it took longer than {limit:g} s", fix=_LATE, path=path)
        return self._stopping

    def _work(self, worker: Worker[DecodeEngine, Work]) -> None:
        """A thread's life; what it waits for meanwhile ends with the pipeline."""
        with stoppable(self._give_up):
            self._make_clips(worker)

    def _make_clips(self, worker: Worker[DecodeEngine, Work]) -> None:
        """Takes the next clips, makes them, and completes the batch if it was the last one; again and again."""
        engine, job = worker.engine, self._job
        # Without NVDEC all engines stand in one line, whatever it is called.
        kind: Decoder = "nvdec" if worker.line < len(job.engines) else "cpu"
        place = worker.line if kind == "nvdec" else worker.line - len(job.engines)
        try:
            if engine.stream is not None:  # a new thread's current GPU is the first one, whatever this loader's is
                torch.cuda.set_device(engine.device)
            while not self._stopping:
                if kind == "cpu" and not engine.ready:  # before it has a clip, which would have to wait for that
                    if not self._schedule.wait_until_wanted(place):
                        return
                    engine.get_ready(lambda: self._stopping)
                visit = self._schedule.take(kind, place)
                if visit is None:
                    return
                # Where it helps: not the task, since what becomes of that is the schedule's affair.
                worker.begin(visit if self._schedule.is_lent(visit, kind) else visit.task)
                self._serve(engine, kind, visit)
                del visit  # while this thread waits for the next one, the batch may be used and dropped
        except (Stopped, Closed, TakenAway):
            return
        except BaseException as error:  # crosses to the consumer, who raises it
            if not worker.given_up:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._jitter.fail(error.error if isinstance(error, CallFailed) else error)
        self._schedule.close()

    def _successor(self, worker: Worker[DecodeEngine, Work]) -> DecodeEngine:
        """The engine in the place of one whose thread is stuck in native code, for this epoch and the next ones."""
        job = self._job
        own = len(job.engines)
        engines, place = (job.engines, worker.line) if worker.line < own else (job.helpers, worker.line - own)
        engines[place] = worker.engine.twin()
        worker.engine.give_up()
        self._streams = _streams(job)
        job.telemetry.count("threads_given_up")
        return engines[place]

    def _taken(self, work: Work) -> None:
        """What becomes of the clips that a stuck thread was at."""
        if isinstance(work, Call):  # no fault of the video's, and the next one would hang too
            limit = self._job.config.decode.limit_seconds
            message = f"{work} has not come to an end within {limit:g} s"
            self._fail(GpupipeError(message, fix="does it wait for something? Mend it, or raise decode.limit_seconds"))
            return
        if isinstance(work, Visit):  # the hardware may do better
            self._schedule.give_back(work)
            return
        job, task = self._job, work
        path = job.entry_of(task).path
        limit = job.config.decode.limit_seconds
        job.stuck_in.add(path)
        error = DecodeError(f"{path}: a decoder was stuck in it for longer than {limit:g} s", fix=_LATE, path=path)
        self._schedule.again(self._after_failure(task, error))

    def _left(self, work: Work) -> None:
        """Told at the end of a thread that is left behind."""
        if isinstance(work, Call):
            self._job.telemetry.warn_once(f"left {work.name}", f"not waited for: {work}, which goes on in a thread of its own")

    def _watch(self, call: Call | None) -> None:
        """Told of the calls of the user's own transforms."""
        if call is None:
            self._crew.me.claim()
        elif self._stopping:
            raise Stopped
        else:
            self._crew.me.begin(call, _PATIENCE_SECONDS)

    @within_limit("a clip cannot be made")
    def _serve(self, engine: DecodeEngine, kind: Decoder, visit: Visit) -> None:
        """Makes a visit's clips; what fails is left to the other kind of engine, substituted, skipped or raised."""
        begin = time.perf_counter()
        decoder: Decoder = "cpu" if kind == "cpu" else visit.decoder
        try:
            try:
                helps = self._schedule.is_lent(visit, kind)
                planes = self._help(engine, visit) if helps else self._decode(engine, decoder, visit)
                if planes is None:
                    return
                arrivals = self._make(engine, decoder, visit, planes)
            except Unsupported:  # NVDEC gave up on it
                self._crew.me.claim()
                self._schedule.pass_on(replace(visit, choice=engine.choose(visit.index)))
                return
        except _BAD as error:
            self._crew.me.claim()
            task = self._after_failure(visit.task, error)
            following = self._usable(task)
            if following is not None:
                self._schedule.pass_on(following)
            else:
                self._schedule.done(visit, kind)
            return
        self._schedule.done(visit, kind, time.perf_counter() - begin)
        self._arrived(visit.task, arrivals)
        if self._job.clips is not None and not visit.decoded:
            self._job.clips.keep(visit.index, visit.plan, decoder, planes, engine.stream)

    @within_limit("a clip cannot be prepared")
    def _prepare(self, task: Task) -> Visit | None:
        """The clips of a task, or of a substitute where they cannot be had; None when its slots are skipped."""
        self._ahead.advance()
        try:
            return self._usable(task)
        except BaseException:
            if self._crew.me.given_up:
                raise TakenAway from None
            raise

    def _usable(self, task: Task | None) -> Visit | None:
        job, me = self._job, self._crew.me
        while task is not None:
            request, entry = task.request, job.entry_of(task)
            ahead = self._read_ahead.take(request)
            begun = partial(me.begin, task)
            begun()
            try:
                if entry.path in job.stuck_in:
                    raise DecodeError(f"{entry.path}: a visit to it took too long before", fix=_LATE, path=entry.path)
                with job.telemetry.span("index"):
                    self._ahead.wait_for(job.file_of(entry))
                    index = indices.load(job.file_of(entry), partial(make, stop=self._give_up, begun=begun))
                if index.info.damage is not None:
                    job.telemetry.warn_once(f"damage {entry.path}", f"{entry.path} is cut or damaged: {index.info.damage}")
                choice = job.engines[0].choose(index)
                if ahead is None or ahead.index is not index:  # or: the file has changed since
                    ahead = prepare(job.config.clip, request, entry, index, job.config.transform.crops)
                kept = job.clips.find(index, ahead.plan, choice.decoder) if job.clips is not None else None
                me.claim()
                return Visit(task, entry, index, ahead.picks, ahead.plan, choice, kept)
            except _BAD as error:
                me.claim()
                task = self._after_failure(task, error)
        return None

    def _after_failure(self, task: Task, error: GpupipeError) -> Task | None:
        """Counts and names a bad sample; the task with a substitute for it, or None when its slots are skipped, and done."""
        job, entry = self._job, self._job.entry_of(task)
        job.telemetry.count("bad_clips", len(task.slots))
        task.assembly.unusable(task.slots[0], entry.path)
        job.bad_files.setdefault(entry.path, str(error))
        job.telemetry.warn_once(f"bad {entry.path}", f"{entry.path} cannot be used: {error}")
        if job.config.on_bad_file == "raise":
            raise error
        if job.config.on_bad_file == "skip":
            self._skipped.append(Skipped(task.number, entry.path, len(task.slots)))
            self._arrived(task, None)
            return None
        if task.request.attempt + 1 >= _MOST_ATTEMPTS:
            raise DecodeError(
                f"{_MOST_ATTEMPTS} samples in a row could not be used; the last: {error.message}",
                fix="check the list of videos: see VideoLoader.bad_files",
                path=entry.path,
            ) from error
        job.telemetry.count("substituted")
        return replace(task, request=job.order.substitute(task.request))

    def _decode(self, engine: DecodeEngine, decoder: Decoder, visit: Visit, *, whole: bool = False) -> Planes:
        if visit.kept is not None:
            planes = engine.recall(visit.kept, visit.entry.path)
        else:
            planes = engine.run(decoder, visit.index, visit.plan, self._give_up, whole=whole)
        self._crew.me.claim()
        return planes

    def _help(self, engine: DecodeEngine, visit: Visit) -> Planes | None:
        """Decodes one of the hardware's clips in software; None where that failed or was late: it is the hardware's again.

        A damaged clip too: the two patch it up each in its own way, and who gets to it first must not show.
        """
        begin = time.perf_counter()
        try:
            planes = self._decode(engine, "cpu", visit, whole=True)
        except _BAD:
            self._crew.me.claim()
            self._job.telemetry.count("helps_failed")
            self._schedule.give_back(visit)
            return None
        if self._schedule.claim(visit, time.perf_counter() - begin):
            return planes
        self._job.telemetry.count("helps_late")
        return None

    def _make(self, engine: DecodeEngine, decoder: Decoder, visit: Visit, planes: Planes) -> list[Arrival]:
        job, info, task = self._job, visit.index.info, visit.task
        maker = visit.kept.decoder if visit.kept is not None else decoder
        records, clips = [], []
        first = 0
        with stage("transform", visit.entry.path), torch.cuda.stream(engine.stream), job.telemetry.span("transform"):
            for clip, (slot, pick) in enumerate(zip(task.slots, visit.picks, strict=True)):
                frames = visit.plan.frame_map[first : first + len(pick.decoded)]
                first += len(pick.decoded)
                source = job.custom.prepare(planes, info, frames, pick, task.request, clip, self._watch)
                params = job.transform.draw(
                    source.info, clip_generator(task.request, AUGMENT, clip), clip, displayed=info.display_size
                )
                out = task.assembly.slot(slot, engine.stream)
                records.append(ClipRecord(visit.entry.path, task.request, pick, params, maker, clip))
                clips.append(ClipInput(source.planes, source.info, params, source.frame_map, out, source.blend))
            job.transform.apply_batch(clips, self._give_up)
            for each, record in zip(clips, records, strict=True):
                job.custom.finish(each.out, info, record, job.transform, self._watch)
            done = engine.stream.record_event() if engine.stream is not None else None
        arrivals = [Arrival(record, visit.index.seconds_shown(record.pick), visit.entry.columns, done) for record in records]
        job.telemetry.count("clips", len(arrivals))
        job.telemetry.count("cache_hits" if visit.decoded else f"{decoder}_clips", len(arrivals))
        if job.clips is not None and not visit.decoded:
            job.telemetry.count("cache_misses", len(arrivals))
        job.telemetry.count("frames_used", sum(len(set(pick.decoded)) for pick in visit.picks))
        return arrivals

    def _arrived(self, task: Task, arrivals: list[Arrival] | None) -> None:
        for clip, slot in enumerate(task.slots):
            if task.assembly.arrive(slot, arrivals[clip] if arrivals is not None else None):
                with stage("assemble"):
                    finished = task.assembly.finish()
                self._jitter.put(task.batch, finished or _Skipped())


def _streams(job: Job) -> list[torch.cuda.Stream]:
    return [engine.stream for engine in [*job.engines, *job.helpers] if engine.stream is not None]


def _tasks(
    job: Job, groups: list[list[ClipRequest]], epoch: int, first_batch: int, reserve: Callable[[], int | None]
) -> Generator[Task | None]:
    """All visits of the epoch in order; None while ``reserve`` has no number, since there is no room for another batch."""
    clips, number = job.config.clip.clips_per_video, 0
    for position, requests in enumerate(groups[first_batch:], first_batch):
        while (batch := reserve()) is None:
            yield None
        with stage("allocate"):
            assembly = Assembly(
                len(requests) * clips,
                job.transform.clip_shape,
                job.transform.dtype,
                job.device,
                job.stream,
                job.kinds,
                memory_format=job.transform.memory_format,
                mix=job.config.transform.mix,
                epoch=epoch,
                index=position,
            )
        visits = deque(
            Task(number + place, batch, assembly, range(place * clips, (place + 1) * clips), request)
            for place, request in enumerate(requests)
        )
        number += len(requests)
        del assembly  # it may be long until the next one is asked for, and the batch dropped meanwhile
        while visits:
            yield visits.popleft()
