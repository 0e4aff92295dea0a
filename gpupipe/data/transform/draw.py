"""Draws the parameters of a clip before any pixel is touched, as torchvision's transforms of the same names draw theirs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from gpupipe.config import ColorJitterConfig, ErasingConfig, TransformConfig
from gpupipe.data.transform import affine
from gpupipe.data.transform.auto_augment import auto_augment
from gpupipe.data.transform.params import Box, ColorName, ColorOp, Matrix, Size, TransformParams, whole

_TRIES = 10
"""Attempts of RandomResizedCrop and RandomErasing before they give up, as in torchvision."""


def draw(config: TransformConfig, display_size: Size, rng: np.random.Generator, *, view: int = 0) -> TransformParams:
    """Draws everything for one frame or one clip of a video of ``display_size`` (height, width) in display pixels.

    Generators in the same state give equal parameters. ``view`` says which of the three windows of ``crop="three"``.
    """
    params = replace(_box(config, display_size, rng, view), vflip=bool(config.vflip) and bool(rng.random() < config.vflip))
    moves: list[Matrix] = []
    color: list[ColorOp] = []
    if config.affine is not None:
        moves.append(affine.draw(config.affine, config.size, rng))
    if config.auto_augment is not None:
        more, color = auto_augment(config.auto_augment, config.size, rng)
        moves += more
    if config.color_jitter is not None and rng.random() < config.color_jitter.p:
        color += _jitter(config.color_jitter, rng)
    if config.grayscale and rng.random() < config.grayscale:
        color.append(ColorOp("grayscale"))
    if config.channel_drop and rng.random() < config.channel_drop:
        color.append(ColorOp("channel_drop", float(rng.integers(3))))
    blur = 0.0
    if config.blur is not None and rng.random() < config.blur.p:
        blur = float(rng.uniform(*config.blur.sigma))
    erase, noise = None, 0
    if config.erasing is not None and rng.random() < config.erasing.p:
        erase = _erasing(config.erasing, config.size, rng)
        noise = int(rng.integers(2**53)) if config.erasing.value == "random" else 0
    return replace(
        params, affine=affine.chain(moves), color=tuple(color), blur=blur, erase=erase, noise=noise, frame=display_size
    )


def draw_clip(
    config: TransformConfig, display_size: Size, rng: np.random.Generator, frames: int, *, view: int = 0
) -> TransformParams:
    """Draws for a clip of ``frames`` frames: once, or with ``draws="frame"`` for each of them."""
    if config.draws == "clip":
        return draw(config, display_size, rng, view=view)
    each = tuple(draw(config, display_size, rng) for _ in range(frames))
    return replace(each[0], frames=each)


def _box(config: TransformConfig, display_size: Size, rng: np.random.Generator, view: int) -> TransformParams:
    hflip = bool(rng.random() < config.hflip)
    if config.crop == "none":
        return whole(display_size, hflip=hflip)
    if config.crop in ("random-resized", "multi-scale"):
        cut = _random_resized if config.crop == "random-resized" else _multi_scale
        top, left, height, width = cut(config, display_size, rng)
        return TransformParams((float(top), float(left), float(height), float(width)), (top, left, height, width), hflip)
    return TransformParams(_window(config, display_size, rng, view), (0, 0, *display_size), hflip)


def _random_resized(config: TransformConfig, display_size: Size, rng: np.random.Generator) -> Box:
    """RandomResizedCrop as torchvision defines it (Szegedy et al., Going Deeper with Convolutions, CVPR 2015).

    Area uniform in ``scale``, aspect ratio log-uniform in ``ratio``, sides rounded to pixels, place uniform; when ten boxes in
    a row do not fit, the largest central box whose ratio lies in range.
    """
    height, width = display_size
    narrowest, widest = config.ratio
    for _ in range(_TRIES):
        w, h = _sides(display_size, config.scale, config.ratio, rng)
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    ratio = min(max(width / height, narrowest), widest)
    h = min(height, max(1, round(width / ratio)))
    w = min(width, max(1, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def _sides(size: Size, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator) -> tuple[int, int]:
    """Sides of a box in whole pixels: its area uniform in shares ``scale`` of ``size``, one side by the other log-uniform."""
    area = size[0] * size[1] * rng.uniform(*scale)
    drawn = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return round(math.sqrt(area * drawn)), round(math.sqrt(area / drawn))


def _multi_scale(config: TransformConfig, display_size: Size, rng: np.random.Generator) -> Box:
    """MultiScaleCrop of Temporal Segment Networks (Wang et al., ECCV 2016): height and width are shares of the shorter side, at
    most one step of the list apart; the place is one of thirteen on a grid of quarters of the room."""
    sides = [max(1, int(min(display_size) * share)) for share in config.multi_scale]
    pairs = [(a, b) for (i, a), (j, b) in itertools.product(enumerate(sides), repeat=2) if abs(i - j) <= 1]
    h, w = pairs[rng.integers(len(pairs))]
    places = [(r, c) for r, c in itertools.product(range(5), repeat=2) if r % 2 == c % 2]
    r, c = places[rng.integers(len(places))]
    return r * ((display_size[0] - h) // 4), c * ((display_size[1] - w) // 4), h, w


def _window(
    config: TransformConfig, display_size: Size, rng: np.random.Generator, view: int
) -> tuple[float, float, float, float]:
    """Where a window of ``size``, cut from the scaled frame, lies in the unscaled one.

    The scaled frame has whole pixels, its long side rounded down as torchvision's ``Resize`` does; so the two axes' scales
    differ a little. It is never smaller than the window: a ``short_side`` too small for this frame's shape is raised.
    """
    short = config.short_side
    if isinstance(short, tuple):
        short = int(rng.integers(short[0], short[1] + 1))
    factor = max((short or 0) / min(display_size), config.size[0] / display_size[0], config.size[1] / display_size[1])
    offsets, lengths = [], []
    scaled_size = [max(w, int(n * factor + 1e-6)) for w, n in zip(config.size, display_size, strict=True)]
    rooms = [n - w for n, w in zip(scaled_size, config.size, strict=True)]
    for k in (0, 1):
        if config.crop == "random":
            offset = int(rng.integers(rooms[k] + 1))
        elif config.crop == "three" and rooms[k] == max(rooms) and (k == 1 or rooms[0] > rooms[1]):
            offset = (0, round(rooms[k] / 2), rooms[k])[view]
        else:
            offset = round(rooms[k] / 2)
        offsets.append(offset * display_size[k] / scaled_size[k])
        lengths.append(config.size[k] * display_size[k] / scaled_size[k])
    return offsets[0], offsets[1], lengths[0], lengths[1]


def _jitter(config: ColorJitterConfig, rng: np.random.Generator) -> list[ColorOp]:
    """Factors uniform in their ranges, the order a random permutation; what a range leaves as it is costs nothing later."""
    names: tuple[ColorName, ...] = ("brightness", "contrast", "saturation", "hue")
    drawn = {name: float(rng.uniform(*getattr(config, name))) for name in names}
    ordered = list(names)
    rng.shuffle(ordered)  # as permutation() would, which gives up the interpreter lock
    return [ColorOp(name, drawn[name]) for name in ordered if drawn[name] != (0.0 if name == "hue" else 1.0)]


def _erasing(config: ErasingConfig, size: Size, rng: np.random.Generator) -> Box | None:
    """A box of RandomErasing: area uniform, ratio (height / width) log-uniform, smaller than the output on both sides."""
    height, width = size
    for _ in range(_TRIES):
        h, w = _sides(size, config.scale, config.ratio, rng)
        if h < height and w < width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    return None
