"""Clips whose sampling runs along the axes, on CUDA: packs what ``cuda_src/clip_resize.cu`` needs, several clips a launch."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from gpupipe.data.transform.finish import STEPS_BYTES
from gpupipe.data.transform.geometry import Axis, Geometry
from gpupipe.device.module import cuda_type, kernel, launch
from gpupipe.types import Planes

MAX_CLIPS = 8
MAX_FRAMES = 512
"""Clips and frames of one launch: as many as the argument, which is 4 KB at most, has room for."""
SHARED_BYTES = 96 * 1024
"""Dynamic shared memory of a block, at most."""

FINISHED, UNIT, FLOAT = 0, 1, 2
"""What a launch writes: finished clips; or RGB to go on with, in 16 bits of [0, 1] or as float32, and sums of its greys."""

WARPS = 4
"""Of a block: each makes frames of its own."""
OPTIONS: tuple[str, ...] = ()
"""Further options of the compiler: the source has constants to try."""
BANDS = (16, 8)
"""Output rows of a block, the most that fit: between two bands some rows are read twice."""
FRAMES_A_WARP = (4, 2)
"""That a warp makes one after the other with the weights which its block has worked out: the most that leave the GPU enough
blocks, else one."""
ENOUGH_BLOCKS = 1024
"""Twice what the largest GPU works on at a time."""
_STRIP = 16
"""Output columns of a block."""
_TILE = 8
"""Output rows, and rows of samples, that a warp works on together."""
_LUMA_GROUP, _CHROMA_GROUP = 32, 16
"""Columns of samples that a warp reads together; what it reads begins at a multiple of a quarter of these."""
_TAPS_BYTES = 32
_NOTES_BYTES = 112
"""What a block keeps besides weights."""

_AXIS = "3d3f4i4x"
_CLIP = struct.Struct(f"=3Qq4i{_AXIS}{_AXIS}18f{STEPS_BYTES}s20i")
CLIP_BYTES = _CLIP.size
_FIRST_BLOCK = struct.Struct(f"={MAX_CLIPS + 1}i")
_SOURCE_AT = MAX_CLIPS * CLIP_BYTES + _FIRST_BLOCK.size
_BATCH_BYTES = (_SOURCE_AT + 2 * MAX_FRAMES + 7) // 8 * 8


class Layout(NamedTuple):
    """How a clip's outputs are cut into blocks, and room for what a block reads: groups of columns, chunks of rows, taps."""

    band: int
    bands: int
    strips: int
    luma_groups: int
    chroma_groups: int
    luma_chunks: int
    chroma_chunks: int
    row_chroma_taps: int
    column_chroma_taps: int
    shared_bytes: int


@dataclass(slots=True)
class Clip:
    """One clip to make."""

    planes: Planes
    geometry: Geometry
    layout: Layout
    color: tuple[float, ...]
    """18 numbers: the (3, 4) matrix from sample codes to RGB, then gain and bias of each channel: value = RGB · gain + bias."""
    steps: bytes
    """Changes of colour before that: see :func:`gpupipe.data.transform.finish.pack_steps`."""
    clamp: bool
    """Whether RGB is held within [0, 1]."""
    frame_map: Sequence[int]
    target: int
    """What is written: ``FINISHED``, ``UNIT`` or ``FLOAT``."""
    item_bytes: int
    """Size of a value of that."""
    out: int
    """Address of the first frame's top left pixel."""
    strides: tuple[int, ...]
    """Of time, channel, row and column, in elements; all of the clip lies within 2^31 of them."""
    sums: int = 0
    """Address of (T, bands · strips) float32 for the sums of the greys, where the target is not ``FINISHED``."""


def layout_of(geometry: Geometry) -> Layout | None:
    """How to cut a clip; None for one that is not made here.

    That is one that shrinks so much that a block has no room for the weights, and one that shrinks without antialias: most of
    what is read would be for nothing.
    """
    rows, columns = geometry.rows, geometry.columns
    if rows.filter != "bilinear" or rows.support < rows.scale or columns.support < columns.scale:
        return None
    across, across_chroma = _reach(columns, _STRIP)
    down, down_chroma = _reach(rows, _TILE)
    # The first sample of a strip lies up to seven (chroma: three) behind the first that is read, that of a tile up to seven.
    luma_groups, chroma_groups = (across + 38) // _LUMA_GROUP, (across_chroma + 18) // _CHROMA_GROUP
    luma_chunks, chroma_chunks = (down + 14) // _TILE, (down_chroma + 14) // _TILE
    row_taps, column_taps = _reach(rows, 1)[1], _reach(columns, 1)[1]
    tables = 2048 * luma_groups + 1024 * chroma_groups + (_TAPS_BYTES + 4 * column_taps) * _STRIP + _NOTES_BYTES
    for band in BANDS:
        shared = tables + 512 * (luma_chunks + chroma_chunks) * (band // _TILE) + (_TAPS_BYTES + 4 * row_taps) * band
        if shared <= SHARED_BYTES:
            return Layout(
                band, -(-rows.outputs // band), -(-columns.outputs // _STRIP), luma_groups, chroma_groups, luma_chunks,
                chroma_chunks, row_taps, column_taps, shared,
            )  # fmt: skip
    return None


@functools.lru_cache(maxsize=64)
def reaches(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the kernel, which counts a clip's elements in 32 bits, gets from its first to its last."""
    last = 0
    for stride, size in zip(strides, shape, strict=True):
        last += stride * (size - 1)
    return last < 2**31


def _reach(axis: Axis, outputs: int) -> tuple[int, int]:
    """Samples of luma and of chroma that so many neighbouring outputs read at most."""
    luma, whole = int(axis.scale * (outputs - 1) + 2 * axis.support) + 1, axis.high - axis.low
    luma = luma if luma < whole else whole
    chroma = int((luma - 1) * axis.chroma_step) + 3
    return luma, chroma if chroma < axis.chroma_size else axis.chroma_size


def make(clips: Sequence[Clip], dtype: torch.dtype) -> None:
    """Makes clips in as few launches as there is room for, on the current stream; the same bits every time.

    Args:
        clips: with planes on one CUDA device.
        dtype: of those whose target is ``FINISHED``.
    """
    for some in _launches(clips):
        sample_bytes = some[0].planes.format.sample_bytes
        packed, blocks = pack(some)
        shared = max(clip.layout.shared_bytes for clip in some)
        launch(compile_for(sample_bytes, dtype), (blocks, 1, 1), (32 * WARPS, 1, 1), (packed,), shared_bytes=shared)


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
    shape = f"-DCLIP_WARPS={WARPS}", *OPTIONS
    return name, (f"-DCLIP_ENTRY={name}", f"-DCLIP_WORD={word}", f"-DCLIP_OUT={cuda_type(dtype)}", *shape)


def _launches(clips: Sequence[Clip]) -> Iterator[list[Clip]]:
    """Clips that share a launch: those with samples of one size, the largest first, so that small ones fill the GPU at the end.

    A clip with more frames than a launch has room for comes in parts.
    """
    for sample_bytes in (1, 2):
        alike = [clip for clip in clips if clip.planes.format.sample_bytes == sample_bytes]
        alike.sort(key=_cost, reverse=True)
        part: list[Clip] = []
        frames = 0
        for clip in alike:
            for piece in _pieces(clip):
                if part and (len(part) == MAX_CLIPS or frames + len(piece.frame_map) > MAX_FRAMES):
                    yield part
                    part, frames = [], 0
                part.append(piece)
                frames += len(piece.frame_map)
        if part:
            yield part


def _cost(clip: Clip) -> float:
    rows, columns = clip.geometry.rows, clip.geometry.columns
    return rows.scale * columns.scale


def _pieces(clip: Clip) -> list[Clip]:
    count = len(clip.frame_map)
    if count <= MAX_FRAMES:
        return [clip]
    item, sums = clip.item_bytes, 4 * clip.layout.bands * clip.layout.strips
    return [
        replace(
            clip,
            frame_map=clip.frame_map[begin : begin + MAX_FRAMES],
            out=clip.out + begin * item * clip.strides[0],
            sums=clip.sums + begin * sums,
        )
        for begin in range(0, count, MAX_FRAMES)
    ]


def pack(clips: Sequence[Clip]) -> tuple[bytearray, int]:
    """(the kernel's argument, its blocks)."""
    buffer = bytearray(_BATCH_BYTES)
    starts: list[int] = []
    frames: list[int] = []
    blocks = 0
    a_block = _frames_a_block(clips)
    for number, clip in enumerate(clips):
        cut, count = clip.layout, len(clip.frame_map)
        _pack_clip(buffer, number * CLIP_BYTES, clip, len(frames), a_block)
        frames += clip.frame_map
        starts.append(blocks)
        blocks += cut.bands * cut.strips * -(-count // a_block)
    starts += [blocks] * (MAX_CLIPS + 1 - len(clips))
    _FIRST_BLOCK.pack_into(buffer, MAX_CLIPS * CLIP_BYTES, *starts)
    struct.pack_into(f"={len(frames)}h", buffer, _SOURCE_AT, *frames)
    return buffer, blocks


def _frames_a_block(clips: Sequence[Clip]) -> int:
    parts = [(clip.layout.bands * clip.layout.strips, len(clip.frame_map)) for clip in clips]
    for frames in FRAMES_A_WARP:
        if sum(count * -(-whole // (WARPS * frames)) for count, whole in parts) >= ENOUGH_BLOCKS:
            return WARPS * frames
    return WARPS


def _pack_clip(buffer: bytearray, at: int, clip: Clip, first_frame: int, frames_a_block: int) -> None:
    planes, (rows, columns, transposed), cut = clip.planes, clip.geometry, clip.layout
    form, data = planes.format, planes.data
    frame_samples, pitch, step = data.stride()
    assert step == 1, data.stride()
    time, channel, row, column = clip.strides
    if transposed:
        row, column = column, row
    out, item = clip.out, clip.item_bytes
    if rows.mirror:
        out, row = out + (rows.outputs - 1) * row * item, -row
    if columns.mirror:
        out, column = out + (columns.outputs - 1) * column * item, -column
    _CLIP.pack_into(
        buffer, at, data.data_ptr(), out, clip.sums, frame_samples, time, channel, row, column,
        rows.start, rows.scale, rows.support, rows.chroma_step, rows.chroma_offset, 1 / rows.support, rows.low, rows.high,
        rows.outputs, rows.chroma_size,
        columns.start, columns.scale, columns.support, columns.chroma_step, columns.chroma_offset, 1 / columns.support,
        columns.low, columns.high, columns.outputs, columns.chroma_size,
        *clip.color, clip.steps, pitch, form.height,
        form.height if form.interleaved else form.height + form.chroma_height, form.interleaved, clip.clamp, clip.target,
        first_frame, len(clip.frame_map), frames_a_block, cut.bands, cut.strips, cut.band, max(form.bits + form.shift - 10, 0),
        form.bits > 10, *cut[3:9],
    )  # fmt: skip
