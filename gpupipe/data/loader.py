"""VideoLoader: the contract of an iterable DataLoader, and nothing else."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from gpupipe.config import (
    BatchConfig,
    CacheConfig,
    ClipConfig,
    FilterConfig,
    LoaderConfig,
    PathLike,
    TransformConfig,
)
from gpupipe.config.stage import whole_number
from gpupipe.data import headspace
from gpupipe.data import state as states
from gpupipe.data.bytes import settings as remote
from gpupipe.data.cache import ClipCache
from gpupipe.data.decode import Helping
from gpupipe.data.decode.fleet import cores_of, engines_of, index_workers
from gpupipe.data.files import OpenFiles
from gpupipe.data.group import Position, group
from gpupipe.data.group.base import parts_of
from gpupipe.data.iterator import BatchIterator, forked, refuse_inside
from gpupipe.data.jitter import NO_LEVELS
from gpupipe.data.job import Job
from gpupipe.data.limit import within_limit
from gpupipe.data.makers import Makers
from gpupipe.data.micro import CudaMemory, Sizes, StepGuard
from gpupipe.data.order import Order
from gpupipe.data.prepare import far_ahead
from gpupipe.data.ranks import local_ranks, place
from gpupipe.data.replay import replay
from gpupipe.data.run import Run
from gpupipe.data.shape import digest
from gpupipe.data.source import Videos
from gpupipe.data.source.listing import list_videos
from gpupipe.data.stages import stages, traffic
from gpupipe.data.tokens import Tokenizer, Tokenizers
from gpupipe.data.transform import ClipTransform
from gpupipe.data.transform.custom import Custom, UserTransform
from gpupipe.data.verdict import limit
from gpupipe.data.views import ClipDataset, EpochSampler, LoaderView
from gpupipe.device import nvtx
from gpupipe.device.inventory import cpu_quota, resolve_device
from gpupipe.errors import ClosedError, ConfigError, DeviceError
from gpupipe.telemetry import Telemetry
from gpupipe.types import ClipRecord

_COUNTS = (
    "clips", "clips_padded", "batches", "frames_used", "packets_decoded", "bad_clips", "substituted", "damaged_frames",
    "cpu_clips", "nvdec_clips",
)  # fmt: skip
_CACHE_COUNTS = ("cache_hits", "cache_misses")
"""Counts that :meth:`VideoLoader.stats` has from the start, the latter with a clip cache."""


class VideoLoader:
    """Yields batches of clips, ready on the device, in an order and with augmentations that (seed, epoch) alone decide.

    Each ``iter()`` is a new epoch and ends the iterator before it. Leaving the loop by ``break`` or by an exception ends the
    iterator too. Batches are usable on the current CUDA stream at once and safe to keep or to drop at any time; for use on a
    further stream, that stream must wait as for any torch tensor.

    Args:
        videos: a file, folder, pattern (globs, ``{000..009}``), table (.csv, .jsonl or .parquet with a column ``path``),
            WebDataset shard (.tar, uncompressed) or URL of these (``s3://``, ``https://`` …), a mapping with ``path`` and
            further columns, a dataset of torch or of Hugging Face that yields such, or a list of these. The bytes of a video,
            or a binary file that holds them, may stand in the place of a path. A column ``label`` (numbers, or names of
            classes, which are numbered) travels with each batch; a column ``start_frame`` fixes where the clip of that row
            starts.
        clip: which frames make a clip; a :class:`ClipConfig` or a dict of its fields.
        transform: from the crop to the layout; the name of a preset, a :class:`TransformConfig` or a dict of its fields.
        batch: clips in a batch, or a :class:`BatchConfig` or a dict of its fields.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        seed: fixes the order and every random choice.
        before, after: transforms of your own, callables on a :class:`gpupipe.types.Clip`, that stand before or after
            gpupipe's: see :class:`gpupipe.data.transform.custom.Custom`. Several threads call them at a time.
        tokenize: makes tensors of a column of text: a callable that takes a list of B texts and gives a mapping of tensors with
            B rows, as Hugging Face's tokenisers do; or several of them by column, whose tensors are then named by both,
            ``caption_input_ids``. Called before the batch is handed out, by one thread at a time.
        config: a whole :class:`LoaderConfig`, a dict of its fields, or a YAML file of them. The other arguments override it: a
            dict for a stage changes the fields that it names, a preset those that ``config`` left as its own preset or the
            defaults have them, a model takes the whole stage's place.
        fields: further fields of :class:`LoaderConfig`: ``decode``, ``jitter``, ``cache``, ``remote``, ``source``, ``shuffle``,
            ``columns``, ``on_bad_file``, ``rank`` and ``world_size`` (by default those of torch.distributed or of the
            environment).

    Raises:
        ConfigError: for an unknown or bad setting, or when the videos make not one batch.
        SourceError: when the videos cannot be found or listed, or a column is missing.
        DeviceError: when the device, or a package that it needs, is not there.
    """

    @within_limit("a VideoLoader cannot be made")
    def __init__(
        self,
        videos: Videos,
        *,
        clip: ClipConfig | dict[str, Any] | None = None,
        transform: TransformConfig | dict[str, Any] | str | None = None,
        batch: BatchConfig | dict[str, Any] | int | None = None,
        device: str | torch.device | None = None,
        seed: int | None = None,
        before: UserTransform | None = None,
        after: UserTransform | None = None,
        tokenize: Tokenizer | Mapping[str, Tokenizer] | None = None,
        config: LoaderConfig | dict[str, Any] | PathLike | None = None,
        **fields: Any,
    ) -> None:
        if callable(transform):
            raise ConfigError(
                f"transform={transform!r} is a function", fix="give it as before= or after= (see docs/transforms.md)"
            )
        named: dict[str, Any] = {"clip": clip, "transform": transform, "batch": batch, "seed": seed}
        named["device"] = None if device is None else str(device)
        base = LoaderConfig.parse(config)
        settings = base.override({name: value for name, value in named.items() if value is not None} | fields)
        rank, world_size = place(settings)
        self.config = settings.model_copy(update={"rank": rank, "world_size": world_size})
        self.device = resolve_device(self.config.device)
        remote.use(**self.config.remote.model_dump(exclude_none=True))
        looks = self.config.batch.buckets is not None or self.config.source.filter != FilterConfig()
        processes = max(1, cpu_quota() // local_ranks(self.device)) if looks else 1
        listing = list_videos(videos, self.config, processes)
        tokenizers = Tokenizers(tokenize, listing.kinds) if tokenize is not None else None
        entries = listing.entries
        self._classes, self._left_out = listing.classes, listing.left_out
        makers = Makers(self.config)
        order = Order(len(entries), self.config.seed, self.config.shuffle, rank, world_size, listing.mixture)
        grouping, shapes, bad = group(order, self.config, entries, makers.plain.dtype.itemsize, processes)
        self._telemetry = Telemetry(nvtx.marker(self.device))
        engines, helpers = engines_of(self.config, self.device, self._telemetry)
        files = OpenFiles(self.config.cache.open_files, self._telemetry)
        for engine in [*engines, *helpers]:
            engine.files = files
        stream = _cuda_stream(self.device) if self.device.type == "cuda" else None
        self._job = Job(
            entries=entries,
            order=order,
            grouping=grouping,
            shapes=digest(shapes) if shapes is not None else "",
            bad_files=bad,
            left_out=len(listing.left_out),
            config=self.config,
            makers=makers,
            custom=_custom(before, after, self.config.transform),
            kinds=listing.kinds,
            tokenizers=tokenizers,
            device=self.device,
            stream=stream,
            engines=engines,
            helpers=helpers,
            helping=Helping(len(helpers)) if helpers and self.config.decode.cpu_workers else None,
            index_workers=index_workers(self.device),
            telemetry=self._telemetry,
            cores=cores_of(self.config, self.device),
            clips=_clip_cache(self.config.cache, self.device, self._telemetry),
            files=files,
            read_ahead=far_ahead(self.config.cache, entries),
            sizes=_sizes(self.config, self.device),
            digest=states.digest([entry.path for entry in entries], listing.mixture),
            classes=states.digest_of_classes(listing.classes),
            labels=states.digest_of_labels(entries),
            made=states.made_by(self.config),
        )
        self._dataset = ClipDataset(entries, self.config, self.device, listing.kinds, self._job.folder, before, after, shapes)
        if stream is not None:
            threading.Thread(target=_compile, args=(makers.plain, self.device), name="gpupipe-compile").start()
        for name in _COUNTS + (_CACHE_COUNTS if self._job.clips is not None else ()):
            self._telemetry.count(name, 0)
        self._run = Run(self._job)
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._owner = os.getpid()
        weakref.finalize(self, self._job.kill).atexit = False

    @property
    def dataset(self) -> ClipDataset:
        """The videos as a map-style dataset: ``dataset.paths`` names them, ``dataset[k]`` makes one clip."""
        return self._dataset

    @property
    def sampler(self) -> EpochSampler:
        """Which videos come in this rank's next epoch; with ``set_epoch``."""
        return EpochSampler(self)

    @property
    def batch_size(self) -> int | None:
        """Clips in a batch; None where batches are planned from shapes or budgets, and differ."""
        return None if self.config.batch.planned else self.config.batch.size

    @property
    def drop_last(self) -> bool:
        return self.config.batch.last == "drop"

    # As torch's DataLoader has them, for code that asks: threads of this process make batches that are ready on the device.
    batch_sampler = collate_fn = generator = None
    num_workers = 0
    pin_memory = False

    def as_dataloader(self) -> LoaderView:
        """This loader as a ``torch.utils.data.DataLoader`` of the same batches, for tools that insist on one.

        The ``dataset`` of that is one of batches, and has as many items as the loader has batches: clips are counted by
        ``len(loader.dataset)``.
        """
        return LoaderView(self)

    def __getitem__(self, number: Any) -> Any:
        """What torch's DataLoader asks of a dataset, for which it has taken this.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "torch's DataLoader was put around a VideoLoader, which makes whole batches by itself",
            fix="iterate the VideoLoader; where a DataLoader is insisted on give loader.as_dataloader(), and for single clips "
            "loader.dataset",
        )

    __getitems__ = __getitem__  # of several at once

    def upcoming(self) -> list[int]:
        """The videos of this rank's next ``iter()`` in the order in which they come, as positions in ``dataset.paths``."""
        return [request.entry for one in self._run.groups() for request in one.requests]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers, where they have names; else none."""
        return self._classes

    @property
    def left_out(self) -> dict[str, str]:
        """Videos that ``source.filter`` left out, with the reason."""
        return dict(self._left_out)

    @property
    def bad_files(self) -> dict[str, str]:
        """Files that could not be used so far, with the reason."""
        return dict(self._job.bad_files)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next ``iter()`` epoch ``epoch``; without it epochs count up from 0."""
        number = None if isinstance(epoch, bool) else whole_number(epoch)
        if number is None:
            raise ConfigError(f"epoch={epoch!r} is not a whole number", fix="count epochs from 0")
        if number < 0:
            raise ConfigError(f"epoch={epoch} is negative", fix="count epochs from 0")
        self._run.set_epoch(number)
        self._dataset.set_epoch(number)

    @property
    def epoch(self) -> int:
        """The number of the next ``iter()``'s epoch: after :meth:`load_state_dict` that in which the state was saved."""
        return self._run.next.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: what the trainer has received so far, however many batches are under way; see
        :meth:`load_state_dict`.

        At any time, also amid an epoch; nothing is consumed. Plain data that JSON can write. Every rank may save its own, but
        one serves all ranks, under another number of them too; only where batches come as they are completed
        (``jitter.in_order`` off) each rank needs its own. ``batch.state`` has it for each batch.
        """
        return self._run.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next ``iter()`` go on behind what had been received when ``state`` was saved; an empty one does nothing.

        The batches are those that the uninterrupted run would have had, bit for bit, where the configuration is the same; where
        clips are made by other settings than there, or labels have changed, the log says so and the order goes on. Under
        another number of ranks or another batch size the samples come in the same global sequence, each with the same pixels.
        ``set_epoch`` with the state's own epoch changes nothing; with another one that epoch begins at its start.

        Raises:
            ConfigError: for a state of another version, list of videos, seed, order or classes, or what is no state.
        """
        if not isinstance(state, Mapping) or state:
            self._run.load(state)

    def step_guard(self, zero_grad: Callable[[], object]) -> StepGuard:
        """Stands around the work on one part of a step, where ``batch.micro_size`` cuts steps into parts::

            for batch in loader:
                with loader.step_guard(optimizer.zero_grad) as step:
                    (loss_of(model, batch) * batch.share).backward()
                if step.done:
                    optimizer.step()
                    optimizer.zero_grad()

        When memory runs out in the block, the error goes no further: ``zero_grad`` is called, and the whole step comes again
        from its first part, in smaller ones. With one clip at a time it does go further. Ranks tell each other, by a reduction
        of one number at the end of each block, so no gradients may be exchanged in it: with DistributedDataParallel put
        ``model.no_sync()`` inside and reduce the gradients where ``step.done`` holds.

        Args:
            zero_grad: forgets the gradients of the parts that are done.

        Raises:
            ClosedError: when no iterator of this loader is at work.
        """
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is None:
            raise ClosedError("step_guard() is for use inside of a loop over this loader", fix="iterate it first")
        return StepGuard(iterator, zero_grad)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the next epoch of this rank before ``batch.micro_size`` cuts them into parts: steps of the optimizer."""
        return self._run.steps

    def __len__(self) -> int:
        """Batches in the next epoch of this rank; an upper bound where ``on_bad_file`` is ``skip``. Epochs differ only where
        batches are planned from shapes (``batch.buckets``). Of a whole epoch: one that is taken up within gives fewer.

        Raises:
            TypeError: with ``repeat``, where there is no end, and with ``batch.micro_size="auto"``.
        """
        if self.config.repeat:
            raise TypeError("this VideoLoader has no length: repeat=True makes its iterator go on for ever")
        size, clips = self.config.batch.micro_size, self.config.clip.clips_per_video
        if size == "auto":
            raise TypeError("this VideoLoader has no length: memory decides how many parts a step has (see steps_per_epoch)")
        if size is None:
            return self.steps_per_epoch
        start, grouping = Position(self._run.next.epoch), self._job.grouping
        counts = ((grouping.visits(start, group.index) or [len(group.requests)]) for group in grouping.groups(start))
        return sum(parts_of(visits, clips, size) for visits in counts)

    @within_limit("a VideoLoader cannot be iterated")
    def __iter__(self) -> BatchIterator:
        if torch.utils.data.get_worker_info() is not None or os.getpid() != self._owner:
            raise forked()
        refuse_inside(self._job, "iter() of a VideoLoader")
        with self._run.lock:
            if self._run.closed:
                raise ClosedError("this VideoLoader is closed", fix="make a new one")
            self._end_iterator("a newer iter() of the same VideoLoader has ended this iterator")
            iterator = BatchIterator(self._run, self._job, self)
            self._iterator = weakref.ref(iterator)
        return iterator

    def replay(self, record: ClipRecord) -> torch.Tensor:
        """One clip made again, from its record in :attr:`Batch.clips <gpupipe.Batch>` alone; also amid an epoch.

        Bit for bit what was in the batch before :class:`mix <gpupipe.config.MixConfig>`, where this loader has the
        configuration, ``before`` and ``after`` of the one that made it. ``dataclasses.replace(record, params=…)`` makes the
        clip with other parameters.

        Returns:
            (3, T, H, W) or (T, 3, H, W), as in the batch: its dtype, on this loader's device.

        Raises:
            ConfigError: for what is no record, or one of clips of another length.
            SampleError: when the video has no such frames.
            OpenError, DecodeError, GraphError: when the clip cannot be made; the file is named.
        """
        return replay(self._job, record)

    def cached(self, batches: int, *, steps: int | None = None) -> headspace.CachedBatches:
        """The next batches, taken once and then handed out again and again: headspace, the pace of a loop whose data is free::

            with loader.cached(8, steps=500) as batches:
                for batch in batches:  # the same loop as over the loader
                    train(batch)

        They are taken before this returns, which ends the loader's iterator and its threads, so that nothing competes with the
        loop; iterating the loader starts them again. Where the run stands does not change: the next ``iter()`` begins where it
        would have. ``stats()`` counts these batches too. On the device they hold ``batches`` times the memory of one, until
        they are closed.

        Args:
            batches: how many; of parts of steps (``batch.micro_size``) some more, to end with a whole step.
            steps: how many batches, or parts of steps, an iteration hands out; None: it has no end.

        Raises:
            ConfigError: for numbers below 1.
            DeviceMemoryError: when they do not fit the memory that is free.
            GpupipeError: what iterating the loader raises.
        """
        if os.getpid() != self._owner:
            raise forked()
        refuse_inside(self._job, "cached() of a VideoLoader")
        number, length = headspace.whole(batches, "batches"), None if steps is None else headspace.whole(steps, "steps")
        why = "cached() of its VideoLoader has ended it"
        with self._run.aside():
            self._end_iterator(why)
            try:
                taken = headspace.take(self, number, self.device)
                return headspace.CachedBatches(taken, self.device, batch_size=self.batch_size, steps=length)
            finally:
                self._end_iterator(why)

    def stats(self) -> dict[str, Any]:
        """Counts and durations since the loader was made.

        Among them: ``clips``, ``clips_padded`` (those of videos too short for them, see ``clip.pad``), ``batches``,
        ``frames_used``, ``packets_decoded``, ``nvdec_clips``, ``cpu_clips``,
        ``helps_late`` and ``helps_failed`` (clips that NVDEC did after a helper had tried),
        ``damaged_frames`` (met by software and used all the same, see ``decode.damaged``),
        ``cache_hits`` (clips that were not decoded again), ``cache_misses`` and ``cache_bytes`` (held) with a clip cache,
        ``substituted``, ``wait_seconds`` (consumer, with ``wait_p50_seconds`` and ``wait_p99_seconds``), ``stalls`` and
        ``stall_seconds`` (waits for another than an epoch's first batch), and of the jitter buffer now: ``occupancy`` (batches
        ready), ``in_flight`` (these and those in preparation), ``jitter_bytes`` (theirs; at most so far ``jitter_peak_bytes``),
        ``jitter_depth`` and its marks ``jitter_low_water`` and ``jitter_high_water``;
        ``to_device_bytes`` and ``device_written_bytes`` (see :func:`gpupipe.data.stages.traffic`).

        ``stages`` has for each stage a :class:`gpupipe.data.stages.StageFigures`; ``limit`` says in words which one limits, by
        the rule of :mod:`gpupipe.data.verdict`.
        """
        iterator = self._iterator() if self._iterator is not None else None
        levels = iterator.levels if iterator is not None else NO_LEVELS
        queues = iterator.queues if iterator is not None else {}
        counts = {"stall_seconds": 0.0, **self._telemetry.snapshot()}
        found = stages(self._telemetry, counts, queues, custom=self._job.custom.is_there)
        more = {"stages": found, "limit": limit(found).text}
        return counts | levels | self._job.depth.levels | traffic(counts, self.device) | more

    def close(self) -> None:
        """Ends the iterator and the threads, and leaves the decoders to the next loader (:func:`gpupipe.free_decoders`).

        May be called again.
        """
        if os.getpid() != self._owner:  # in a forked child threads and decoders are the parent's
            return
        refuse_inside(self._job, "close() of a VideoLoader")
        with self._run.lock:
            self._end_iterator("its VideoLoader was closed")
            if not self._run.closed:
                self._run.closed = True
                self._job.close()

    def _end_iterator(self, why: str) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.end(why)
        self._run.stop()  # an iterator that was dropped has not waited for its threads
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a VideoLoader cannot be copied or pickled: it holds threads, decoders and files. Make another one, with the same "
            "videos and config=loader.config"
        )

    def __repr__(self) -> str:
        batches = "no end of" if self.config.repeat else str(self.steps_per_epoch)
        size = f" of {self.batch_size}" if self.batch_size is not None else ""
        size += f" in parts of {self.config.batch.micro_size}" if self.config.batch.micro_size is not None else ""
        return f"VideoLoader({len(self._job.entries)} videos, {batches} batches{size}, on {self.device})"


def _custom(before: UserTransform | None, after: UserTransform | None, config: TransformConfig) -> Custom:
    for name, function in (("before", before), ("after", after)):
        if function is not None and not callable(function):
            several = isinstance(function, list | tuple)
            fix = "write one function that calls them one after the other" if several else "give a function of a Clip"
            raise ConfigError(f"{name}={function!r} cannot be called", fix=fix)
    return Custom(before, after, config.untagged_matrix, config.untagged_range)


def _sizes(config: LoaderConfig, device: torch.device) -> Sizes | None:
    size = config.batch.micro_size
    return None if size is None else Sizes(size, CudaMemory(device) if device.type == "cuda" else None)


def _cuda_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _compile(transform: ClipTransform, device: torch.device) -> None:
    """Compiles while the caller goes on and the first clips are decoded; what fails here fails again, and is told, there."""
    with torch.cuda.device(device), suppress(DeviceError):
        transform.compile()


def _clip_cache(config: CacheConfig, device: torch.device, telemetry: Telemetry) -> ClipCache | None:
    if config.clips == "off":
        return None
    return ClipCache(device, config.clips, int(config.clips_gib * 2**30), telemetry)
