"""The configuration of the clip transform."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gpupipe.config.augment import (
    AffineConfig,
    AutoAugmentConfig,
    BlurConfig,
    ColorJitterConfig,
    ErasingConfig,
    MixConfig,
)
from gpupipe.config.presets import PRESETS, preset
from gpupipe.config.ranges import Color, Part, Ratio, Share, Spread, ascending
from gpupipe.config.stage import Misfit, StageConfig, fits, whole_number
from gpupipe.errors import ConfigError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_OF_CODES = (4.0, 1e6)
"""Means and deviations between these are of codes, mostly of 8 bits."""

Side = Annotated[int, Field(ge=1, le=8192)]
ShortSide = Annotated[int, Field(ge=1, le=65536)]
_GREATEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""The greatest numbers of floating-point types."""
WINDOWS = ("random", "center", "three")
"""Crops that take a window of ``size`` from the scaled frame."""


class TransformConfig(StageConfig):
    """From decoded planes to a normalised clip. Names and meanings follow torchvision.transforms.v2.

    Whatever the order of the fields, a clip is made in this one: crop, resize, flips and affine move in one resampling; YUV to
    RGB; automatic augmentation, colour jitter, grayscale, channel drop; blur; normalisation; erasing."""

    example: ClassVar[str] = '{"preset": "kinetics_train", "size": 112}'

    preset: str | None = None
    """``kinetics_train``, ``kinetics_eval``, ``videomae`` or ``diffusion``: sets further fields; those given here win. The
    ``short_side`` of ``kinetics_eval`` goes with ``size``: 256 / 224 of its shorter side, unless it is given too."""
    size: tuple[Side, Side] = (224, 224)
    """(height, width) of the output in pixels; one number means a square."""
    crop: Literal["random-resized", "random", "center", "three", "multi-scale", "none"] = "random-resized"
    """``random-resized``: RandomResizedCrop. ``random`` (RandomCrop), ``center`` (CenterCrop) and ``three`` (ThreeCrop): the
    shorter side is scaled to ``short_side``, then a window of ``size`` is taken; ``three`` takes three along the longer side,
    for three clips of the same frames: ``clips_per_video`` must be a multiple of 3. ``multi-scale``: MultiScaleCrop (Wang et
    al., Temporal Segment Networks, ECCV 2016). ``none`` (Resize): the whole frame is scaled to ``size`` (aspect ratio not
    kept)."""
    scale: tuple[Part, Part] = (0.08, 1.0)
    """Range of the crop's area as a share of the frame's, for ``random-resized``."""
    ratio: tuple[Ratio, Ratio] = (3 / 4, 4 / 3)
    """Range of the crop's aspect ratio (width / height), for ``random-resized``."""
    multi_scale: Annotated[tuple[Part, ...], Field(min_length=1, max_length=16)] = (1.0, 0.875, 0.75, 0.66)
    """Sides of the crop as shares of the frame's shorter side, for ``multi-scale``; neighbours in the list may be paired."""
    short_side: ShortSide | tuple[ShortSide, ShortSide] | None = None
    """Length in pixels of the scaled shorter side for ``random``, ``center`` and ``three``; (low, high): drawn uniformly for
    each clip (RandomShortSideScale); None: just large enough for ``size``."""
    hflip: Share = 0.5
    """Probability of a horizontal flip of the whole clip."""
    vflip: Share = 0.0
    """Probability of a vertical flip of the whole clip."""
    affine: AffineConfig | None = None
    """RandomAffine: rotation, shift, zoom and shear of the output."""
    fill: Color = (0.0, 0.0, 0.0)
    """RGB in [0, 1] of what lies outside of the frame."""
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    """``nearest`` is torch's ``nearest-exact``: the sample whose centre is nearest to the output's."""
    antialias: bool = True
    """Widen the filter by the shrink factor, as ``torch.nn.functional.interpolate(antialias=True)`` does."""
    auto_augment: AutoAugmentConfig | None = None
    """RandAugment or TrivialAugment."""
    color_jitter: ColorJitterConfig | None = None
    """Brightness, contrast, saturation and hue."""
    grayscale: Share = 0.0
    """Probability of RandomGrayscale: all channels become the luma of BT.601, as in torchvision."""
    channel_drop: Share = 0.0
    """Probability that one of R, G and B, drawn evenly, becomes 0."""
    clamp: bool = True
    """Keep RGB within [0, 1] after each step that could leave it, as the separate operations do. Without, what is linear is
    one matrix, and values beyond go on to the normalisation. dtype ``uint8`` is always clamped at the end."""
    blur: BlurConfig | None = None
    """GaussianBlur."""
    mean: Color = IMAGENET_MEAN
    """Subtracted from RGB in [0, 1]; one number stands for all three channels. Not applied to ``dtype='uint8'``."""
    std: Spread = IMAGENET_STD
    """Divides what ``mean`` left; one number stands for all three channels. Not applied to ``dtype='uint8'``."""
    erasing: ErasingConfig | None = None
    """RandomErasing."""
    draws: Literal["clip", "frame"] = "clip"
    """Whether the frames of a clip share one draw of all that is random above, or each has its own."""
    mix: MixConfig | None = None
    """MixUp, CutMix and label smoothing on the finished batch."""
    dtype: Literal["bfloat16", "float16", "float32", "uint8"] = "bfloat16"
    """Of ``batch["video"]``; ``uint8`` is RGB in 0 … 255, not normalised."""
    layout: Literal["NCTHW", "NTCHW"] = "NCTHW"
    """Order of the axes: batch, channel, time, height, width."""
    memory_format: Literal["contiguous_format", "channels_last_3d"] = "contiguous_format"
    """``channels_last_3d``: ``NCTHW`` with the channels side by side in memory, as cuDNN's convolutions like it."""
    untagged_matrix: Literal["auto", "bt601", "bt709"] = "auto"
    """Colour matrix of streams that do not state one; ``auto``: BT.709 where the shorter side has 720 pixels or more, else
    BT.601."""
    untagged_range: Literal["limited", "full"] = "limited"
    """Sample range of streams that do not state one."""

    @classmethod
    def parse(cls, value: Self | dict[str, Any] | str | None) -> Self:
        """Takes an instance, the name of a preset, a mapping of fields, or None for the defaults.

        Raises:
            ConfigError: for an unknown name or a value outside its range.
        """
        return cls(preset=value) if isinstance(value, str) else super().parse(value)

    @property
    def short_side_is_presets(self) -> bool:
        """Whether the short side is what the preset makes of ``size``."""
        return self.preset is not None and self.short_side == preset(self.preset, self.size).get("short_side")

    @property
    def crops(self) -> int:
        """Clips that show the same frames, each another part of the picture."""
        return 3 if self.crop == "three" else 1

    @property
    def own(self) -> dict[str, Any]:
        """The fields that have other values than this transform's preset, or without one the defaults, would give them."""
        plain = type(self)(preset=self.preset)
        differ = {name: value for name in type(self).model_fields if (value := getattr(self, name)) != getattr(plain, name)}
        if self.short_side_is_presets:  # it goes with the size
            differ.pop("short_side", None)
        return differ

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"preset": values}
        if isinstance(values, dict) and values.get("preset") in tuple(PRESETS):  # others are told of beside what else is wrong
            fields = preset(values["preset"], values.get("size")) | values
            if fields.get("crop") not in WINDOWS and "short_side" not in values:  # the preset's belongs to the preset's crop
                fields.pop("short_side", None)
            return fields
        return values

    @field_validator("preset", mode="before")
    @classmethod
    def _known_preset(cls, value: Any) -> Any:
        if value is not None:
            preset(value)
        return value

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _of_unit_scale(cls, value: Any, info: ValidationInfo) -> Any:
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, int | float) and _OF_CODES[0] < number <= _OF_CODES[1] for number in numbers):
            raise Misfit(
                f"{info.field_name} is on a scale of 0 to 255", fix="divide mean and std by 255: RGB is in [0, 1] here"
            )
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _torch_dtype(cls, value: Any) -> Any:
        return str(value).removeprefix("torch.")

    @field_validator("memory_format", mode="before")
    @classmethod
    def _torch_format(cls, value: Any) -> Any:
        return str(value).removeprefix("torch.")

    @field_validator("size", mode="before", json_schema_input_type=Side | tuple[Side, Side])
    @classmethod
    def _square(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        number = whole_number(value)
        return value if number is None else (number, number)

    @fits
    def _fits_together(self) -> None:
        for name in ("scale", "ratio"):
            ascending(name, getattr(self, name))
        if isinstance(self.short_side, tuple):
            ascending("short_side", self.short_side)
        if self.short_side is not None and self.crop not in WINDOWS:
            raise Misfit(
                f"short_side={self.short_side} is of no effect with crop={self.crop!r}",
                fix=f"leave it out (None), or use a crop that takes a window: {', '.join(WINDOWS)}",
            )
        shortest = min(self.short_side) if isinstance(self.short_side, tuple) else self.short_side
        if shortest is not None and shortest < min(self.size):
            raise Misfit(
                f"short_side={self.short_side} is smaller than the crop size {self.size}",
                fix="raise short_side, or leave it out: then it is just large enough",
            )
        if self.memory_format == "channels_last_3d" and self.layout != "NCTHW":
            raise ValueError(f"memory_format='channels_last_3d' needs layout='NCTHW', not {self.layout!r}")
        if self.blur is not None and self.blur.kernel_size // 2 >= min(self.size):
            raise ValueError(f"blur.kernel_size={self.blur.kernel_size} reaches across the whole output of {self.size}")
        value = self.erasing.value if self.erasing is not None else ()
        if self.dtype == "uint8" and (value == "random" or not all(0 <= v <= 255 for v in value)):
            raise ValueError(f"erasing.value={value!r} does not fit dtype='uint8'")

    @fits
    def _values_fit_the_dtype(self) -> None:
        most = _GREATEST.get(self.dtype, math.inf)
        for mean, std in zip(self.mean, self.std, strict=True):
            if max(abs(0 - mean), abs(1 - mean)) / std > most:
                raise Misfit(
                    f"mean={mean:g} and std={std:g} make values beyond {most:g}, the greatest of dtype={self.dtype!r}",
                    fix="use std of about 0.2 for RGB in [0, 1], or another dtype",
                )
        for value in self.erasing.value if self.erasing is not None and self.erasing.value != "random" else ():
            if abs(float(value)) > most:
                raise Misfit(
                    f"erasing.value={value:g} is beyond {most:g}, the greatest of dtype={self.dtype!r}",
                    fix="give it in the clip's own values: 0 is the mean colour",
                )

    @fits
    def _draws_that_make_sense(self) -> None:
        if self.draws == "frame" and self.crop == "three":
            raise ConfigError("draws='frame' and crop='three' exclude each other", fix="draw per clip")
