"""VideoLoader: the contract of an iterable DataLoader, and nothing else."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from gpupipe.config import (
    BatchConfig,
    CacheConfig,
    ClipConfig,
    DecodeConfig,
    LoaderConfig,
    MixConfig,
    PathLike,
    TransformConfig,
)
from gpupipe.config.stage import whole_number
from gpupipe.data.bytes import settings as remote
from gpupipe.data.cache import ClipCache
from gpupipe.data.decode import DecodeEngine, DecodeProcess, Fallbacks, Helping
from gpupipe.data.files import OpenFiles
from gpupipe.data.group import batch_count, group
from gpupipe.data.jitter import Closed
from gpupipe.data.job import Job
from gpupipe.data.limit import within_limit
from gpupipe.data.order import Order
from gpupipe.data.pipeline import Pipeline
from gpupipe.data.prepare import far_ahead
from gpupipe.data.ranks import local_ranks, place
from gpupipe.data.replay import replay
from gpupipe.data.source import Videos, class_names, collect, column_kinds, label_names, number_labels, start_frame
from gpupipe.data.source.columns import Kind
from gpupipe.data.transform import ClipTransform
from gpupipe.data.transform.custom import Custom, UserTransform
from gpupipe.device import heap
from gpupipe.device.inventory import cpu_quota, load, nvdec_caps, resolve_device
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import ClosedError, ConfigError, DeviceError, GraphError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Batch, ClipRecord, Entry

_COUNTS = (
    "clips", "batches", "frames_used", "packets_decoded", "bad_clips", "substituted", "damaged_frames", "cpu_clips",
    "nvdec_clips",
)  # fmt: skip
_CACHE_COUNTS = ("cache_hits", "cache_misses")
"""Counts that :meth:`VideoLoader.stats` has from the start, the latter with a clip cache."""

_NICE = 10
"""How much lower the priority of processes that decode beside NVDEC is: its threads and the user's loop win the cores."""


class VideoLoader:
    """Yields batches of clips, ready on the device, in an order and with augmentations that (seed, epoch) alone decide.

    Each ``iter()`` is a new epoch and ends the iterator before it. Leaving the loop by ``break`` or by an exception ends the
    iterator too. Batches are usable on the current CUDA stream at once and safe to keep or to drop at any time; for use on a
    further stream, that stream must wait as for any torch tensor.

    Args:
        videos: a file, folder, pattern (globs, ``{000..009}``), table (.csv, .jsonl with a column ``path``), WebDataset shard
            (.tar, uncompressed) or URL of these (``s3://``, ``https://`` …), a mapping with ``path`` and further columns, or a
            list of these. A list may have the bytes of videos too, or binary files that hold them. A column
            ``label`` (numbers, or names of classes, which are numbered) travels with each batch; a column ``start_frame`` fixes
            where the clip of that row starts.
        clip: which frames make a clip; a :class:`ClipConfig` or a dict of its fields.
        transform: from the crop to the layout; the name of a preset, a :class:`TransformConfig` or a dict of its fields.
        batch: clips in a batch, or a :class:`BatchConfig` or a dict of its fields.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        seed: fixes the order and every random choice.
        before, after: transforms of your own, callables on a :class:`gpupipe.types.Clip`, that stand before or after
            gpupipe's: see :class:`gpupipe.data.transform.custom.Custom`. Several threads call them at a time.
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
        config: LoaderConfig | dict[str, Any] | PathLike | None = None,
        **fields: Any,
    ) -> None:
        named: dict[str, Any] = {"clip": clip, "transform": transform, "batch": batch, "seed": seed}
        named["device"] = None if device is None else str(device)
        base = LoaderConfig.parse(config)
        settings = base.override({name: value for name, value in named.items() if value is not None} | fields)
        rank, world_size = place(settings)
        self.config = settings.model_copy(update={"rank": rank, "world_size": world_size})
        self.device = resolve_device(self.config.device)
        remote.use(**self.config.remote.model_dump(exclude_none=True))
        entries = collect(videos, self.config.source)
        names = label_names(entries, self.config.source)
        if names:
            entries = number_labels(entries, names)
        for entry in entries:
            start_frame(entry)  # a bad row is told now, not when its turn comes
        by_folder = self.config.source.label_from == "folder"
        self._classes = (self.config.source.classes or class_names(entries)) if by_folder else names
        clips = ClipTransform(self.config.transform, self.config.clip.frames)
        kinds = column_kinds(entries, self.config.columns)
        if self.config.transform.mix is not None:
            _check_labels(entries, kinds, self.config.transform.mix)
        order = Order(len(entries), self.config.seed, self.config.shuffle, rank, world_size)
        self._batches = batch_count(len(order), self.config)
        if self._batches == 0:
            raise ConfigError(
                f"{len(entries)} videos over {world_size} rank(s) make no full batch of {self.config.batch.size}",
                fix="use a smaller batch, more videos, or batch={'size': …, 'drop_last': False}"
                if len(order)
                else "give at least one video for each rank",
            )
        self._telemetry = Telemetry()
        engines, helpers = _engines(self.config, self.device, self._telemetry)
        files = OpenFiles(self.config.cache.open_files)
        for engine in [*engines, *helpers]:
            engine.files = files
        stream = _cuda_stream(self.device) if self.device.type == "cuda" else None
        self._job = Job(
            entries=entries,
            order=order,
            config=self.config,
            transform=clips,
            custom=_custom(before, after, self.config.transform),
            kinds=kinds,
            device=self.device,
            stream=stream,
            engines=engines,
            helpers=helpers,
            helping=Helping(len(helpers)) if helpers and self.config.decode.cpu_workers else None,
            index_workers=_index_workers(self.device),
            telemetry=self._telemetry,
            clips=_clip_cache(self.config.cache, self.device, self._telemetry),
            files=files,
            read_ahead=far_ahead(self.config.cache, entries),
        )
        if stream is not None:
            threading.Thread(target=_compile, args=(self._job.transform, self.device), name="gpupipe-compile").start()
        for name in _COUNTS + (_CACHE_COUNTS if self._job.clips is not None else ()):
            self._telemetry.count(name, 0)
        self._epoch = 0
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._pipeline: Pipeline | None = None
        self._owner = os.getpid()
        self._closed = False
        self._iterating = threading.RLock()  # a signal handler may close the loader amid iter()
        weakref.finalize(self, self._job.kill).atexit = False

    @property
    def dataset(self) -> list[str]:
        """The paths of all videos, in source order."""
        return [entry.path for entry in self._job.entries]

    @property
    def batch_size(self) -> int:
        return self.config.batch.size

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers, where labels are names or folders; else none."""
        return self._classes

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
        self._epoch = number

    def __len__(self) -> int:
        """Batches in an epoch of this rank; an upper bound where ``on_bad_file`` is ``skip``."""
        return self._batches

    @within_limit("a VideoLoader cannot be iterated")
    def __iter__(self) -> BatchIterator:
        if torch.utils.data.get_worker_info() is not None or os.getpid() != self._owner:
            raise _forked()
        _refuse_inside(self._job, "iter() of a VideoLoader")
        with self._iterating:
            if self._closed:
                raise ClosedError("this VideoLoader is closed", fix="make a new one")
            self._end_iterator("a newer iter() of the same VideoLoader has ended this iterator")
            epoch, self._epoch = self._epoch, self._epoch + 1
            groups = group(self._job.order.requests(epoch), self.config)
            self._pipeline = Pipeline(self._job, groups, epoch)
            iterator = BatchIterator(self._pipeline, self._job, self)
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

    def stats(self) -> dict[str, Any]:
        """Counts and durations since the loader was made.

        Among them: ``clips``, ``batches``, ``frames_used``, ``packets_decoded``, ``nvdec_clips``, ``cpu_clips``,
        ``helps_late`` and ``helps_failed`` (clips that NVDEC did after a helper had tried),
        ``damaged_frames`` (met by software and used all the same, see ``decode.damaged``),
        ``cache_hits`` (clips that were not decoded again), ``cache_misses`` and ``cache_bytes`` (held) with a clip cache,
        ``substituted``, ``wait_seconds`` (consumer, with ``wait_p50_seconds`` and ``wait_p99_seconds``), ``occupancy``.
        """
        iterator = self._iterator() if self._iterator is not None else None
        occupancy = iterator.occupancy if iterator is not None else 0
        return {**self._telemetry.snapshot(), "occupancy": occupancy}

    def close(self) -> None:
        """Ends the iterator and the threads, and leaves the decoders to the next loader (:func:`gpupipe.free_decoders`).

        May be called again.
        """
        if os.getpid() != self._owner:  # in a forked child threads and decoders are the parent's
            return
        _refuse_inside(self._job, "close() of a VideoLoader")
        with self._iterating:
            self._end_iterator("its VideoLoader was closed")
            if not self._closed:
                self._closed = True
                self._job.close()

    def _end_iterator(self, why: str) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.end(why)
        if self._pipeline is not None:  # an iterator that was dropped has not waited for its threads, which use the engines
            self._pipeline.stop()
        self._iterator = self._pipeline = None

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
        return f"VideoLoader({len(self._job.entries)} videos, {len(self)} batches of {self.batch_size}, on {self.device})"


class BatchIterator(Iterator[Batch]):
    """One epoch's iterator. Its end, by exhaustion, ``break``, an error or garbage collection, ends the pipeline's threads."""

    def __init__(self, pipeline: Pipeline, job: Job, loader: VideoLoader) -> None:
        self._pipeline = pipeline
        self._job = job
        self._loader: VideoLoader | None = loader  # which may have no other name: ``for batch in VideoLoader(…)``
        self._ended: str | None = None
        self._finished = False
        self._owner = os.getpid()
        weakref.finalize(self, pipeline.abandon)

    @property
    def occupancy(self) -> int:
        return self._pipeline.occupancy

    def __next__(self) -> Batch:
        if os.getpid() != self._owner:
            raise _forked()
        _refuse_inside(self._job, "next() of a VideoLoader's iterator")
        if self._finished:
            raise StopIteration
        if self._ended is not None:
            raise ClosedError(f"this iterator cannot go on: {self._ended}", fix="use the newer iterator, or iterate again")
        try:
            ready = self._pipeline.take()
            if ready is None:
                self._finish()
                raise StopIteration
            batch, complete = ready
            if complete is not None:
                with stage("hand-over"):
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
        _refuse_inside(self._job, "close() of a VideoLoader's iterator")
        self.end("it was closed")

    def end(self, why: str) -> None:
        """Ends the pipeline; a later ``next()`` says why."""
        if not self._finished and self._ended is None:
            self._ended = why
        self._pipeline.stop()
        self._loader = None


def _forked() -> ClosedError:
    return ClosedError(
        "a VideoLoader cannot be iterated in a forked or worker process: CUDA and threads do not survive a fork",
        fix="iterate it in the process that made it, not through torch's DataLoader: it has threads of its own",
    )


def _refuse_inside(job: Job, call: str) -> None:
    """Raises GraphError in a transform of this loader's user, whose own thread the call would wait for."""
    if job.custom.calling:
        raise GraphError(
            f"{call} was called while it makes a clip, in its own before= or after= transform",
            fix="iterate it from outside; a transform that needs other clips takes a VideoLoader or VideoReader of its own",
        )


def _custom(before: UserTransform | None, after: UserTransform | None, config: TransformConfig) -> Custom:
    for name, function in (("before", before), ("after", after)):
        if function is not None and not callable(function):
            several = isinstance(function, list | tuple)
            fix = "write one function that calls them one after the other" if several else "give a function of a Clip"
            raise ConfigError(f"{name}={function!r} cannot be called", fix=fix)
    return Custom(before, after, config.untagged_matrix, config.untagged_range)


def _check_labels(entries: Sequence[Entry], kinds: Mapping[str, Kind], mix: MixConfig) -> None:
    """Raises ConfigError unless every video has a label that ``mix`` knows."""
    if kinds.get("label") != "int":
        raise ConfigError("transform.mix needs a label for each video, a whole number", fix="see labels in the README's table")
    for entry in entries:
        if not 0 <= int(entry.columns["label"]) < mix.num_classes:
            raise ConfigError(
                f"{entry.path} has the label {entry.columns['label']}, transform.mix.num_classes is {mix.num_classes}",
                fix="labels go from 0 to num_classes - 1",
            )


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


def _index_workers(device: torch.device) -> int:
    """Processes that index ahead: half the cores beside NVDEC; none on the CPU, where decoding has use for every core."""
    return 0 if device.type == "cpu" else max(1, min(8, cpu_quota() // 2))


def _hardware_threads(decode: DecodeConfig, device: torch.device, telemetry: Telemetry) -> int:
    """Threads that keep this device's NVDEC engines busy, through PyNvVideoCodec or DALI; 0 where software decodes.

    Raises:
        DeviceError: when ``decode.decoder`` cannot be had here.
    """
    if device.type != "cuda":
        if decode.decoder in ("nvdec", "dali"):
            message = f"decoder={decode.decoder!r} needs a CUDA device, this loader is on the CPU"
            raise DeviceError(message, fix="use device='cuda'")
        return 0
    load("cupy")
    caps = nvdec_caps(device.index or 0, "h264", "4:2:0", 8)
    if decode.decoder == "dali":
        load("nvidia.dali")
    elif not caps.supported:
        if decode.decoder == "nvdec":
            raise DeviceError(f"decoder='nvdec' cannot be had: {caps.reason}", fix="see `gpupipe doctor`")
        telemetry.warn_once("no nvdec", f"videos are decoded on the CPU: {caps.reason}")
        return 0
    return 0 if decode.decoder == "cpu" else caps.engines + max(1, caps.engines // 2)


def _engines(config: LoaderConfig, device: torch.device, telemetry: Telemetry) -> tuple[list[DecodeEngine], list[DecodeEngine]]:
    """The engines, one a thread, and those that decode in software beside NVDEC.

    On the CPU one for each core. On CUDA half again as many as NVDEC has, so that while one thread waits for its last frames,
    or has none yet, another keeps the hardware busy. ``cpu_workers="auto"`` goes by this rank's share of the cores. Beside
    NVDEC it leaves half a core to each of these threads, and a quarter of all to the user: where a cgroup bounds the cores, one
    process too many holds up all threads.
    """
    decode = config.decode
    hardware = _hardware_threads(decode, device, telemetry)
    fallbacks = Fallbacks()

    def engines(count: int, *, processes: bool = False, nice: int = 0) -> list[DecodeEngine]:
        return [
            DecodeEngine(
                device,
                mode=decode.decoder,
                keep=decode.decoders_per_thread,
                fallbacks=fallbacks,
                telemetry=telemetry,
                process=DecodeProcess(nice) if processes else None,
                damaged=decode.damaged,
            )
            for _ in range(count)
        ]

    cores = cpu_quota()
    if decode.cpu_workers == "auto":
        workers = max(1, cores * 3 // (4 * local_ranks(device)))
    else:
        workers = decode.cpu_workers
    if not hardware:
        return engines(workers or decode.threads or cores, processes=workers > 0), []
    threads = decode.threads or hardware
    if decode.cpu_workers == "auto":
        workers = max(1, workers - (threads + 1) // 2)
    beside = 0 if decode.decoder in ("nvdec", "dali") else workers or max(1, min(4, cores // 4))
    return engines(threads), engines(beside, processes=True, nice=_NICE)
