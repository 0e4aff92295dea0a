"""One typed model for each stage; from Python or YAML, with unknown keys named and corrected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpupipe.config.augment import (
    AffineConfig,
    AutoAugmentConfig,
    BlurConfig,
    ColorJitterConfig,
    ErasingConfig,
    MixConfig,
)
from gpupipe.config.batch import BatchConfig, BucketsConfig
from gpupipe.config.presets import PRESETS
from gpupipe.config.ranges import Share, SpeedRange, ascending
from gpupipe.config.source import FilterConfig, SourceConfig
from gpupipe.config.stage import UNBUILT, Misfit, PathLike, StageConfig, fits, whole_number
from gpupipe.config.training import (
    OF_THE_STEP,
    GraphConfig,
    LeakConfig,
    MemoryConfig,
    PrecisionConfig,
    TrainingConfig,
    WatchConfig,
)
from gpupipe.config.transform import IMAGENET_MEAN, IMAGENET_STD, TransformConfig
from gpupipe.errors import ConfigError

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "PRESETS",
    "AffineConfig",
    "AutoAugmentConfig",
    "BatchConfig",
    "BlurConfig",
    "BucketsConfig",
    "CacheConfig",
    "ClipConfig",
    "ColorJitterConfig",
    "DecodeConfig",
    "ErasingConfig",
    "FilterConfig",
    "GraphConfig",
    "JitterConfig",
    "LeakConfig",
    "LoaderConfig",
    "MemoryConfig",
    "MixConfig",
    "PathLike",
    "PrecisionConfig",
    "RemoteConfig",
    "SourceConfig",
    "StageConfig",
    "TrainingConfig",
    "TransformConfig",
    "WatchConfig",
]


class ClipConfig(StageConfig):
    """Which frames make a clip. All positions are in display order; times are in seconds of the video's clock."""

    example: ClassVar[str] = '{"frames": 16, "stride": 4}'

    frames: Annotated[int, Field(ge=1, le=4096)] = 16
    """Frames in a clip (T)."""
    stride: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Distance between neighbouring frames of a clip, in frames. Not together with ``fps``."""
    fps: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Frames per second of the clip: frame k is the last one shown at or before start + k / fps."""
    sampling: Literal["random", "regular", "uniform", "stratified", "keyframe"] = "random"
    """``random``: a random start. ``regular``: the clips of a video start at regular distances, the first with its first frame
    and the last so that it just fits; one alone lies in the middle. ``keyframe``: a random start among the keyframes.
    ``uniform``: the middle frames of T equal segments of the video. ``stratified``: one random frame out of each of T equal
    segments (Wang et al., Temporal Segment Networks, ECCV 2016)."""
    clips_per_video: Annotated[int, Field(ge=1, le=256)] = 1
    """Clips of each visit to a video, side by side in the batch and decoded in one pass; ``batch.size`` counts each of them.
    With a ``start_frame`` in the row all of them show the same frames, in crops of their own."""
    speed: SpeedRange = (1.0, 1.0)
    """TimeWarp: how many times as fast the clip runs, drawn uniformly from (low, high); one number fixes it. The distance
    between frames, by ``stride`` or ``fps``, is multiplied by it."""
    blend: bool = False
    """What is shown at a time between two frames, as ``speed`` and ``fps`` make them: True: both, blended linearly by time;
    False: one of them, the nearest for ``stride``, the one on show for ``fps``."""
    reverse: Share = 0.0
    """ReverseTime: the probability that the clip runs backwards."""
    pad: Literal["repeat-last", "loop", "error"] = "repeat-last"
    """What stands in for frames past the end of a short video; ``mask`` is False there, and ``stats()`` counts such clips as
    ``clips_padded``. Where it is not named, the log tells of the first one, unless ``sampling`` spans the whole video or
    ``batch`` asks for several lengths (``buckets.frames``) or for ``layout="pad"``."""

    @property
    def spans_video(self) -> bool:
        """Whether a clip's frames are spread over the whole video."""
        return self.sampling in ("uniform", "stratified")

    @model_validator(mode="after")
    def _steps_agree(self) -> Self:
        if self.fps is not None and self.stride != 1:
            raise Misfit("give stride or fps, not both", fix="leave one of them out")
        if self.spans_video and (self.fps is not None or self.stride != 1):
            raise Misfit(
                f"sampling={self.sampling!r} spans the whole video, so stride and fps do not apply",
                fix="leave them out, or use sampling='random' or 'regular'",
            )
        ascending("speed", self.speed)
        if self.spans_video and self.speed != (1.0, 1.0):
            raise Misfit(
                f"sampling={self.sampling!r} spans the whole video, so speed does not apply",
                fix="leave it out, or use sampling='random'",
            )
        return self


class DecodeConfig(StageConfig):
    """Where and by how many threads videos are decoded."""

    example: ClassVar[str] = '{"decoder": "cpu"}'

    decoder: Literal["auto", "nvdec", "dali", "cpu"] = "auto"
    """``auto``: NVDEC for what the engine has on a CUDA device, else the CPU; ``nvdec``: an error where NVDEC cannot serve;
    ``dali``: NVIDIA DALI, an error where it cannot serve; for comparison, not for speed."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Decode threads; None: half again as many as NVDEC has engines, on the CPU one for each core
    that this process may use."""
    limit_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long one visit to a video may take. After that it is a bad file, even when a thread is stuck in native code: that
    thread is given up and replaced. A call of a transform of your own may take as long too; then the loop gets an error."""
    cpu_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = 0
    """Processes that decode in software. Beside NVDEC: 0 starts a few when videos come that NVDEC cannot decode; more also help
    it, at low priority, as many of them as measurably add; ``auto``: up to three of four cores, less half a core for each NVDEC
    thread. Helpers work on batches further ahead than ``jitter.depth``. On the CPU: 0 decodes in threads instead, and ``auto``
    means three of four cores. ``auto`` divides the cores by the ranks on this machine: ``LOCAL_WORLD_SIZE``, as torchrun sets
    it, else those of torch.distributed, at most one for each visible GPU. Give a number where each rank is bound to cores of
    its own, or where a launcher tells neither."""
    damaged: Literal["keep", "bad"] = "keep"
    """Frames of which FFmpeg tells that it could not decode them whole and patched them up, and those that may be predicted
    from such a picture. ``keep``: they are used, told once a file in the log and counted as ``damaged_frames`` in ``stats()``.
    ``bad``: a clip that has one is that of a bad file (``on_bad_file``). Only software can tell: NVDEC patches up damage
    without a word, so ``bad`` is sure where ``decoder`` is ``cpu``, and for H.264 and MPEG-1/2/4: FFmpeg notices little in
    HEVC, VP9 and AV1."""
    decoders_per_thread: Annotated[int, Field(ge=1, le=16)] = 3
    """NVDEC sessions that a thread keeps open, by codec and size class."""
    numa: bool = True
    """On a machine with several NUMA nodes, threads and processes that decode for a GPU run on the cores of its node: on those
    that this process may use, and not where these are fewer than its share of all cores. Elsewhere, and on the CPU, it does
    nothing. False: they run anywhere."""


class JitterConfig(StageConfig):
    """How many batches are prepared ahead, and in which order they come. None of it changes what is in a batch."""

    example: ClassVar[str] = '{"depth": 4}'

    depth: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Batches in preparation or ready, not yet taken by the consumer. ``auto``: as many as the spread of the times that they
    take asks for, from ``min_depth`` to ``max_depth``, 4 at first. While processes help NVDEC (``decode.cpu_workers``) and the
    consumer waits for data, there may be more, as many as the helpers' pace asks for: at most so many that they hold 256
    further visits to videos, and at most 1 GiB of output together."""
    min_depth: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches, at least, with ``depth="auto"``."""
    max_depth: Annotated[int, Field(ge=1, le=1024)] = 16
    """Batches, at most, with ``depth="auto"``."""
    max_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """Bound on the output of these batches in GiB, whatever the depth; a single batch may be larger. None: no bound for a fixed
    depth; for ``auto`` 1 GiB, or four batches where they are larger."""
    in_order: bool = True
    """False: batches come as they are completed, so that a slow video holds up no other batch. What is in each stays the same;
    their order then depends on timing."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.min_depth > self.max_depth:
            raise Misfit(
                f"min_depth={self.min_depth} is above max_depth={self.max_depth}", fix="raise max_depth or lower min_depth"
            )
        for name in ("min_depth", "max_depth"):  # by value, since a saved configuration names every field
            if self.depth != "auto" and getattr(self, name) != type(self).model_fields[name].default:
                raise Misfit(f"{name} is for depth='auto', not for depth={self.depth}", fix=f"leave depth or {name} out")
        return self


class CacheConfig(StageConfig):
    """What is kept for later epochs and fetched ahead of need. For local files all of it is off unless asked for; none changes
    a pixel."""

    example: ClassVar[str] = '{"clips": "device", "clips_gib": 4}'

    clips: Literal["off", "device", "pinned"] = "off"
    """Keep decoded clips, as the codec made them: ``device``: in the device's memory; ``pinned``: in page-locked host memory,
    uploaded when they are used again. On the CPU both mean host memory. It pays where epochs ask for the same frames of a
    video: ``sampling='uniform'``, rows with a ``start_frame``, the same epoch again and again, as for validation, or
    ``keyframe`` where videos have few. Random starts seldom meet again."""
    clips_gib: Annotated[float, Field(gt=0, le=65536)] = 4.0
    """Bound on the memory for these clips in GiB, taken as they come in pieces of up to 256 MiB. Frames of 8-bit 4:2:0 video
    take width x height x 1.5 bytes each. What came first stays; once the bound is reached nothing more is kept."""
    open_files: Annotated[int, Field(ge=0, le=65536)] = 0
    """Video files kept open, the least recently used closed first; at most a quarter of what the process may open. For network
    file systems: on a local disk opening a file costs a few microseconds."""
    read_ahead: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    """Visits to videos whose bytes are asked for before their turn: of the kernel, or of the store that they are in. ``auto``:
    32 where any video lies in a store far away, else 0. A number also helps with disks that are slow to answer and sets larger
    than the page cache. Where the kernel takes no such hints, as it does on Linux, visits to local files are only planned
    ahead."""

    @field_validator("clips", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads the bare word as False


class RemoteConfig(StageConfig):
    """How videos in stores far away are read: ``s3://``, ``https://`` and the like. What is set holds for the whole process and
    those that it starts; what is None is as ``GPUPIPE_REMOTE`` has it, a JSON object of these fields in the environment. Access
    to a store (end point, keys, anonymous) is set for fsspec itself, as its documentation of ``fsspec.config`` tells."""

    example: ClassVar[str] = '{"cache_gib": 100}'

    cache_gib: Annotated[float, Field(ge=0, le=1 << 20)] | None = None
    """Bound on the blocks of remote videos in the folder ``GPUPIPE_CACHE``, in GiB; None: 8. 0 keeps none on disk: then
    processes that decode fetch for themselves what was read ahead. What came first stays, and what nobody has used for a day
    makes room. All processes of a machine share the folder; each of them may pass the bound by a thirtieth of it. Beside that
    a process keeps the last 256 MiB in memory."""
    attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    """How often a request is made before its failure counts, with pauses that grow up to 5 s; None: 5."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """How long one request, for 8 MiB at most, may take; None: 30."""
    connections: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests under way at a time; None: 16. The first request of the process fixes it."""


class LoaderConfig(StageConfig):
    """Everything about a :class:`gpupipe.VideoLoader` but the videos themselves."""

    beside: ClassVar[tuple[str, ...]] = tuple(OF_THE_STEP)
    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("before", "after", "tokenize"), "give it to VideoLoader itself: functions are no part of a configuration"
        ),
        **dict.fromkeys(("prefetch", "prefetch_factor"), "batches are prepared ahead by jitter={'depth': …}"),
        **dict.fromkeys(
            ("num_workers", "workers"), "threads decode: decode={'threads': …}, or processes: decode={'cpu_workers': …}"
        ),
        "drop_last": "write batch={'last': 'drop'}, 'partial' or 'fill'",
        **dict.fromkeys(
            ("sampler", "batch_sampler"), "the order follows from shuffle, seed, rank and world_size, and source={'weights': …}"
        ),
        "collate_fn": "batches are made on the device: see transform and columns, and VideoLoader(after=…) for a function",
        **dict.fromkeys(
            ("pin_memory", "persistent_workers", "worker_init_fn", "multiprocessing_context", "pin_memory_device"),
            "leave it out: batches are made on the device, by threads of this process",
        ),
        "batch_size": "write batch=…",
        "timeout": "write timeout_seconds=…",
        **dict.fromkeys(
            ("data_pipeline", "gradient_accumulation"),
            "it is of the layout with data_pipeline, which stands under tele_tron: or gpupipe:, see docs/configuration.md",
        ),
        **dict.fromkeys(("gpupipe", "tele_tron"), "it is the root of a file: give the file's path, config='run.yaml'"),
        **OF_THE_STEP,
    }
    unbuilt: ClassVar[dict[str, str]] = UNBUILT

    source: SourceConfig = SourceConfig()
    """Which files are videos, and where labels come from."""
    clip: ClipConfig = ClipConfig()
    """Which frames make a clip."""
    transform: TransformConfig = TransformConfig()
    """From decoded frames to a finished clip; the name of a preset stands for ``{"preset": name}``."""
    batch: BatchConfig = BatchConfig()
    """What a batch holds; one number means batches of that size."""
    decode: DecodeConfig = DecodeConfig()
    """Who decodes, and how long it may take."""
    jitter: JitterConfig = JitterConfig()
    """How many batches are prepared ahead."""
    cache: CacheConfig = CacheConfig()
    """What is kept and fetched ahead of need."""
    remote: RemoteConfig = RemoteConfig()
    """How videos in stores far away are read."""
    device: str = "auto"
    """``cuda``, ``cuda:N``, ``cpu``, or ``auto``: the current CUDA device if there is one, else the CPU."""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """With the epoch and a sample's number it fixes the order and every random choice."""
    shuffle: bool | Annotated[int, Field(ge=2)] = True
    """A new order each epoch; False: that of the list. A number is a window, for sets whose neighbours in the list lie together
    on a slow disk: runs of so many neighbours come in random order, one after the other, each shuffled; where the runs are cut
    is drawn anew each epoch."""
    repeat: bool = False
    """One iterator goes through epoch after epoch, for trainers that count steps: the loader has no ``len()``."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """How long the loop may wait for a batch, the first one included. After that it gets an error that names the stage which
    starves it. None: for ever, but for what ``decode.limit_seconds`` bounds."""
    columns: tuple[str, ...] = ()
    """Columns of the source carried to the batch besides ``label``: numbers and arrays of numbers as tensors, text in
    ``batch.text``."""
    on_bad_file: Literal["substitute", "skip", "raise"] = "substitute"
    """``substitute``: another sample, a function of (seed, epoch, sample, attempt), takes the slot. ``skip``: the batch is
    smaller; an epoch of which every clip was skipped ends in an error. ``raise``: the loop gets the error. Always counted and
    named."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Data-parallel rank of this loader; None: torch.distributed's where it is set up, else the environment's ``RANK``, else 0.
    Ranks that share a model (tensor or context parallel) must get the same samples: give both numbers there."""
    world_size: Annotated[int, Field(ge=1)] | None = None
    """Number of data-parallel ranks; None: found like ``rank``, from ``WORLD_SIZE``. All ranks get equally many batches:
    ``batch.last`` says how."""

    @field_validator("batch", mode="before", json_schema_input_type=Annotated[int, Field(ge=1)] | BatchConfig)
    @classmethod
    def _batch_of_size(cls, value: Any) -> Any:
        size = None if isinstance(value, bool) else whole_number(value)
        return value if size is None else {"size": size}

    @field_validator("columns", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_column(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def override(self, values: dict[str, Any]) -> Self:
        """This configuration with other values. A dict for a stage changes the fields that it names and leaves the rest. A
        preset takes the place of the preset or the defaults that were there: fields that had other values than these keep them.

        Raises:
            ConfigError: for an unknown field or a value outside its range.
        """
        merged = dict(values)
        for name, value in values.items():
            stage = getattr(self, name, None)
            part = self._batch_of_size(value) if name == "batch" else value
            part = {"preset": part} if name == "transform" and isinstance(part, str) else part
            if isinstance(stage, StageConfig) and isinstance(part, dict):
                kept = {field: getattr(stage, field) for field in stage.model_fields_set}
                if isinstance(stage, TransformConfig) and part.get("preset") is not None:
                    kept = stage.own  # by value, since a saved configuration names every field
                for one, other in (("stride", "fps"), ("fps", "stride")):  # the one that is named now takes the other's place
                    if name == "clip" and one in part and other not in part:
                        kept.pop(other, None)
                if isinstance(stage, TransformConfig) and "size" in part and stage.short_side_is_presets:
                    kept.pop("short_side", None)  # to be that for the new size
                if name == "jitter" and part.get("depth", "auto") != "auto":
                    kept = {field: value for field, value in kept.items() if field not in ("min_depth", "max_depth")}
                merged[name] = kept | part
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | merged)

    @fits
    def _rank_exists(self) -> None:
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise Misfit(f"rank={self.rank} needs world_size > {self.rank}, got {self.world_size}", fix="ranks count from 0")

    @fits
    def _clips_differ(self) -> None:
        if self.clip.sampling == "uniform" and self.clip.clips_per_video > self.transform.crops:
            raise Misfit(
                f"sampling='uniform' gives one clip of a video, not clips_per_video={self.clip.clips_per_video}",
                fix="use sampling='regular' or 'stratified'",
            )

    @fits
    def _shapes_fit(self) -> None:
        if self.batch.layout != "stack" and self.transform.mix is not None:
            raise Misfit(
                f"transform.mix mixes clips of one shape, batch.layout={self.batch.layout!r} puts others side by side",
                fix="use layout='stack', or leave mix out",
            )
        buckets = self.batch.buckets
        if buckets is not None and not buckets.sizes_for(self.transform.size):
            raise Misfit(
                f"batch.buckets.multiple={buckets.multiple} leaves no size within the area of {self.transform.size}",
                fix="use a smaller multiple or a larger size",
            )
        several = buckets is not None and len(buckets.sizes_for(self.transform.size)) > 1
        if several and self.transform.short_side is not None:
            raise Misfit(
                "transform.short_side is fixed, batch.buckets have several sizes",
                fix="leave short_side out: it follows the size",
            )

    @fits
    def _visits_fit_batches(self) -> None:
        if self.batch.size % self.clip.clips_per_video:
            clips = self.clip.clips_per_video
            above = -(-self.batch.size // clips) * clips
            below = f"{above - clips} or " if above > clips else ""
            raise Misfit(
                f"batch.size={self.batch.size} is no multiple of clips_per_video={clips}", fix=f"use batch={below}{above}"
            )
        if self.clip.clips_per_video % self.transform.crops:
            raise Misfit(
                f"transform.crop={self.transform.crop!r} makes {self.transform.crops} clips of the same frames: "
                f"clips_per_video={self.clip.clips_per_video} is no multiple of that",
                fix=f"set clip.clips_per_video={self.transform.crops}, or a multiple",
            )

    @classmethod
    def parse(cls, value: Self | dict[str, Any] | PathLike | None) -> Self:
        """Takes an instance, a mapping of its fields, the path of a YAML file, or None for the defaults.

        Raises:
            ConfigError: for an unknown field, a value outside its range, or a file that cannot be read.
        """
        return cls.from_yaml(value) if isinstance(value, str | os.PathLike) else super().parse(value)

    @classmethod
    def from_yaml(cls, path: PathLike) -> Self:
        """Reads a configuration written by :meth:`to_yaml` or by hand: these fields, as the whole file or below a key
        ``gpupipe``, or the layout of :mod:`gpupipe.config.teletron` below ``tele_tron`` or ``gpupipe``.

        Raises:
            ConfigError: when the file cannot be read, is not a YAML mapping, or has unknown or bad fields: ``faults`` has each
                of them.
        """
        from gpupipe.config.document import read

        return read(path, cls).told()

    def to_yaml(self, path: PathLike) -> None:
        """Writes all fields, defaults included, so that the file records the run; but not ``rank`` and ``world_size``, which
        say where one process of it stood.

        Raises:
            ConfigError: when the file cannot be written.
        """
        import yaml

        text = yaml.safe_dump(self.model_dump(mode="json", exclude={"rank", "world_size"}), sort_keys=False)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the configuration {path}: {error}", fix="name a file in a folder") from error
