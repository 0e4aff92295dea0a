"""The layout that users of TeleTron know, and what it means in gpupipe's own."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model, field_validator

from gpupipe.config import BatchConfig, LoaderConfig, StageConfig, TransformConfig
from gpupipe.config.stage import UNBUILT, Misfit, fits, names_only
from gpupipe.config.training import OF_THE_STEP, TRAINING_KEYS
from gpupipe.config.transform import Side
from gpupipe.errors import ConfigError, Fault

Place = tuple[str, ...]
"""Names that lead to a value, from the outermost on."""

SHARED = tuple(
    name
    for name, field in LoaderConfig.model_fields.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, StageConfig))
)
"""Fields that both layouts have, at the same place."""

_VIDEOS = "the videos are an argument: VideoLoader('videos/', config=…)"
_CALL = "or give it to the call: VideoLoader(videos, config=…, "
_ELSEWHERE = {
    **dict.fromkeys(("num_workers", "workers"), f"threads of the loader decode, leave it out; {_CALL}decode={{'threads': 4}})"),
    **dict.fromkeys(
        ("prefetch", "prefetch_factor"),
        f"how many batches are prepared ahead follows their times, leave it out; {_CALL}jitter={{'depth': 4}})",
    ),
    **dict.fromkeys(("pin_memory", "persistent_workers"), "leave it out: batches are made on the device, by threads that stay"),
    **dict.fromkeys(("videos", "paths", "data_path", "dataset"), _VIDEOS),
}
_SAMPLER = {
    "mode": "sampling", "samples_per_clip": "frames", "stride": "stride", "fps": "fps", "clips_per_video": "clips_per_video",
}  # fmt: skip
"""Fields of ``frame_sampler`` and what they are called in ``clip``."""
_USUAL: int = BatchConfig.model_fields["size"].default


def _named(value: Any) -> Any:
    """A preset's name as what it stands for."""
    if isinstance(value, str):
        return {"preset": value}
    if value is not None and not isinstance(value, dict):
        raise ValueError("takes the name of a preset or a mapping of the fields of gpupipe's transform")
    return value


class FrameSamplerConfig(StageConfig):
    """Which frames make a clip."""

    example: ClassVar[str] = '{"mode": "stratified", "samples_per_clip": 16}'
    elsewhere: ClassVar[dict[str, str]] = dict.fromkeys(TRAINING_KEYS, "write it beside data_pipeline")
    unbuilt: ClassVar[dict[str, str]] = UNBUILT

    mode: Literal["random", "regular", "uniform", "stratified", "keyframe"] | None = None
    """How the frames are picked: ``clip.sampling``."""
    samples_per_clip: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Frames of a clip: ``clip.frames``."""
    stride: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Distance between neighbouring frames of a clip, in frames: ``clip.stride``."""
    fps: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Frames per second of the clip: ``clip.fps``."""
    clips_per_video: Annotated[int, Field(ge=1, le=256)] | None = None
    """Clips of each visit to a video: ``clip.clips_per_video``."""


class DataPipelineConfig(StageConfig):
    """From files to clips."""

    example: ClassVar[str] = '{"video_decoding": "nvdec", "frame_sampler": {"mode": "stratified"}}'
    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys((*SHARED, *TRAINING_KEYS), "write it beside data_pipeline"), **_ELSEWHERE,
    }  # fmt: skip
    unbuilt: ClassVar[dict[str, str]] = UNBUILT

    video_decoding: Literal["auto", "nvdec", "dali", "cpu"] | None = None
    """Who decodes: ``decode.decoder``."""
    frame_sampler: FrameSamplerConfig = FrameSamplerConfig()
    """Which frames make a clip."""
    resolution: tuple[Side, Side] | None = None
    """(height, width) of a clip in pixels; one number means a square: ``transform.size``."""
    size: tuple[Side, Side] | None = None
    """The same by its other name."""
    transform: Annotated[Any, BeforeValidator(_named, json_schema_input_type=str | TransformConfig)] = None
    """The name of a preset, or fields of gpupipe's own: ``transform``."""
    drop_last: bool | None = None
    """Whether the last, smaller batch is left out: ``batch.last``, ``drop`` or ``partial``."""

    @field_validator("resolution", "size", mode="before", json_schema_input_type=Side | tuple[Side, Side])
    @classmethod
    def _square(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    @fits
    def _one_size(self) -> None:
        given = [name for name in ("resolution", "size") if getattr(self, name) is not None]
        given += ["transform.size"] if "size" in (self.transform or {}) else []
        if len(given) > 1:
            raise Misfit(f"{' and '.join(given)} are one setting, given twice", fix="leave one of them out")


class _Layout(StageConfig):
    """The whole configuration in TeleTron's layout. Fields that are left out have gpupipe's defaults."""

    beside: ClassVar[tuple[str, ...]] = tuple(OF_THE_STEP)
    elsewhere: ClassVar[dict[str, str]] = _ELSEWHERE
    unbuilt: ClassVar[dict[str, str]] = UNBUILT

    batch_size: Annotated[int, Field(ge=1)] | Literal["dynamic"] | None = None
    """Clips of one pass through the model: ``batch.micro_size``, or without accumulation ``batch.size``. ``dynamic``: as many
    as fit the memory, ``batch.micro_size: auto``."""
    gradient_accumulation: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Passes of a step of the optimizer: with ``batch_size: N`` and ``gradient_accumulation: A`` the step, ``batch.size``, has
    N * A clips. With ``dynamic`` memory decides how many passes a step takes; the step has 8 * A clips then, as it would with
    the batch size 8 that is the default. ``auto``: as many as ``effective_batch_size`` asks for."""
    effective_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Clips of a step of the optimizer: ``batch.size``. In place of ``gradient_accumulation``."""
    data_pipeline: DataPipelineConfig = DataPipelineConfig()
    """From files to clips."""

    @field_validator("data_pipeline", mode="before", json_schema_input_type=DataPipelineConfig | None)
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return {} if value is None else value  # YAML's, where all below it is commented out

    @field_validator("columns", mode="before", check_fields=False, json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_column(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @fits
    def _step_is_clear(self) -> None:
        one, passes, step = self.batch_size, self.gradient_accumulation, self.effective_batch_size
        if one == "dynamic" and step is not None and isinstance(passes, int):
            raise Misfit(
                f"effective_batch_size={step} with batch_size='dynamic' leaves it to the memory how many passes a step takes, "
                f"gradient_accumulation={passes} says it again",
                fix="leave gradient_accumulation out, or write 'auto'",
            )
        if passes == "auto" and one != "dynamic" and (one is None or step is None):
            raise Misfit(
                "gradient_accumulation='auto' does not say how many clips a step has",
                fix="give batch_size and effective_batch_size too, or batch_size='dynamic'",
            )
        known = [
            (name, value) for name, value in (("batch_size", one), ("gradient_accumulation", passes)) if isinstance(value, int)
        ]
        if step is None or not known:
            return
        product = known[0][1] * (known[1][1] if len(known) > 1 else 1)
        if step % product or (len(known) > 1 and step != product):
            given = " and ".join(f"{name}={value}" for name, value in known)
            what = "is not their product with" if len(known) > 1 else "is no multiple of"
            raise Misfit(f"effective_batch_size={step} {what} {given}", fix="leave one of them out, or make them fit")

    @property
    def batch(self) -> dict[str, tuple[Any, str]]:
        """Fields of ``batch`` that these make, each with the key that says so."""
        one, passes, step = self.batch_size, self.gradient_accumulation, self.effective_batch_size
        size_key = "effective_batch_size" if step is not None else "gradient_accumulation" if passes else "batch_size"
        if one == "dynamic":
            times = passes if isinstance(passes, int) else 1
            return {"size": (step or _USUAL * times, size_key), "micro_size": ("auto", "batch_size")}
        if step is not None:
            part = one or (step // passes if isinstance(passes, int) else None)
            made: dict[str, tuple[Any, str]] = {"size": (step, size_key)}
        else:
            part = one or _USUAL if passes else None
            made = {"size": (part * int(passes), size_key)} if part and passes else {"size": (one, size_key)} if one else {}
        return made | ({"micro_size": (part, "batch_size" if one else "gradient_accumulation")} if part else {})


STAGES: dict[Place, Place] = {
    ("batch",): (),
    ("decode",): ("data_pipeline",),
    ("clip",): ("data_pipeline", "frame_sampler"),
    ("transform",): ("data_pipeline", "transform"),
}
"""Where the fields of a stage come from together."""


def _make() -> type[_Layout]:
    shared: dict[str, Any] = {
        name: (LoaderConfig.model_fields[name].annotation, LoaderConfig.model_fields[name]) for name in SHARED
    }
    return create_model("TeleTronConfig", __base__=_Layout, __doc__=_Layout.__doc__, **shared)


TeleTronConfig = _make()


_STEP = ("batch_size", "gradient_accumulation", "effective_batch_size")


def _faults_of(values: dict[str, Any]) -> tuple[Fault, ...]:
    try:
        TeleTronConfig(**values)
    except ConfigError as error:
        return error.faults
    return ()


def translate(values: dict[str, Any]) -> tuple[dict[str, Any], dict[Place, Place], tuple[Fault, ...]]:
    """What such a configuration means.

    Returns:
        The fields of a :class:`gpupipe.LoaderConfig`, from which of the keys each of them comes, and what is wrong with those:
        where there is anything, the fields are only those of ``transform``, for it is not looked at here.
    """
    try:
        layout = TeleTronConfig(**names_only(values, "tele_tron"))
    except ConfigError as error:
        pipeline = values.get("data_pipeline")
        transform = pipeline.get("transform") if isinstance(pipeline, dict) else None
        faults = error.faults or (Fault((), error.message, error.fix),)
        if not any(fault.place[:1] == (name,) for fault in faults for name in _STEP):
            faults += _faults_of({name: values[name] for name in _STEP if name in values})
        whole = {"transform": transform} if isinstance(transform, dict | str) else {}
        return whole, {("transform",): ("data_pipeline", "transform")}, faults
    pipeline, sampler = layout.data_pipeline, layout.data_pipeline.frame_sampler
    found: list[tuple[Place, Any, Place]] = [((name,), values[name], (name,)) for name in SHARED if name in values]
    found += [(("batch", name), value, (key,)) for name, (value, key) in layout.batch.items()]
    if pipeline.drop_last is not None:
        found.append((("batch", "last"), "drop" if pipeline.drop_last else "partial", ("data_pipeline", "drop_last")))
    if pipeline.video_decoding is not None:
        found.append((("decode", "decoder"), pipeline.video_decoding, ("data_pipeline", "video_decoding")))
    for name, value in (pipeline.transform or {}).items():
        found.append((("transform", name), value, ("data_pipeline", "transform", name)))
    for name in ("resolution", "size"):
        if (size := getattr(pipeline, name)) is not None:
            found.append((("transform", "size"), size, ("data_pipeline", name)))
    for name, own in _SAMPLER.items():
        if (value := getattr(sampler, name)) is not None:
            found.append((("clip", own), value, ("data_pipeline", "frame_sampler", name)))
    fields: dict[str, Any] = {}
    for (*stages, name), value, _ in found:
        inner = fields.setdefault(stages[0], {}) if stages else fields
        inner[name] = value
    return fields, {place: key for place, _, key in found}, ()
