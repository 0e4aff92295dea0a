"""Threads and streams of one epoch: start, work, stop; errors cross threads with the clip's path."""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from gpupipe.data import index as indices
from gpupipe.data.assembly import Arrival
from gpupipe.data.clips import make_clips
from gpupipe.data.crew import Crew, TakenAway, Worker
from gpupipe.data.decode import DecodeEngine, Decoder, Schedule, Unsupported
from gpupipe.data.group import Group
from gpupipe.data.index.ahead import IndexAhead
from gpupipe.data.jitter import Closed, JitterBuffer, Late
from gpupipe.data.job import Job
from gpupipe.data.limit import within_limit
from gpupipe.data.prepare import ReadAhead, prepare
from gpupipe.data.scan.store import make
from gpupipe.data.source.arrays import filled
from gpupipe.data.stages import IDLE, INDEX_WAIT, RUNNING, Consumer, count_bytes
from gpupipe.data.starving import starved
from gpupipe.data.stop import Stopped, stoppable
from gpupipe.data.tasks import batch_bytes, further_batches, most_bytes, tasks, visits_per_batch
from gpupipe.data.transform.custom import Call, CallFailed
from gpupipe.data.visit import Skipped, Task, Visit, all_failed, all_skipped
from gpupipe.device import numa
from gpupipe.device.doing import at, doing
from gpupipe.device.stream import Mark, hand_over, stage
from gpupipe.errors import DecodeError, GpupipeError, OpenError, SampleError
from gpupipe.telemetry import Clock
from gpupipe.types import Batch, Planes

_BAD = (OpenError, DecodeError, SampleError)
"""Errors that are a sample's own."""
_GRACE_SECONDS = 5.0
"""How much longer than a video may take until its thread counts as stuck: by then it would have noticed by itself."""
_PATIENCE_SECONDS = 2.0
"""How long a user's own transform may have run until the end of the pipeline no longer waits for it."""
_HUNG_SECONDS = 2.0
"""How long the end of a pipeline that starved its consumer waits for threads, which may hang."""
_LATE = "leave the file out, or raise decode.limit_seconds"
_MOST_ATTEMPTS = 32
"""Samples tried for one slot before the run is given up: so many bad ones in a row mean a bad list."""

Ready = tuple[Batch, Mark | None]
"""A batch and the mark that completes it; none on the CPU."""
Work = Task | Visit | Call
"""What a thread may get stuck in."""


@dataclass(frozen=True, slots=True)
class _Skipped:
    """Stands for a batch of which every clip was skipped."""

    index: int


Finished = tuple[Ready | _Skipped, float]
"""A batch, and when it was ready."""
_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """At interpreter exit: no thread may still be in FFmpeg or CUDA when these are taken down."""
    for pipeline in list(_running):
        pipeline.stop()


class Pipeline:
    """Makes the batches of one epoch, with one thread for each of the job's engines."""

    def __init__(self, job: Job, groups: Sequence[Group], epoch: int, *, resumed: bool = False) -> None:
        self._job = job
        self._starved = False
        self._stopping = False
        self.consumer = Consumer(job.telemetry)
        self._clocks: dict[int, Clock] = {-1: job.telemetry.clock(RUNNING)}
        """Those of the threads at work by their places in the crew, and the pipeline's own."""
        self._delivered = resumed  # an epoch that goes on has delivered before
        self.skipped: list[int] = []
        """Positions of the batches that :meth:`take` has passed over, since every clip was skipped."""
        self._skipped: list[Skipped] = []
        self._owner = os.getpid()
        self._streams = _streams(job)
        requests = [request for group in groups for request in group.requests]
        paths = [job.file_of(job.entries[request.entry]) for request in requests]
        self._ahead = IndexAhead(paths, job.index_workers, first=job.config.batch.size)
        visits = visits_per_batch(groups)
        size = batch_bytes(job, groups)
        further = further_batches(visits, size) if job.helping is not None else 0
        self._jitter: JitterBuffer[Finished] = JitterBuffer(
            job.depth,
            job.telemetry,
            on_room=lambda: self._schedule.room(),
            in_order=job.config.jitter.in_order,
            most_bytes=most_bytes(job.config.jitter, size),
        )

        def reserve(size_bytes: int) -> int | None:
            return self._jitter.reserve(further if self._schedule.far else None, size_bytes)

        ends = list(accumulate((len(group.requests) for group in groups), initial=0))
        self._schedule: Schedule[Task, Visit] = Schedule(
            tasks(job, groups, epoch, reserve),
            self._prepare,
            hardware=len(job.engines) if job.helpers else 0,
            helping=job.helping,
            window=job.depth.lowest * visits,
            further=further * visits,
            reach=lambda: ends[min(self._jitter.reach, len(groups))],
            behind=lambda: self._jitter.behind,
            waits=job.telemetry.at,
        )
        self._jitter.finish(len(groups))
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
            lambda request: job.makers.clip(request.shape),
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
    def levels(self) -> dict[str, int]:
        """Batches and bytes in the jitter buffer, as :meth:`JitterBuffer.levels` has them."""
        return self._jitter.levels()

    @property
    def queues(self) -> dict[str, int]:
        """What waits for a stage now: clips for ``decode``, begun batches for ``assemble``, ready ones in the ``buffer``."""
        ready = self._jitter.occupancy
        return {"decode": self._schedule.waiting, "assemble": max(0, self._jitter.in_flight - ready), "buffer": ready}

    def take(self) -> Ready | None:
        """The next batch and the mark that completes it; None after the last.

        Raises:
            GpupipeError: what a thread failed with; or, at the end, that every clip was skipped.
            StarvedError: when nothing came within ``timeout_seconds``. Threads may hang then: :meth:`stop` waits for none long.
            Closed: when the pipeline was stopped.
        """
        seconds = self._job.config.timeout_seconds
        self.consumer.asks()
        try:
            with self._job.telemetry.at("wait"):
                finished = self._jitter.take(seconds)
                while finished is not None and isinstance(finished[0], _Skipped):
                    self.skipped.append(finished[0].index)
                    finished = self._jitter.take(seconds)
        except Late:
            self._starved = True
            raise starved(seconds or 0.0, map(doing, self._crew.threads), time.monotonic()) from None
        ready, since = finished or (None, None)
        assert not isinstance(ready, _Skipped)
        self.consumer.gets(since)
        if ready is None and not self._delivered and self._skipped:
            raise all_skipped(self._skipped, self._job.left_out)
        self._delivered = True
        return ready

    def stop(self) -> None:
        """Ends all threads and waits for them; safe to call again, and from any thread but its own."""
        if self._forked:
            return
        self.abandon()
        until = time.monotonic() + (_HUNG_SECONDS if self._starved else math.inf)
        self._crew.join(until - time.monotonic())
        for thread in self._ahead.threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, until - time.monotonic()) if self._starved else None)
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
        self.consumer.end()
        for clock in list(self._clocks.values()):
            clock.end()
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
        clock = self._clocks[worker.line] = job.telemetry.clock("plan", own=True)
        try:
            if job.cores is not None:
                numa.bind(job.cores)
            if engine.stream is not None:  # a new thread's current GPU is the first one, whatever this loader's is
                torch.cuda.set_device(engine.device)
            while not self._stopping:
                if kind == "cpu" and not engine.ready:  # before it has a clip, which would have to wait for that
                    with job.telemetry.at(IDLE):
                        if not self._schedule.wait_until_wanted(place):
                            return
                        with at("process"):
                            engine.get_ready(lambda: self._stopping)
                visit = self._schedule.take(kind, place)
                if visit is None:
                    return
                # Where it helps: not the task, since what becomes of that is the schedule's affair.
                lent = self._schedule.is_lent(visit, kind)
                worker.begin(visit if lent else visit.task)
                if not lent:
                    self._jitter.begin(visit.task.batch)
                self._serve(engine, kind, visit)
                job.telemetry.about("")
                del visit  # while this thread waits for the next one, the batch may be used and dropped
        except (Stopped, Closed, TakenAway):
            return
        except BaseException as error:  # crosses to the consumer, who raises it
            if not worker.given_up:
                self._fail(error)
        finally:
            clock.end()

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
        self._clocks[worker.line].end()
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
        self._job.telemetry.turn_own("transform" if call is None else "custom")
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
        self._job.telemetry.about(f"batch {visit.task.assembly.index}")
        decoder: Decoder = "cpu" if kind == "cpu" else visit.decoder
        try:
            try:
                helps = self._schedule.is_lent(visit, kind)
                planes = self._help(engine, visit) if helps else self._decode(engine, decoder, visit)
                if planes is None:
                    return
                arrivals = make_clips(self._job, visit, planes, decoder, engine, self._give_up, self._watch)
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
            job.telemetry.about(f"batch {task.assembly.index}")
            ahead = self._read_ahead.take(request)
            begun = partial(me.begin, task)
            begun()
            try:
                if entry.path in job.stuck_in:
                    raise DecodeError(f"{entry.path}: a visit to it took too long before", fix=_LATE, path=entry.path)
                with job.telemetry.span("index"), at("index", entry.path):
                    with job.telemetry.at(INDEX_WAIT):
                        self._ahead.wait_for(job.file_of(entry))
                    index = indices.load(job.file_of(entry), partial(make, stop=self._give_up, begun=begun))
                if index.info.damage is not None:
                    job.telemetry.warn_once(f"damage {entry.path}", f"{entry.path} is cut or damaged: {index.info.damage}")
                choice = job.engines[0].choose(index)
                if ahead is None or ahead.index is not index:  # or: the file has changed since
                    ahead = prepare(job.makers.clip(request.shape), request, entry, index, job.config.transform.crops)
                kept = job.clips.find(index, ahead.plan, choice.decoder) if job.clips is not None else None
                entry = filled(entry, job.kinds, job.folder)
                me.claim()
                return Visit(task, entry, index, ahead.picks, ahead.plan, choice, kept)
            except _BAD as error:
                me.claim()
                task = self._after_failure(task, error, "plan" if isinstance(error, SampleError) else "index")
        return None

    def _after_failure(self, task: Task, error: GpupipeError, failed: str = "decode") -> Task | None:
        """Counts and names a bad sample; the task with a substitute for it, or None when its slots are skipped, and done."""
        job, entry = self._job, self._job.entry_of(task)
        job.telemetry.count("bad_clips", len(task.slots))
        job.telemetry.count(f"{failed}_failures")
        task.assembly.unusable(task.slots[0], entry.path)
        job.bad_files.setdefault(entry.path, str(error))
        job.telemetry.warn_once(f"bad {entry.path}", f"{entry.path} cannot be used: {error}")
        if job.config.on_bad_file == "raise":
            raise error
        if job.config.on_bad_file == "skip":
            self._skipped.append(Skipped(task.number, entry.path, len(task.slots), error.message, error.fix))
            self._arrived(task, None)
            return None
        if task.request.attempt + 1 >= _MOST_ATTEMPTS:
            raise all_failed(_MOST_ATTEMPTS, error, entry.path, job.left_out) from error
        job.telemetry.count("substituted")
        return replace(task, request=job.grouping.substitute(task.request))

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

    def _arrived(self, task: Task, arrivals: list[Arrival] | None) -> None:
        for clip, slot in enumerate(task.slots):
            if task.assembly.arrive(slot, arrivals[clip] if arrivals is not None else None):
                telemetry = self._job.telemetry
                with stage("assemble"), telemetry.span("assemble"):
                    ready = task.assembly.finish(self._tokens if self._job.tokenizers is not None else None)
                if ready is not None:
                    count_bytes(telemetry, ready[0], self._job.device)
                self._jitter.put(task.batch, (ready or _Skipped(task.assembly.index), telemetry.now()))

    def _tokens(self, text: Mapping[str, list[str]], taken: Iterable[str]) -> dict[str, torch.Tensor]:
        assert self._job.tokenizers is not None
        with self._job.telemetry.span("tokenize"):
            return self._job.tokenizers.tokens(text, taken, self._watch, self._check_wanted)

    def _check_wanted(self) -> None:
        if self._stopping:
            raise Stopped


def _streams(job: Job) -> list[torch.cuda.Stream]:
    return [engine.stream for engine in [*job.engines, *job.helpers] if engine.stream is not None]
