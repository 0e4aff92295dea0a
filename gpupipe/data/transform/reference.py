"""The transform in plain torch: what the kernel must equal, and what the CPU device runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.transform import unscaled
from gpupipe.data.transform.geometry import Axis, Geometry
from gpupipe.types import Planes

_CHUNK_BYTES = 32 << 20
"""Size of the half-resized intermediate up to which frames are worked on together."""


@dataclass(frozen=True, slots=True)
class Color:
    """What happens to a pixel: RGB = matrix · (y, u, v, 1), held within [0, 1], then RGB · gain + bias for each channel.

    Attributes:
        matrix: (3, 4), from sample codes to RGB in [0, 1].
        gain: (3,).
        bias: (3,).
        clamp: whether RGB is held within [0, 1].
    """

    matrix: NDArray[np.float64]
    gain: NDArray[np.float64]
    bias: NDArray[np.float64]
    clamp: bool = True


def transform(planes: Planes, geometry: Geometry, color: Color, frame_map: Sequence[int], out: torch.Tensor) -> None:
    """Writes frame ``frame_map[t]`` to ``out[t]`` for each t; a frame that comes up several times is computed once.

    Sums are in float32, or in float64 where ``out`` is; planes are resized before the colour matrix (both are linear), and
    clamping comes last.

    Args:
        planes: decoded frames on the CPU.
        geometry: sampling of the stored frame.
        color: from codes to output values; ``out`` of dtype uint8 gets them rounded to nearest, ties to even.
        frame_map: T positions into ``planes``, in any order.
        out: (T, 3, H, W) of any strides, float64, float32, float16, bfloat16 or uint8.
    """
    wanted: dict[int, list[int]] = {}
    for target, source in enumerate(frame_map):
        wanted.setdefault(source, []).append(target)
    sources = sorted(wanted)
    if unscaled.serves(geometry):
        with torch.no_grad():
            for source in sources:
                targets = [out[target] for target in wanted[source]]
                unscaled.transform(planes, source, geometry, color.matrix, color.gain, color.bias, targets, clamp=color.clamp)
        return
    height, width = geometry.rows.outputs, geometry.columns.outputs
    together = max(1, _CHUNK_BYTES // (4 * height * planes.format.width))
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    matrix = torch.from_numpy(color.matrix[:, :3].copy()).to(dtype)
    offset, gain, bias = (
        torch.from_numpy(c.copy()).to(dtype).view(3, 1, 1, 1) for c in (color.matrix[:, 3], color.gain, color.bias)
    )
    # Autocast would run the products below in half precision.
    with torch.no_grad(), torch.autocast(device_type="cpu", enabled=False):
        for begin in range(0, len(sources), together):
            chunk = sources[begin : begin + together]
            yuv = _scratch(3, len(chunk), height, width, dtype=dtype)
            for k, plane in enumerate((planes.y, planes.u, planes.v)):
                _resize(_pick(plane, chunk), geometry, yuv[k], chroma=k > 0)
            rgb = (matrix @ yuv.view(3, -1)).view_as(yuv)
            rgb.add_(offset)
            if color.clamp:
                rgb.clamp_(0, 1)
            rgb.mul_(gain).add_(bias)
            if out.dtype == torch.uint8:
                rgb.round_()
            clip = _orient(rgb, geometry)
            for k, source in enumerate(chunk):
                for target in wanted[source]:
                    out[target].copy_(clip[:, k])


def _scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised; of this type on the CPU, whatever torch's defaults are while a model is being made."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _pick(plane: torch.Tensor, frames: list[int]) -> torch.Tensor:
    """``plane[frames]``, as a view where the frames follow one another."""
    first, count = frames[0], len(frames)
    return plane[first : first + count] if frames[-1] - first == count - 1 else torch.stack([plane[f] for f in frames])


def _orient(clip: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """From stored axes to display axes, flips included."""
    flipped = [axis for axis, sampling in ((-2, geometry.rows), (-1, geometry.columns)) if sampling.mirror]
    clip = clip.flip(flipped) if flipped else clip
    return clip.transpose(-1, -2) if geometry.transposed else clip


def _blocks(axis: Axis) -> list[tuple[int, int]]:
    """Runs of outputs that share one dense matrix of weights: long enough for a fast product, short enough that its window,
    which grows with the scale, does not hold mostly zeros."""
    length = max(16, min(64, int(64 / axis.scale)))
    return [(begin, min(begin + length, axis.outputs)) for begin in range(0, axis.outputs, length)]


def _resize(plane: torch.Tensor, geometry: Geometry, out: torch.Tensor, *, chroma: bool) -> None:
    """Resizes (n, H, W) sample codes to ``out`` (n, h, w) contiguous, along stored axes: rows first, then columns."""
    columns = geometry.columns
    if columns.copies(chroma=chroma):
        first = int(columns.start)
        _resize_rows(plane[:, :, first : first + columns.outputs], geometry.rows, out, chroma=chroma)
        return
    left, right = columns.reach(chroma=chroma)
    half = _scratch(len(plane), geometry.rows.outputs, right - left, dtype=out.dtype)
    _resize_rows(plane[:, :, left:right], geometry.rows, half, chroma=chroma)
    source, target = half.view(-1, right - left), out.view(-1, columns.outputs)
    for begin, end in _blocks(columns):
        origin, weights = columns.band(begin, end, chroma=chroma)
        window = source[:, origin - left : origin - left + weights.shape[1]]
        target[:, begin:end] = window @ torch.from_numpy(weights).to(out.dtype).t()


def _resize_rows(plane: torch.Tensor, rows: Axis, out: torch.Tensor, *, chroma: bool) -> None:
    if rows.copies(chroma=chroma):
        first = int(rows.start)
        out.copy_(plane[:, first : first + rows.outputs])
        return
    for begin, end in _blocks(rows):
        origin, weights = rows.band(begin, end, chroma=chroma)
        window = plane[:, origin : origin + weights.shape[1]].to(out.dtype)
        out[:, begin:end] = torch.matmul(torch.from_numpy(weights).to(out.dtype), window)
