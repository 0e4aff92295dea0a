"""Decoded frames as RGB, sampled as a clip's parameters say: on CUDA by one launch, by the reference in torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.stop import Stop, never
from gpupipe.data.transform import affine, move, reference, resize
from gpupipe.data.transform.color import rgb_from_codes
from gpupipe.data.transform.finish import pack_steps
from gpupipe.data.transform.geometry import Filter, geometry
from gpupipe.data.transform.params import Size, TransformParams
from gpupipe.data.transform.reference import Color
from gpupipe.errors import GraphError
from gpupipe.types import Planes, VideoInfo

CHANNELS = 3
_CHUNK_BYTES = 64 << 20
"""Size of the RGB frames at their own size up to which they are moved together."""

Scale = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(gain, bias) of each channel: value = RGB * gain + bias."""


UNIT: Scale = (np.ones(CHANNELS), np.zeros(CHANNELS))
"""Leaves RGB as it is."""


def check_planes(planes: Planes, info: VideoInfo, device: torch.device) -> None:
    """Raises: GraphError: for planes of the wrong type, or that are not on the clip's device."""
    word = torch.uint8 if planes.format.bits == 8 else torch.uint16
    if planes.data.dtype != word:
        raise GraphError(f"{planes.format.bits}-bit planes must be {word}, not {planes.data.dtype}", path=info.path)
    if planes.data.device != device:
        raise GraphError(f"planes are on {planes.data.device}, the clip on {device}", path=info.path)


def store(rgb: torch.Tensor, scale: Scale, out: torch.Tensor) -> None:
    """Writes RGB in [0, 1] to ``out`` as values of its dtype, uint8 rounded to nearest and held within its range."""
    for channel, (gain, bias) in enumerate(zip(*(s.tolist() for s in scale), strict=True)):
        values = rgb[:, channel] * gain + bias
        out[:, channel].copy_(values.round_().clamp_(0, 255) if out.dtype == torch.uint8 else values)


Job = resize.Clip | move.Clip


def begin_on_cuda(
    planes: Planes,
    info: VideoInfo,
    params: TransformParams,
    out: torch.Tensor,
    size: Size,
    fill: Sequence[float],
    *,
    filter: Filter,
    antialias: bool,
    blend: Sequence[float] = (),
) -> tuple[Callable[..., Job], int] | None:
    """The kernel that samples a clip of ``size``: by the fused resize where it has the filter and the room, else by the one for
    any move.

    Returns:
        What makes its job out of the fields from ``color`` on, and the sums of greys that there are for a frame. None where two
        frames are to be blended and the fused resize, which cannot, is by far the faster for each of them.
    """
    if params.affine is None and filter == "bilinear" and resize.reaches(out.stride(), out.shape):
        sampling = geometry(info, planes.format, params, size, antialias=antialias)
        layout = resize.layout_of(sampling)
        if layout is not None and not blend:
            return partial(resize.Clip, planes, sampling, layout), layout.bands * layout.strips
        if layout is not None and max(sampling.rows.support, sampling.columns.support) > 1:
            return None
    moved = move.sampling_of(info, planes.format, params, size, filter=filter, antialias=antialias)
    return partial(move.Clip, planes, moved, tuple(fill), blend=blend), moved.tiles


def make_on_cuda(jobs: Sequence[Job], dtype: torch.dtype) -> None:
    """Makes them in as few launches as there is room for, on the current stream; ``dtype``: that of finished clips."""
    resize.make([job for job in jobs if isinstance(job, resize.Clip)], dtype)
    move.make([job for job in jobs if isinstance(job, move.Clip)], dtype)


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded frames, and how their samples are read."""

    planes: Planes
    info: VideoInfo
    untagged_matrix: str = "auto"
    untagged_range: str = "limited"
    filter: Filter = "bilinear"
    antialias: bool = True
    stop: Stop = never
    """Asked amid long work on the CPU."""

    def write(
        self,
        params: TransformParams,
        frame_map: Sequence[int],
        out: torch.Tensor,
        folded: NDArray[np.float64],
        fill: tuple[float, float, float],
        scale: Scale,
        *,
        clamp: bool = True,
    ) -> None:
        """Writes frames to ``out`` (T, 3, H, W) of any strides, sampled as ``params`` says: RGB times ``folded`` (3, 3), then
        scaled. Where a move shows what lies outside of the frame, ``fill`` stands in for RGB.

        Raises:
            Stopped: when ``stop()`` turned true.
        """
        planes, info = self.planes, self.info
        check_planes(planes, info, out.device)
        matrix = folded @ rgb_from_codes(
            info, planes.format, untagged_matrix=self.untagged_matrix, untagged_range=self.untagged_range
        )
        fill_folded = folded @ np.array(fill)
        size = (int(out.shape[2]), int(out.shape[3]))
        if out.is_cuda:
            way = begin_on_cuda(
                planes, info, params, out, size, fill_folded.tolist(), filter=self.filter, antialias=self.antialias
            )
            assert way is not None, "nothing is blended here"
            begin, _ = way
            numbers = tuple(np.concatenate([matrix.ravel(), *scale]).tolist())
            steps = pack_steps((), clamp=clamp)
            job = begin(numbers, steps, clamp, frame_map, resize.FINISHED, out.element_size(), out.data_ptr(), out.stride())
            make_on_cuda([job], out.dtype)
            return
        if params.affine is not None:
            self._two_steps(params, frame_map, out, matrix, fill_folded, scale, clamp=clamp)
            return
        sampling = geometry(info, planes.format, params, size, antialias=self.antialias, filter=self.filter)
        reference.transform(planes, sampling, Color(matrix, *scale, clamp), frame_map, out)

    def _two_steps(
        self,
        params: TransformParams,
        frame_map: Sequence[int],
        out: torch.Tensor,
        matrix: NDArray[np.float64],
        fill: NDArray[np.float64],
        scale: Scale,
        *,
        clamp: bool,
    ) -> None:
        """The reference of clips that are turned or sheared: RGB of the part of the frame in reach at its own size, then one
        sampling of that. Arguments as for :meth:`write`."""
        size: Size = (int(out.shape[2]), int(out.shape[3]))
        place = params.matrix(size)
        box = affine.reach(place, size, self.info.display_size, antialias=self.antialias)
        top, left, height, width = box
        place[:2, 2] -= left, top
        part = TransformParams((float(top), float(left), float(height), float(width)), box)
        dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
        together = max(1, _CHUNK_BYTES // (12 * height * width))
        for begin in range(0, len(frame_map), together):
            chunk = frame_map[begin : begin + together]
            rgb = torch.empty((len(chunk), CHANNELS, height, width), dtype=dtype, device=out.device)
            sampling = geometry(self.info, self.planes.format, part, (height, width))
            reference.transform(self.planes, sampling, Color(matrix, *UNIT, clamp=False), chunk, rgb)
            moved, cover = affine.sample(rgb, place, size, filter=self.filter, antialias=self.antialias, stop=self.stop)
            for channel, value in enumerate(fill.tolist()):
                moved[:, channel].add_(1 - cover, alpha=value)
            store(moved.clamp_(0, 1) if clamp else moved, scale, out[begin : begin + len(chunk)])
