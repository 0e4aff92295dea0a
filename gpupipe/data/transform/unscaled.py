"""The reference's short way for frames at their own size: chroma brought to luma's places by fixed small filters, then colour.

The general resize takes a product with a matrix of weights for each axis, most of them 0 here, and the colours of all frames in
one further product: many times what decoding costs. Work goes by bands of rows that stay in a core's cache, and that torch does
not share out to threads which would wait for cores on which others decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.transform.geometry import Axis, Geometry
from gpupipe.types import Planes

_BAND = 32000
"""Samples of a band; torch shares out what has 32768 or more."""

_TO_WHOLE = 1.5 * 2.0**23
"""Added to a float32 and taken off again it leaves the nearest whole number, ties to even; torch's own ``round_`` shares out
pieces of any size."""


def serves(geometry: Geometry) -> bool:
    """Whether every output pixel is one luma sample."""
    return all(axis.scale == 1 and axis.start == int(axis.start) for axis in (geometry.rows, geometry.columns))


def transform(
    planes: Planes,
    frame: int,
    geometry: Geometry,
    matrix: NDArray[np.float64],
    gain: NDArray[np.float64],
    bias: NDArray[np.float64],
    targets: Sequence[torch.Tensor],
    *,
    clamp: bool,
) -> None:
    """Writes one frame to each of ``targets``.

    Values are those of :class:`gpupipe.data.transform.reference.Color` but for rounding: gain and bias are folded into the
    matrix, and the clamp comes behind them.

    Args:
        planes: decoded frames on the CPU.
        frame: position among them.
        geometry: a sampling that this room :func:`serves`.
        matrix, gain, bias, clamp: as in ``Color``; gains are positive.
        targets: (3, H, W) of any strides, of one dtype.
    """
    rows, columns = geometry.rows, geometry.columns
    dtype = torch.float64 if targets[0].dtype == torch.float64 else torch.float32
    top, left = int(rows.start), int(columns.start)
    luma, chroma = planes.y[frame], (planes.u[frame], planes.v[frame])
    scaled = matrix * gain[:, None]
    offset, low, high = (values.tolist() for values in (scaled[:, 3] + bias, bias, gain + bias))
    stored = [target.transpose(-1, -2) if geometry.transposed else target for target in targets]
    flipped = [dim for dim, axis in ((-2, rows), (-1, columns)) if axis.mirror]
    band = max(1, _BAND // columns.outputs)
    out = torch.empty((band, columns.outputs), dtype=dtype, device="cpu")
    for begin in range(0, rows.outputs, band):
        end = min(begin + band, rows.outputs)
        parts = [luma[top + begin : top + end, left : left + columns.outputs].to(dtype)]
        parts += [_at_luma(_at_luma(c, rows, 0, begin, end, dtype), columns, 1, 0, columns.outputs, dtype) for c in chroma]
        values = out[: end - begin]
        first, last = (rows.outputs - end, rows.outputs - begin) if rows.mirror else (begin, end)
        for channel in range(3):
            weighted = [(part, weight) for part, weight in zip(parts, scaled[channel, :3].tolist(), strict=True) if weight]
            (part, weight), *others = weighted or [(parts[0], 0.0)]
            torch.mul(part, weight, out=values)
            for part, weight in others:
                values.add_(part, alpha=weight)
            values.add_(offset[channel])
            if clamp:
                values.clamp_(low[channel], high[channel])
            if targets[0].dtype == torch.uint8:
                values.add_(_TO_WHOLE).sub_(_TO_WHOLE)
            shown = values.flip(flipped) if flipped else values
            for target in stored:
                target[channel, first:last].copy_(shown)


def _at_luma(plane: torch.Tensor, axis: Axis, dim: int, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Chroma at the places of outputs ``begin`` to ``end`` along an axis: linear between neighbours, edge samples repeated."""
    start, count = int(axis.start) + begin, end - begin
    if axis.chroma_step == 1:
        return plane.narrow(dim, start, count).to(dtype)
    factor = round(1 / axis.chroma_step)
    phases = []
    for phase in range(min(factor, count)):
        place = (start + phase - axis.chroma_offset) * axis.chroma_step
        phases.append((phase, math.floor(place), place - math.floor(place), -(-(count - phase) // factor)))
    low, high = min(first for _, first, _, _ in phases), max(first + many for _, first, _, many in phases)
    inside = max(0, low), min(axis.chroma_size - 1, high)
    samples = plane.narrow(dim, inside[0], inside[1] - inside[0] + 1).to(dtype)
    if inside != (low, high):
        edges = samples.narrow(dim, 0, 1), samples.narrow(dim, samples.shape[dim] - 1, 1)
        samples = torch.cat([*[edges[0]] * (inside[0] - low), samples, *[edges[1]] * (high - inside[1])], dim)
    shape = list(samples.shape)
    shape[dim] = count
    out = torch.empty(shape, dtype=dtype, device="cpu")
    for phase, first, share, many in phases:
        target = out[phase::factor] if dim == 0 else out[:, phase::factor]
        here = samples.narrow(dim, first - low, many)
        if share:
            torch.lerp(here, samples.narrow(dim, first - low + 1, many), share, out=target)
        else:
            target.copy_(here)
    return out
