"""What is random about a clip's transform, drawn before any pixel is touched, so that a clip can be made again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gpupipe.config import TransformConfig

Size = tuple[int, int]

_TRIES = 10
"""Attempts of RandomResizedCrop before it takes the central crop, as in torchvision."""


@dataclass(frozen=True, slots=True)
class TransformParams:
    """One box of the displayed frame, stretched over the output, for every frame of the clip.

    Attributes:
        crop: (top, left, height, width) of the box in display pixels (after rotation); pixel k covers k to k + 1.
        bounds: (top, left, height, width), whole display pixels: what the resize filter may read. The box itself for a crop
            that is cut out first and then resized; the whole frame for a frame that is resized first and then cut.
        hflip: whether the output is mirrored left to right.
    """

    crop: tuple[float, float, float, float]
    bounds: tuple[int, int, int, int]
    hflip: bool = False


def whole(display_size: Size, *, hflip: bool = False) -> TransformParams:
    """The whole frame of ``display_size`` (height, width)."""
    height, width = display_size
    return TransformParams((0.0, 0.0, float(height), float(width)), (0, 0, height, width), hflip)


def draw(config: TransformConfig, display_size: Size, rng: np.random.Generator) -> TransformParams:
    """Draws the box and the flip for a video of ``display_size`` (height, width) in display pixels.

    Generators in the same state give equal parameters.
    """
    hflip = bool(rng.random() < config.hflip)
    if config.crop == "none":
        return whole(display_size, hflip=hflip)
    if config.crop == "random-resized":
        top, left, height, width = _random_resized(config, display_size, rng)
        return TransformParams((float(top), float(left), float(height), float(width)), (top, left, height, width), hflip)
    return TransformParams(_window(config, display_size, rng), (0, 0, *display_size), hflip)


def _random_resized(config: TransformConfig, display_size: Size, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """RandomResizedCrop as torchvision defines it (Szegedy et al., Going Deeper with Convolutions, CVPR 2015).

    Area uniform in ``scale``, aspect ratio log-uniform in ``ratio``, sides rounded to pixels, place uniform; when ten boxes in
    a row do not fit, the largest central box whose ratio lies in range.
    """
    height, width = display_size
    narrowest, widest = config.ratio
    for _ in range(_TRIES):
        area = height * width * rng.uniform(*config.scale)
        ratio = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    ratio = min(max(width / height, narrowest), widest)
    h = min(height, max(1, round(width / ratio)))
    w = min(width, max(1, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def _window(config: TransformConfig, display_size: Size, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Where a window of ``size``, cut from the scaled frame, lies in the unscaled one.

    The scaled frame has whole pixels, its long side rounded down as torchvision's ``Resize`` does; so the two axes' scales
    differ a little. It is never smaller than the window: a ``short_side`` too small for this frame's shape is raised.
    """
    wanted = (config.short_side or 0) / min(display_size)
    factor = max(wanted, config.size[0] / display_size[0], config.size[1] / display_size[1])
    offsets, lengths = [], []
    for window, source in zip(config.size, display_size, strict=True):
        scaled = max(window, int(source * factor + 1e-6))
        room = scaled - window
        offset = round(room / 2) if config.crop == "center" else int(rng.integers(room + 1))
        offsets.append(offset * source / scaled)
        lengths.append(window * source / scaled)
    return offsets[0], offsets[1], lengths[0], lengths[1]
