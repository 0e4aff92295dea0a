"""The configuration of a training step: its precision and the watch over it, its graphs, its memory, what it makes again."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from gpupipe.config.ranges import Amount, AmountText, gigabytes
from gpupipe.config.stage import Misfit, PathLike, StageConfig, fits

Scale = Annotated[float, Field(gt=0, le=2.0**126)]
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _typed(value: Any) -> Any:
    """A type's name as what it stands for; the short names too."""
    if isinstance(value, str):
        return {"dtype": _TYPES.get(value, value)}
    if isinstance(value, dict) and isinstance(value.get("dtype"), str):
        return {**value, "dtype": _TYPES.get(value["dtype"], value["dtype"])}
    return value


class PrecisionConfig(StageConfig):
    """Types of a training step. Weights that the optimizer steps, its state and summed gradients are float32 in all of them."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What products are worked out in, by torch's autocast. ``float16`` has the range of a loss scale's making: gradients are
    those of the loss times the scale, which follows what overflows (Micikevicius et al., Mixed Precision Training, 2018)."""
    master_weights: bool = False
    """Whether the model keeps its parameters in ``dtype`` beside float32 copies, which the optimizer steps: no casts in each
    step, half the memory of gradients on their way. False: parameters are float32, and cast where they are used."""
    keep_float32: tuple[str, ...] = ()
    """Modules that compute in float32 all the same, parameters included: names as in ``model.named_modules()``, with ``*`` and
    ``?`` as in file names."""
    initial_scale: Scale = 65536.0
    """The loss scale of the first step; float16 only."""
    growth_interval: Annotated[int, Field(ge=1)] = 2000
    """Steps in a row without an overflow after which the scale doubles; one with an overflow halves it, and is left out."""
    max_scale: Scale = 2.0**24
    """The scale's ceiling: the greatest value that it grows to."""
    min_scale: Scale = 1.0
    """The scale's floor, which steps left out for another cause than an overflow cannot bring it below."""

    @classmethod
    def parse(cls, value: Self | dict[str, Any] | str | None) -> Self:
        """As of every stage; and the name of a type, which stands for ``{"dtype": name}``.

        Raises:
            ConfigError: for an unknown field or type, or a value outside its range.
        """
        return super().parse(_typed(value))

    @fits
    def _starts_below_the_ceiling(self) -> None:
        if self.initial_scale > self.max_scale:
            raise Misfit(
                f"initial_scale={self.initial_scale:g} is above max_scale={self.max_scale:g}",
                fix="raise max_scale, or start lower",
            )

    @fits
    def _starts_above_the_floor(self) -> None:
        if self.initial_scale < self.min_scale:
            raise Misfit(
                f"initial_scale={self.initial_scale:g} is below min_scale={self.min_scale:g}",
                fix="lower min_scale, or start higher",
            )

    @fits
    def _masters_of_something(self) -> None:
        if self.master_weights and self.dtype == "float32":
            raise Misfit("master_weights=True with dtype='float32' would keep all weights twice", fix="leave it out")


class WatchConfig(StageConfig):
    """What is done about losses and gradients that are not finite."""

    lag: Annotated[int, Field(ge=0, le=64)] = 4
    """Steps after which the host reads what the device found: so far it may run ahead. The batches of that many are held."""
    overflows: Annotated[int, Field(ge=1)] = 16
    """Steps in a row that a loss scale may leave out: that many halvings are not a scale that finds its place."""
    repeat: Literal["no", "conservative", "float32"] = "conservative"
    """How such a step is done again: ``conservative`` with ``gpupipe.ops`` rounding as torch's own ops do, ``float32`` also
    without autocast (not with ``master_weights``)."""
    give_up: Annotated[int, Field(ge=1)] = 3
    """Such steps in a row, without one that went well between them, after which training ends in an error."""


class GraphConfig(StageConfig):
    """CUDA graphs of what repeats in a training step: the arguments of :class:`gpupipe.train.AdaptiveGraph`."""

    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Calls before the first capture."""
    capture_frequency: Annotated[int, Field(ge=1)] = 5
    """How often a kind of call must have come before it is captured."""
    max_graphs: Annotated[int, Field(ge=1)] = 8
    """Kinds of calls that are captured, at most."""
    capture: Literal["auto", "always"] = "auto"
    """``auto``: kinds of calls of which the host is the bottleneck, as is measured; ``always``: all that repeat."""
    segments: Literal["auto", "off"] = "auto"
    """Whether a module that cannot be captured whole is cut where it asks for a value on the host."""


class LeakConfig(StageConfig):
    """When memory that is held from step to step counts as a leak: the settings of :class:`gpupipe.train.LeakWatch`."""

    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Steps that are not looked at: the optimizer's state, caches and graphs come in them."""
    window_steps: Annotated[int, Field(ge=2)] = 50
    """Steps of a window. Of each the least that was held counts, so that what comes and goes within one is no growth."""
    windows: Annotated[int, Field(ge=2)] = 4
    """Windows in a row that must each hold more than the one before. In one more what grows is looked for."""
    least_growth: Amount = "32MB"
    """What they must have grown by in all, the largest rise left out, which may be a jump; a share is of the device's memory.
    What leaks slowly takes more windows to come to it, and is found then."""
    action: Literal["warn", "raise"] = "warn"
    """``warn``: it is told once, in the log. ``raise``: training ends in a :class:`gpupipe.errors.MemoryLeakError`."""


def _switched(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class MemoryConfig(StageConfig):
    """The device's memory: the settings of :func:`gpupipe.train.reserve_memory` and of the watch over it."""

    reserve: Amount | None = None
    """What is taken at the start and kept for tensors, what torch holds by then included: a share of the device's memory, or an
    amount such as ``"60GB"``. None: memory is taken as it is needed."""
    room: Amount = 0.05
    """What torch never takes, beyond what is in use outside of it at the start: NVDEC's decoders, CuPy, NCCL and other
    processes allocate there. A share of the device's memory, or an amount."""
    leak_watch: Annotated[LeakConfig | None, BeforeValidator(_switched, json_schema_input_type=bool | LeakConfig | None)] = None
    """Settings of :class:`gpupipe.train.LeakWatch`; true: as they are by default. None: no watch."""


def reserved(value: Any) -> Any:
    """What stands for the settings of memory: an amount for the one that is set aside, true for the defaults."""
    return {"reserve": value} if isinstance(value, int | float | str) and not isinstance(value, bool) else _switched(value)


class TrainingConfig(StageConfig):
    """What a file says of the training step. A loader that is given the same file leaves it alone."""

    mixed_precision: Annotated[
        PrecisionConfig | None, BeforeValidator(_typed, json_schema_input_type=str | PrecisionConfig | None)
    ] = None
    """Settings of :class:`gpupipe.train.Precision`; the name of a type stands for ``{"dtype": name}``, ``bf16``, ``fp16`` and
    ``fp32`` for the long ones. None: the step's own."""
    cuda_graph: Annotated[GraphConfig | None, BeforeValidator(_switched, json_schema_input_type=bool | GraphConfig | None)] = (
        None
    )
    """Settings of :class:`gpupipe.train.AdaptiveGraph`; true: as they are by default. None: no graphs."""
    recompute: Annotated[
        Literal["none", "elementwise", "block"] | Annotated[float, Field(gt=0)],
        BeforeValidator(
            gigabytes,
            json_schema_input_type=Literal["none", "elementwise", "block"] | Annotated[float, Field(gt=0)] | AmountText,
        ),
    ] = "none"
    """What activations are made again in the backward, by :func:`gpupipe.train.recompute`: a policy, or a budget for the whole
    step, in GB or with its unit: ``60.0`` and ``60GB`` are the same."""
    memory: Annotated[
        MemoryConfig | None, BeforeValidator(reserved, json_schema_input_type=bool | float | str | MemoryConfig | None)
    ] = None
    """Settings of :func:`gpupipe.train.reserve_memory` and :class:`gpupipe.train.LeakWatch`; a share or an amount stands for
    ``{"reserve": …}``, true for the defaults. None: memory is left to torch."""

    @classmethod
    def from_yaml(cls, path: PathLike) -> Self:
        """The part of a file that a loader leaves alone, in either layout.

        Raises:
            ConfigError: when the file cannot be read, or anything in it is wrong, the loader's part included.
        """
        from gpupipe.config import LoaderConfig
        from gpupipe.config.document import read

        document = read(path, LoaderConfig)
        document.told()
        return cls(**{name: getattr(document.training, name) for name in document.training.model_fields_set})


TRAINING_KEYS = frozenset(TrainingConfig.model_fields)
OF_THE_STEP = dict.fromkeys(
    TrainingConfig.model_fields,
    "it is of the training step: gpupipe.train.TrainingConfig has it, and a file beside the loader's own keys",
)
"""What is said of these keys where a loader's are expected."""
