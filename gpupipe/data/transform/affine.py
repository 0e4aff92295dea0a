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
from gpupipe.data.transform.geometry import Filter, filter_of
from gpupipe.data.transform.params import Box, Matrix, Size


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

    Returns:
        The output (..., height, width), and its cover (height, width): the part of the weights that lay inside.
    """
    height, width = image.shape[-2:]
    rows, columns = size
    places = matrix[:2] @ np.stack([np.tile(np.arange(columns) + 0.5, rows), np.repeat(np.arange(rows) + 0.5, columns),
                                    np.ones(rows * columns)])  # fmt: skip
    spans = supports(matrix, antialias=antialias)
    (across, across_weight), (down, down_weight) = (
        _taps(at, span, extent, filter, antialias=antialias).to(image)
        for at, span, extent in zip(places, spans, (width, height), strict=True)
    )
    flat = image.flatten(-2)
    out = image.new_zeros((*image.shape[:-2], rows * columns))
    for index, weight in zip(down, down_weight, strict=True):
        for column, share in zip(across, across_weight, strict=True):
            out += flat[..., index * width + column] * (weight * share)
    cover = across_weight.sum(0) * down_weight.sum(0)
    return out.view(*image.shape[:-2], rows, columns), cover.view(rows, columns)


@dataclass(frozen=True, slots=True)
class _Taps:
    """Samples along one axis and their weights, (taps, places) each."""

    index: NDArray[np.int64]
    weight: NDArray[np.float64]

    def to(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As tensors beside an image, weights of its dtype."""
        return torch.from_numpy(self.index).to(image.device), torch.from_numpy(self.weight).to(image)


def _taps(at: NDArray[np.float64], support: float, extent: int, filter: Filter, *, antialias: bool) -> _Taps:
    """What is read along an axis of ``extent`` samples at these places. What lies outside weighs nothing."""
    if filter == "nearest":
        index, weight = np.floor(at)[None].astype(np.int64), np.ones((1, at.size))
    else:
        kernel, radius = filter_of(filter, antialias=antialias)
        first = np.floor(at - radius * support + 0.5).astype(np.int64)
        index = first + np.arange(math.ceil(2 * radius * support) + 1)[:, None]
        weight = kernel((index + 0.5 - at) / support)
        weight /= weight.sum(axis=0)
    weight[(index < 0) | (index >= extent)] = 0
    return _Taps(np.clip(index, 0, extent - 1), weight)
