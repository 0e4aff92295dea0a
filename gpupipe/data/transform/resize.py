"""Clips whose sampling runs along the axes, on CUDA: packs what ``cuda_src/clip_resize.cu`` needs, several clips a launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpupipe.data.transform.geometry import Axis, Geometry
from gpupipe.data.transform.kernel import AXIS, CUDA_TYPES, pack_axis
from gpupipe.data.transform.reference import Color
from gpupipe.device.module import kernel, launch
from gpupipe.types import Planes

MAX_CLIPS = 8
MAX_FRAMES = 320
"""Clips and frames of one launch: as many as the argument, which is 4 KB at most, has room for."""
THREADS = 256
SHARED_BYTES = 64 * 1024
"""Dynamic shared memory of a block, at most: three blocks fit on one multiprocessor of any GPU since sm_80 but the smallest."""
_STRIPS = (256, 128, 64, 32, 16)
"""Output columns of a block, the most that fit."""
_ROWS = (8, 4, 2, 1)
"""Output rows of a block, the most that fit."""
_BLOCKS = 1024
"""Blocks that fill the largest GPU; beyond that a block makes several frames with the weights it has worked out."""
_TAPS_BYTES = 32
_FOUR = 4
"""Samples that a thread reads at once."""

JOB = np.dtype(
    [("planes", "u8"), ("out", "u8")]
    + [(name, "i8") for name in ("stride_time", "stride_channel", "stride_row", "stride_column", "frame_samples")]
    + [("rows", AXIS), ("columns", AXIS), ("matrix", "f4", (3, 4)), ("gain", "f4", (3,)), ("bias", "f4", (3,))]
    + [(name, "i4") for name in ("pitch", "u_row", "v_row", "interleaved", "clamp", "first_frame", "frames")],
    align=True,
)
BATCH = np.dtype(
    [("clips", JOB, (MAX_CLIPS,)), ("first_group", "i4", (MAX_CLIPS + 1,)), ("frames_a_block", "i4")]
    + [(name, "i4") for name in ("rows_a_block", "columns_a_block", "span", "chroma_span")]
    + [(name, "i4") for name in ("row_taps", "row_chroma_taps", "column_chroma_taps")]
    + [("source", "i2", (MAX_FRAMES,)), ("target", "i2", (MAX_FRAMES,))],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Clip:
    """One clip to make: what :func:`gpupipe.data.transform.reference.transform` takes."""

    planes: Planes
    geometry: Geometry
    color: Color
    frame_map: Sequence[int]
    out: torch.Tensor
    """(T, 3, H, W) of any strides."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a launch's blocks are cut, and what a block keeps in shared memory; sizes in samples and taps."""

    rows: int
    columns: int
    span: int
    chroma_span: int
    row_taps: int
    row_chroma_taps: int
    column_chroma_taps: int

    @property
    def shared_bytes(self) -> int:
        sums = self.rows * (self.span + 2 * self.chroma_span)
        weights = self.rows * (self.row_taps + self.row_chroma_taps) + self.columns * self.column_chroma_taps
        return 4 * (sums + weights) + _TAPS_BYTES * (self.rows + self.columns)


def serves(geometry: Geometry) -> bool:
    """Whether to make a clip here: where it shrinks. Else an output reads few samples, which textures fetch as fast.

    Not where it shrinks so much that the lines of a few outputs do not fit into a block's memory.
    """
    filters = {geometry.rows.filter, geometry.columns.filter}
    return filters == {"bilinear"} and geometry.shrinks and _fits(_cut([geometry], _STRIPS[-1], _ROWS[-1]))


def transform(clips: Sequence[Clip]) -> None:
    """Makes clips in as few launches as there is room for, on the current stream; the same bits every time.

    Args:
        clips: of one dtype, with planes of one sample size, on one CUDA device, each with a geometry whose lines fit (see
            :func:`serves`).
    """
    for part in _launches(clips):
        first = part[0]
        function = compile_for(first.planes.format.sample_bytes, first.out.dtype)
        layout = _layout([clip.geometry for clip in part])
        assert layout is not None
        packed, grid = _pack(part, layout)
        launch(function, grid, (THREADS, 1, 1), [packed[()]], shared_bytes=layout.shared_bytes)


def compile_for(sample_bytes: int, dtype: torch.dtype) -> Any:
    """The kernel that turns samples of this size into this dtype: compiled now, unless it is in memory or in the disk cache.

    Raises:
        DeviceError: when it cannot be compiled here.
    """
    return kernel("clip_resize.cu", *_entry(sample_bytes, dtype))


@functools.cache
def _entry(sample_bytes: int, dtype: torch.dtype) -> tuple[str, tuple[str, ...]]:
    name = f"resize_u{8 * sample_bytes}_{str(dtype).removeprefix('torch.')}"
    word = "unsigned char" if sample_bytes == 1 else "unsigned short"
    return name, (f"-DCLIP_ENTRY={name}", f"-DCLIP_WORD={word}", f"-DCLIP_OUT={CUDA_TYPES[dtype]}")


def _launches(clips: Sequence[Clip]) -> Iterator[list[Clip]]:
    """Clips that share a launch; one with more frames than a launch has room for comes in parts."""
    part: list[Clip] = []
    frames = 0
    for clip in clips:
        for begin in range(0, len(clip.frame_map), MAX_FRAMES):
            some = list(clip.frame_map[begin : begin + MAX_FRAMES])
            piece = Clip(clip.planes, clip.geometry, clip.color, some, clip.out[begin : begin + MAX_FRAMES])
            if part and (len(part) == MAX_CLIPS or frames + len(some) > MAX_FRAMES or _layout_of([*part, piece]) is None):
                yield part
                part, frames = [], 0
            part.append(piece)
            frames += len(some)
    if part:
        yield part


def _layout_of(clips: Sequence[Clip]) -> _Layout | None:
    return _layout([clip.geometry for clip in clips])


def _layout(geometries: Sequence[Geometry]) -> _Layout | None:
    """The largest blocks whose tables fit; None where not even the smallest do."""
    cuts = (_cut(geometries, strip, height) for strip in _STRIPS for height in _ROWS)
    return next(filter(_fits, cuts), None)


def _fits(layout: _Layout) -> bool:
    return layout.shared_bytes <= SHARED_BYTES


def _cut(geometries: Sequence[Geometry], strip: int, height: int) -> _Layout:
    """Blocks of so many output columns, where there are so many, and rows."""
    rows, columns = [g.rows for g in geometries], [g.columns for g in geometries]
    strip = min(strip, max(axis.outputs for axis in columns))
    spans = [_span(axis, strip) for axis in columns]
    return _Layout(
        rows=height,
        columns=strip,
        span=max(luma for luma, _ in spans),
        chroma_span=max(chroma for _, chroma in spans),
        row_taps=max(axis.max_taps() for axis in rows),
        row_chroma_taps=max(axis.max_chroma_taps() for axis in rows),
        column_chroma_taps=max(axis.max_chroma_taps() for axis in columns),
    )


def _span(axis: Axis, outputs: int) -> tuple[int, int]:
    """(luma, chroma) samples that a strip of outputs reads at most, from a multiple of four to a multiple of four."""
    luma = min(axis.high - axis.low, int(axis.scale * (outputs - 1) + 2 * axis.support) + 2)
    chroma = min(axis.chroma_size, int((luma - 1) * axis.chroma_step) + 3)
    return _aligned(luma), _aligned(chroma)


def _aligned(samples: int) -> int:
    return (samples + 2 * (_FOUR - 1)) // _FOUR * _FOUR


def _pack(clips: Sequence[Clip], layout: _Layout) -> tuple[Any, tuple[int, int, int]]:
    """(the kernel's argument, the grid)."""
    packed = np.zeros((), BATCH)
    bands = -(-max(clip.geometry.rows.outputs for clip in clips) // layout.rows)
    strips = -(-max(clip.geometry.columns.outputs for clip in clips) // layout.columns)
    frames = sum(len(clip.frame_map) for clip in clips)
    a_block = max(1, min(8, bands * strips * frames // _BLOCKS))
    first = group = 0
    for number, clip in enumerate(clips):
        job, count = packed["clips"][number], len(clip.frame_map)
        _pack_job(job, clip)
        job["first_frame"], job["frames"] = first, count
        packed["source"][first : first + count] = clip.frame_map
        packed["target"][first : first + count] = range(count)
        packed["first_group"][number] = group
        first, group = first + count, group - (-count // a_block)
    packed["first_group"][len(clips) :] = group
    packed["frames_a_block"], packed["rows_a_block"], packed["columns_a_block"] = a_block, layout.rows, layout.columns
    for name in ("span", "chroma_span", "row_taps", "row_chroma_taps", "column_chroma_taps"):
        packed[name] = getattr(layout, name)
    return packed, (bands, strips, group)


def _pack_job(job: Any, clip: Clip) -> None:
    form, data, out, geometry = clip.planes.format, clip.planes.data, clip.out, clip.geometry
    assert data.stride(2) == 1, data.stride()
    job["planes"], job["out"] = data.data_ptr(), out.data_ptr()
    job["stride_time"], job["stride_channel"] = out.stride()[:2]
    along = out.stride()[:1:-1] if geometry.transposed else out.stride()[2:]
    job["stride_row"], job["stride_column"] = along
    job["frame_samples"], job["pitch"] = data.stride()[:2]
    pack_axis(job["rows"], geometry.rows)
    pack_axis(job["columns"], geometry.columns)
    job["matrix"], job["gain"], job["bias"] = clip.color.matrix, clip.color.gain, clip.color.bias
    job["u_row"] = form.height
    job["v_row"] = form.height if form.interleaved else form.height + form.chroma_height
    job["interleaved"], job["clamp"] = form.interleaved, clip.color.clamp
