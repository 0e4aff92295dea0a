"""Where each output pixel's samples lie and what they weigh: the one definition that the reference and the kernel share.

Along an axis of n outputs, a box from ``start`` of length n · ``scale`` (in samples; sample k covers k to k + 1) is resized by
a triangle: output i is centred at c = start + scale (i + 1/2), sample x weighs max(0, 1 - |x + 1/2 - c| / support), for x in
[low, high), and the weights are divided by their sum. ``support`` is max(1, scale) with antialias and 1 without. On a box of
whole samples with low and high at its ends this is ``torch.nn.functional.interpolate(mode="bilinear", align_corners=False)``
of the cut-out box. Bicubic has Keys's cubic (IEEE Trans. ASSP 29, 1981) in the triangle's place, twice as wide: with a = -1/2
and weights divided by their sum with antialias, with a = -3/4 and edge samples repeated without, as torch has it. Nearest takes
the sample that c lies in.

Subsampled chroma is first brought to luma's positions, linearly between its two neighbours, its edge samples repeated. Both
steps are linear, so a chroma sample's weight is the sum over luma positions of (resize weight · interpolation weight).

Rotation, flips and resizing act on each axis alone. So all work is done along the stored axes; turning the frame means
mirroring output indices and exchanging the axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpupipe.data.transform.params import TransformParams
from gpupipe.errors import GraphError
from gpupipe.types import PlaneFormat, VideoInfo

Filter = Literal["nearest", "bilinear", "bicubic"]
Weights = NDArray[np.float64]


def triangle(x: Weights) -> Weights:
    """1 at 0, 0 from 1 on."""
    shape: Weights = np.maximum(0.0, 1 - np.abs(x))
    return shape


def cubic(x: Weights, a: float) -> Weights:
    """Keys's cubic convolution, 0 from 2 on."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    shape: Weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return shape


def filter_of(name: Filter, *, antialias: bool) -> tuple[Callable[[Weights], Weights], int]:
    """A filter as a function of the distance in supports, and the distance from which on it is 0."""
    if name == "bicubic":
        return (lambda x: cubic(x, -0.5 if antialias else -0.75)), 2
    return triangle, 1


class Axis(NamedTuple):
    """One stored axis of the frame; positions in luma samples unless they say chroma."""

    start: float
    scale: float
    support: float
    low: int
    high: int
    outputs: int
    mirror: bool
    """Output pixel o is computed as index outputs - 1 - o."""
    chroma_size: int
    chroma_step: float
    """Chroma samples a luma sample: 1, 1/2 or 1/4."""
    chroma_offset: float
    """Luma position of chroma sample 0."""
    filter: Filter = "bilinear"
    antialias: bool = True

    def band(self, begin: int, end: int, *, chroma: bool) -> tuple[int, Weights]:
        """Weights of indices begin … end - 1 as (first sample, (end - begin, samples) matrix)."""
        index: NDArray[np.int64] = np.arange(begin, end)
        sample, weight = self._taps(np.float64(self.start) + self.scale * (index + 0.5))
        if chroma:
            place = np.clip((sample - self.chroma_offset) * self.chroma_step, 0, self.chroma_size - 1)
            below = place.astype(np.int64)
            share = place - below
            sample = np.concatenate([below, np.minimum(below + 1, self.chroma_size - 1)], axis=1)
            weight = np.concatenate([weight * (1 - share), weight * share], axis=1)
        origin = int(sample.min())
        width = int(sample.max()) - origin + 1
        cell = (index - begin)[:, None] * width + (sample - origin)
        flat = np.bincount(cell.ravel(), weights=weight.ravel(), minlength=len(index) * width)
        return origin, flat.astype(np.float64).reshape(len(index), width)

    def _taps(self, centre: Weights) -> tuple[NDArray[np.int64], Weights]:
        """Luma samples that outputs with these centres read, (outputs, taps), and their weights."""
        if self.filter == "nearest":
            sample = np.clip(np.floor(centre).astype(np.int64), self.low, self.high - 1)[:, None]
            return sample, np.ones(sample.shape)
        kernel, radius = filter_of(self.filter, antialias=self.antialias)
        reach = radius * self.support
        first, last = (np.floor(centre + side + 0.5).astype(np.int64) for side in (-reach, reach))
        repeats = self.filter == "bicubic" and not self.antialias
        if not repeats:
            first, last = np.maximum(self.low, first), np.minimum(self.high, last)
        sample = first[:, None] + np.arange(int((last - first).max()))
        weight = kernel((sample + 0.5 - centre[:, None]) / self.support)
        weight[sample >= last[:, None]] = 0
        weight /= weight.sum(axis=1, keepdims=True)
        return np.clip(sample, self.low, np.minimum(last[:, None], self.high) - 1), weight

    def reach(self, *, chroma: bool) -> tuple[int, int]:
        """(first, last + 1) of all samples that the outputs read."""
        first, _ = self.band(0, 1, chroma=chroma)
        origin, weights = self.band(self.outputs - 1, self.outputs, chroma=chroma)
        return first, origin + weights.shape[1]

    def copies(self, *, chroma: bool) -> bool:
        """Whether output k simply is sample start + k."""
        return self.scale == 1 and self.start == int(self.start) and not (chroma and self.chroma_step != 1)


class Geometry(NamedTuple):
    """A clip's sampling along the stored rows and columns.

    Attributes:
        rows: sampling of the stored rows (the vertical axis of the decoded frame).
        columns: sampling of the stored columns.
        transposed: output rows run along stored columns (rotation by 90 or 270 degrees).
    """

    rows: Axis
    columns: Axis
    transposed: bool


def _subsampling(size: int, chroma_size: int) -> int:
    for factor in (1, 2, 4):
        if -(-size // factor) == chroma_size:
            return factor
    raise GraphError(f"{chroma_size} chroma samples for {size} luma samples: the transform knows ratios of 1, 2 and 4")


def geometry(
    info: VideoInfo,
    planes: PlaneFormat,
    params: TransformParams,
    size: tuple[int, int],
    *,
    antialias: bool = True,
    filter: Filter = "bilinear",
) -> Geometry:
    """Sampling of the stored frame for an output of ``size`` (height, width).

    Raises:
        GraphError: for a box outside the frame, planes of another size than ``info``'s, or an unknown chroma subsampling.
    """
    if (planes.height, planes.width) != (info.height, info.width):
        raise GraphError(f"planes of {planes.width}x{planes.height} for a video of {info.width}x{info.height}", path=info.path)
    crop, bounds, flips = params.crop, params.bounds, (params.vflip, params.hflip)
    axes = []
    for k, side in enumerate(
        _sides(planes.width, planes.height, planes.chroma_width, planes.chroma_height, info.rotation, info.chroma_location)
    ):
        extent, against, chroma_size, chroma_step, chroma_offset = side
        start, length, low, span = crop[k], crop[k + 2], bounds[k], bounds[k + 2]
        slack = 1e-6 * extent  # a window's ends are quotients, so they may miss the frame's edge by a rounding error
        inside = low - slack <= start and start + length <= low + span + slack
        if not (0 <= low < low + span <= extent and length > 0 and inside):
            raise GraphError(
                f"crop {crop} within {bounds} does not fit a displayed frame of {info.display_size}", path=info.path
            )
        if against:
            start, low = extent - start - length, extent - low - span
        scale = length / size[k]
        support = scale if antialias and scale > 1 else 1.0
        axes.append(
            Axis(
                start, scale, support, low, low + span, size[k], against != flips[k], chroma_size, chroma_step, chroma_offset,
                filter, antialias,
            )
        )  # fmt: skip
    return Geometry(axes[1], axes[0], True) if info.rotation in (90, 270) else Geometry(axes[0], axes[1], False)


@functools.lru_cache(maxsize=256)
def _sides(
    width: int, height: int, chroma_width: int, chroma_height: int, rotation: int, chroma_location: str
) -> tuple[tuple[int, bool, int, float, float], ...]:
    """For display rows and display columns: samples, whether they run against their stored axis, chroma samples, chroma samples
    a luma sample, and the luma position of chroma sample 0."""
    turned = rotation in (90, 270)
    against = {0: (False, False), 90: (False, True), 180: (True, True), 270: (True, False)}[rotation]
    sides = []
    for k in (0, 1):
        along_rows = (k == 0) != turned
        extent, chroma_size = (height, chroma_height) if along_rows else (width, chroma_width)
        factor = _subsampling(extent, chroma_size)
        cosited = chroma_location == "topleft" or (chroma_location == "left" and not along_rows)
        sides.append((extent, against[k], chroma_size, 1 / factor, 0.0 if cosited else (factor - 1) / 2))
    return tuple(sides)
