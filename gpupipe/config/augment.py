"""The parts of a transform that have several parameters of their own; names and meanings follow torchvision.transforms.v2."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gpupipe.config.ranges import (
    Alpha,
    DegreeRange,
    FactorRange,
    HueRange,
    Ratio,
    Share,
    ShearRange,
    SigmaRange,
    Values,
    Zoom,
    ascending,
)
from gpupipe.config.stage import StageConfig


class ColorJitterConfig(StageConfig):
    """ColorJitter: the four adjustments in a random order, each by a factor drawn uniformly from its range."""

    example: ClassVar[str] = '{"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}'

    brightness: FactorRange = (1.0, 1.0)
    """Factor of RGB; a number b means [max(0, 1 - b), 1 + b]."""
    contrast: FactorRange = (1.0, 1.0)
    """Factor of the distance from the mean grey of the frame; a number as for ``brightness``."""
    saturation: FactorRange = (1.0, 1.0)
    """Factor of the distance from each pixel's own grey; a number as for ``brightness``."""
    hue: HueRange = (0.0, 0.0)
    """Turn of the hue in HSV, in whole turns from -0.5 to 0.5; a number h means [-h, h]."""
    p: Share = 1.0
    """Probability that the clip is changed at all."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name in ("brightness", "contrast", "saturation", "hue"):
            ascending(name, getattr(self, name))
        return self


class AffineConfig(StageConfig):
    """RandomAffine about the centre of the output. It is part of the one resampling: what a turn brings in from outside of the
    crop is picture as far as the frame reaches, and the transform's ``fill`` beyond."""

    example: ClassVar[str] = '{"degrees": 10, "translate": (0.1, 0.1), "scale": (0.9, 1.1)}'

    degrees: DegreeRange = (0.0, 0.0)
    """Range of the rotation, clockwise; a number d means [-d, d]."""
    translate: tuple[Share, Share] = (0.0, 0.0)
    """Largest shift along x and y, as shares of the output's width and height; shifts are whole pixels."""
    scale: tuple[Zoom, Zoom] = (1.0, 1.0)
    """Range of the zoom: 2 shows everything twice as large."""
    shear: ShearRange = (0.0, 0.0, 0.0, 0.0)
    """Ranges in degrees: (low, high) along x, or (low x, high x, low y, high y); a number s means [-s, s] along x."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        ascending("degrees", self.degrees)
        ascending("scale", self.scale)
        ascending("shear", self.shear[:2])
        ascending("shear", self.shear[2:])
        return self


class AutoAugmentConfig(StageConfig):
    """RandAugment (Cubuk et al., CVPRW 2020) and TrivialAugment Wide (Müller and Hutter, ICCV 2021), with torchvision's tables
    of operations and magnitudes. One draw serves the whole clip. Moves are part of the one resampling, so they come before
    the changes of colour, whatever the order in which they were drawn."""

    example: ClassVar[str] = '{"policy": "randaugment", "num_ops": 2, "magnitude": 9}'

    policy: Literal["randaugment", "trivialaugment"] = "randaugment"
    """How operations and their strength are drawn."""
    num_ops: Annotated[int, Field(ge=0, le=16)] = 2
    """Operations on a clip, for ``randaugment``; ``trivialaugment`` always takes one."""
    magnitude: Annotated[int, Field(ge=0)] = 9
    """Strength, 0 to ``num_magnitude_bins`` - 1, for ``randaugment``; ``trivialaugment`` draws it."""
    num_magnitude_bins: Annotated[int, Field(ge=2, le=1000)] = 31
    """Strengths that there are, from none to the table's greatest."""

    @model_validator(mode="after")
    def _magnitude_is_a_bin(self) -> Self:
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(f"magnitude={self.magnitude} is not below num_magnitude_bins={self.num_magnitude_bins}")
        return self


class BlurConfig(StageConfig):
    """GaussianBlur of the output, before the normalisation."""

    example: ClassVar[str] = '{"kernel_size": 23, "sigma": (0.1, 2.0), "p": 0.5}'

    kernel_size: Annotated[int, Field(ge=1, le=511)] = 23
    """Taps along each axis; odd."""
    sigma: SigmaRange = (0.1, 2.0)
    """Range of the standard deviation in output pixels; one number fixes it."""
    p: Share = 1.0
    """Probability."""

    @model_validator(mode="after")
    def _odd_and_ascending(self) -> Self:
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} is even")
        ascending("sigma", self.sigma)
        return self


class ErasingConfig(StageConfig):
    """RandomErasing (Zhong et al., AAAI 2020): one box, the same in every frame of the clip, after the normalisation."""

    example: ClassVar[str] = '{"p": 0.25}'

    p: Share = 0.25
    """Probability."""
    scale: tuple[Share, Share] = (0.02, 0.33)
    """Range of the box's area as a share of the output's."""
    ratio: tuple[Ratio, Ratio] = (0.3, 3.3)
    """Range of the box's aspect ratio, height / width as in torchvision."""
    value: Values | Literal["random"] = (0.0, 0.0, 0.0)
    """What the box is filled with, in the clip's own values: 0 is the mean colour of a normalised clip; ``random``: standard
    normal noise, a value for each pixel and channel, the same in every frame, which dtype ``uint8`` has no place for."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        ascending("scale", self.scale)
        ascending("ratio", self.ratio)
        return self


class MixConfig(StageConfig):
    """MixUp, CutMix and label smoothing on the finished batch: ``batch["label"]`` becomes (B, ``num_classes``) float32.

    Each clip is mixed with the one before it in the batch, as in torchvision. With both alphas given, each batch takes one of
    the two, by a fair draw."""

    example: ClassVar[str] = '{"num_classes": 400, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}'

    num_classes: Annotated[int, Field(ge=2, le=10**7)]
    """Classes; labels are whole numbers from 0 to ``num_classes`` - 1."""
    mixup: Alpha = 0.0
    """Alpha of MixUp (Zhang et al., ICLR 2018): shares are drawn from Beta(alpha, alpha). 0: no MixUp."""
    cutmix: Alpha = 0.0
    """Alpha of CutMix (Yun et al., ICCV 2019). 0: no CutMix."""
    p: Share = 1.0
    """Probability that a batch is mixed."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label spread evenly over all classes (Szegedy et al., CVPR 2016)."""
