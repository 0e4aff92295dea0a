"""Rotation, shift, zoom and shear of an output as matrices, and sampling a picture through any such matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.config import AffineConfig
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.data.transform.geometry import Filter, filter_of
from gpupipe.data.transform.params import Box, Matrix, Size

_WORK = 1 << 24
"""Products of a sample and a weight that are worked out together: a fraction of a second, after which a stop is heard."""
_TAP_COST = 16
"""What the place and the weight of a tap cost, in such products."""
_SMOOTH = 1 << 17
"""Support beyond which the sum of a filter's weights is taken to be the support: it is, but for a share of 1 / (3 support²)."""


def inverse(
    size: Size,
    *,
    angle: float = 0.0,
    translate: tuple[float, float] = (0.0, 0.0),
    scale: float = 1.0,
    shear: tuple[float, float] = (0.0, 0.0),
    corner: bool = False,
) -> Matrix:
    """Where in a picture of ``size`` a place comes from, after torchvision's ``affine`` with these arguments.

    The move is T C R(angle) S(scale) Shy Shx C^-1 with C the shift to the centre, or with ``corner`` to the top left corner;
    angles in degrees, clockwise; ``translate`` is (x, y) in pixels. This is its inverse.
    """
    turn, across, down = (math.radians(a) for a in (angle, *shear))
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    sheared = np.array([[1, 0], [-math.tan(down), 1]]) @ np.array([[1, -math.tan(across)], [0, 1]])
    linear = np.linalg.inv(scale * rotation @ sheared)
    centre = np.zeros(2) if corner else np.array([size[1] / 2, size[0] / 2])
    offset = centre - linear @ (centre + translate)
    return _rows(np.concatenate([linear, offset[:, None]], axis=1))


def chain(moves: Sequence[Matrix]) -> Matrix | None:
    """The one matrix of moves that are made one after the other; None for no move."""
    squares = [np.array([*move, 0, 0, 1]).reshape(3, 3) for move in moves]
    return _rows(reduce(np.matmul, squares)) if squares else None


def draw(config: AffineConfig, size: Size, rng: np.random.Generator) -> Matrix:
    """A move as torchvision's RandomAffine draws it."""
    shift = [round(rng.uniform(-share, share) * extent) for share, extent in zip(config.translate, size[::-1], strict=True)]
    return inverse(
        size,
        angle=rng.uniform(*config.degrees),
        translate=(shift[0], shift[1]),
        scale=rng.uniform(*config.scale),
        shear=(rng.uniform(*config.shear[:2]), rng.uniform(*config.shear[2:])),
    )


def _rows(matrix: NDArray[np.float64]) -> Matrix:
    a, b, c, d, e, f = (float(v) for v in matrix[:2].ravel())
    return a, b, c, d, e, f


def reach(matrix: NDArray[np.float64], size: Size, extent: Size, *, antialias: bool) -> Box:
    """The box of a picture of ``extent`` (height, width) that an output of ``size`` may touch; at least one pixel."""
    margins = [math.ceil(2 * support) + 1 for support in supports(matrix, antialias=antialias)]
    rows, columns = size
    corners = matrix[:2] @ np.array([[0, columns, 0, columns], [0, 0, rows, rows], [1, 1, 1, 1]])
    box = []
    for places, most, margin in zip(corners[::-1], extent, margins[::-1], strict=True):
        low = min(max(0, math.floor(places.min()) - margin), most - 1)
        box.append((low, max(low + 1, min(most, math.ceil(places.max()) + margin))))
    (top, bottom), (left, right) = box
    return top, left, bottom - top, right - left


def supports(matrix: NDArray[np.float64], *, antialias: bool) -> tuple[float, float]:
    """Source pixels that an output pixel spans along x and y: the lengths of the rows, which are the scales of an unturned
    resize and do not change with a rotation; at least 1, and 1 without antialias."""
    if not antialias:
        return 1.0, 1.0
    return max(1.0, float(np.hypot(*matrix[0, :2]))), max(1.0, float(np.hypot(*matrix[1, :2])))


def sample(
    image: torch.Tensor,
    matrix: NDArray[np.float64],
    size: Size,
    *,
    filter: Filter = "bilinear",
    antialias: bool = False,
    stop: Stop = never,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a picture at the places of a matrix; pixels outside of it count as 0.

    The output pixel whose centre maps to (x, y) is the sum over picture pixels (i, j) of
    f((i + 1/2 - x) / sx) f((j + 1/2 - y) / sy), divided by the sum of these weights over all places, those outside included.
    On matrices that only scale and shift this is the separable resize of ``geometry``; with supports of 1 it is bilinear (or
    bicubic, or nearest) sampling as torchvision's ``affine`` does it.

    Args:
        image: (..., H, W) floating point.
        matrix: (3, 3), the place in the picture from the place in the output.
        size: (height, width) of the output.
        filter: f; nearest takes the pixel that (x, y) lies in.
        antialias: whether sx and sy are :func:`supports`, or 1.
        stop: asked a few times a second.

    Returns:
        The output (..., height, width), and its cover (height, width): the part of the weights that lay inside.

    Raises:
        Stopped: when ``stop()`` turned true.
    """
    height, width = image.shape[-2:]
    rows, columns = size
    x, y = matrix[:2] @ np.stack([np.tile(np.arange(columns) + 0.5, rows), np.repeat(np.arange(rows) + 0.5, columns),
                                  np.ones(rows * columns)])  # fmt: skip
    across, down = (
        _Side(extent, span, filter, antialias)
        for extent, span in zip((width, height), supports(matrix, antialias=antialias), strict=True)
    )
    near = np.flatnonzero(across.touches(x) & down.touches(y))
    pixels = image.reshape(-1, height * width).t().contiguous()  # what a tap reads lies side by side
    channels = pixels.shape[1]
    number = torch.int32 if height * width < 1 << 31 else torch.int64  # of a pixel; the narrower one is read twice as fast
    taps = max(1, _WORK // (channels + _TAP_COST))
    together = max(1, taps // max(across.reads * down.reads, across.spread, down.spread))
    step = max(1, taps // across.reads)  # lines of one output that are summed together
    moved = pixels.new_zeros((rows * columns, channels))
    cover = pixels.new_zeros(rows * columns)
    for begin in range(0, len(near), together):
        place = near[begin : begin + together]
        (column, share), (line, weight) = (
            tuple(torch.from_numpy(part).to(image.device) for part in side.taps(at[place]))
            for side, at in ((across, x), (down, y))
        )
        column, line, share, weight = column.to(number), line.to(number), share.to(image), weight.to(image)
        made = moved.new_zeros((len(place), channels))
        for top in range(0, down.reads, step):
            if stop():
                raise Stopped
            index = line[:, top : top + step, None] * width + column[:, None]
            sums = torch.nn.functional.embedding_bag(
                index.flatten(0, 1), pixels, mode="sum", per_sample_weights=share[:, None].expand_as(index).flatten(0, 1)
            )
            # Not by a product of matrices, which on CUDA may be in TF32 and under autocast in 16 bits.
            made += (sums.view(*index.shape[:2], channels) * weight[:, top : top + step, None]).sum(1)
        where = torch.from_numpy(place).to(image.device)
        moved[where] = made
        cover[where] = share.sum(1) * weight.sum(1)
    return moved.t().reshape(*image.shape[:-2], rows, columns), cover.view(rows, columns)


@dataclass(frozen=True, slots=True)
class _Side:
    """One axis of a picture of ``extent`` samples, and the filter along it."""

    extent: int
    support: float
    filter: Filter
    antialias: bool

    @property
    def spread(self) -> int:
        """Samples that the filter spans, those outside of the picture included."""
        if self.filter == "nearest":
            return 1
        _, radius = filter_of(self.filter, antialias=self.antialias)
        return math.ceil(2 * radius * self.support) + 1

    @property
    def reads(self) -> int:
        """Samples of the picture that an output reads."""
        return min(self.spread, self.extent)

    def _first(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """The first sample of the filter at these places."""
        if self.filter == "nearest":
            return np.floor(at)
        _, radius = filter_of(self.filter, antialias=self.antialias)
        return np.floor(at - radius * self.support + 0.5)

    def touches(self, at: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether the filter at these places reaches into the picture."""
        first = self._first(at)
        return (first < self.extent) & (first + self.spread > 0)

    def taps(self, at: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The samples that outputs at these places read, and their weights: (places, :attr:`reads`) each."""
        first = self._first(at).astype(np.int64)[:, None]
        index = np.clip(first, 0, self.extent - self.reads) + np.arange(self.reads)
        if self.filter == "nearest":
            return index, np.ones(index.shape)
        kernel, _ = filter_of(self.filter, antialias=self.antialias)

        def weights(index: NDArray[np.int64]) -> NDArray[np.float64]:
            return kernel((index + 0.5 - at[:, None]) / self.support)

        if self.support > _SMOOTH:
            return index, weights(index) / self.support
        return index, weights(index) / weights(first + np.arange(self.spread)).sum(axis=1, keepdims=True)
