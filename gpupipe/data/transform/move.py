"""Clips that are turned, sheared, shifted or zoomed, or whose filter the fused resize has not, on CUDA: packs what
``cuda_src/clip_move.cu`` needs, several clips a launch."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.transform import affine
from gpupipe.data.transform.finish import STEPS_BYTES
from gpupipe.data.transform.geometry import Axis, Filter, geometry
from gpupipe.data.transform.params import Size, TransformParams, whole
from gpupipe.device.module import cuda_type, kernel, launch
from gpupipe.device.texture import can_be_textured, texture_of
from gpupipe.types import PlaneFormat, Planes, VideoInfo

MAX_CLIPS = 8
MAX_FRAMES = 256
MAX_BLENDS = MAX_FRAMES // 2
"""Clips, their frames and blends of two frames in one launch: as many as the argument, which is 4 KB at most, has room for."""
THREADS = 256
TOGETHER = 4
"""Frames that a thread makes together."""
OPTIONS: tuple[str, ...] = ()
"""Further options of the compiler: the source has constants to try."""
_TILE = 16
"""Outputs of a block along each axis."""
_TABLE = 16 + 4
_TAPS_BYTES = 44
SHARED_BYTES = THREADS * (4 * _TABLE + 2 * _TAPS_BYTES)

_FILTERS = {"nearest": 0, "bilinear": 1, "bicubic": 2}
DROP, RENORMALISE, REPEAT = 0, 1, 2
"""What comes of samples beyond those that may be read: nothing, with the fill in their place; nothing, with the others' weights
made larger; or the outermost sample is repeated."""

_SIDE = struct.Struct("=4d2f4i")
_CLIP = struct.Struct(f"=3Q5q{_SIDE.size}s{_SIDE.size}s21f{STEPS_BYTES}sf16i")
_FIRST_BLOCK = struct.Struct(f"={MAX_CLIPS + 1}i")
_SOURCE_AT = MAX_CLIPS * _CLIP.size + _FIRST_BLOCK.size
_BLEND_AT = _SOURCE_AT + 2 * MAX_FRAMES
BATCH = np.dtype([("bytes", f"V{(_BLEND_AT + 4 * MAX_BLENDS + 7) // 8 * 8}")])


class Side(NamedTuple):
    """Sampling along one stored axis: output pixel (x, y) lies at across (x + 1/2) + down (y + 1/2) + offset luma samples."""

    across: float
    down: float
    offset: float
    support: float
    axis: Axis
    """What the axis is apart from that: its chroma, and which of its samples may be read."""
    against: bool
    """It runs against its axis of the display."""


class Sampling(NamedTuple):
    """Which samples make an output pixel."""

    rows: Side
    columns: Side
    size: Size
    """(height, width) of the output as the kernel has it."""
    transposed: bool
    """That output is turned, its rows are columns of the clip."""
    mirrored: tuple[bool, bool]
    """That output is mirrored top to bottom, left to right."""
    filter: Filter
    sharpness: float
    """a of Keys's cubic."""
    edges: int

    @property
    def widens(self) -> bool:
        """Whether the filter is made wider, so that an output reads many samples."""
        return max(self.rows.support, self.columns.support) > 1

    @property
    def tiles(self) -> int:
        """Of a frame; so many sums of its greys there are."""
        return -(-self.size[0] // _TILE) * -(-self.size[1] // _TILE)


@dataclass(slots=True)
class Clip:
    """One clip to make."""

    planes: Planes
    sampling: Sampling
    fill: tuple[float, ...]
    """Stands in for RGB outside of the frame."""
    color: tuple[float, ...]
    """18 numbers: the (3, 4) matrix from sample codes to RGB, then gain and bias of each channel: value = RGB · gain + bias."""
    steps: bytes
    """Changes of colour before gain and bias: see :func:`gpupipe.data.transform.finish.pack_steps`."""
    clamp: bool
    """Whether RGB is held within [0, 1]."""
    frame_map: Sequence[int]
    """T positions into ``planes``; with ``blend`` 2 T: those that are blended with the first T come after them."""
    target: int
    """What is written: ``FINISHED``, ``UNIT`` or ``FLOAT`` of :mod:`gpupipe.data.transform.resize`."""
    item_bytes: int
    """Size of a value of that."""
    out: int
    """Address of the first frame's top left pixel."""
    strides: tuple[int, ...]
    """Of time, channel, row and column, in elements."""
    sums: int = 0
    """Address of (T, tiles) float32 for the sums of the greys, where the target is not ``FINISHED``."""
    blend: Sequence[float] = ()
    """T shares, 0 to 1, of the second frame; none: nothing is blended."""

    @property
    def frames(self) -> int:
        """T."""
        return len(self.blend) or len(self.frame_map)

    @property
    def textured(self) -> bool:
        """Whether samples are fetched through a texture: where they are few, and where one can lie over the planes."""
        return not self.sampling.widens and can_be_textured(self.planes.data)


def sampling_of(
    info: VideoInfo, planes: PlaneFormat, params: TransformParams, size: Size, *, filter: Filter, antialias: bool
) -> Sampling:
    """Sampling for a clip of ``size``, with or without a move.

    Raises:
        GraphError: as :func:`gpupipe.data.transform.geometry.geometry`.
    """
    sharpness = -0.5 if antialias else -0.75
    if params.affine is None:
        rows, columns, transposed = geometry(info, planes, params, size, antialias=antialias, filter=filter)
        repeats = filter == "nearest" or (filter == "bicubic" and not antialias)
        return Sampling(
            Side(0.0, rows.scale, rows.start, rows.support, rows, False),
            Side(columns.scale, 0.0, columns.start, columns.support, columns, False),
            (rows.outputs, columns.outputs), transposed, (rows.mirror, columns.mirror), filter, sharpness,
            REPEAT if repeats else RENORMALISE,
        )  # fmt: skip
    place = params.matrix(size)
    spans = affine.supports(place, antialias=antialias)
    rows, columns, transposed = geometry(info, planes, whole(info.display_size), size)
    first, second = (0, 1) if transposed else (1, 0)  # rows of the matrix, which are over x and y of the display
    return Sampling(
        _side(place[first], spans[first], rows), _side(place[second], spans[second], columns), size, False, (False, False),
        filter, sharpness, DROP,
    )  # fmt: skip


def _side(row: NDArray[np.float64], support: float, axis: Axis) -> Side:
    across, down, offset = (float(value) for value in row)
    if axis.mirror:  # only where the axis runs against the display's: nothing is flipped but in the matrix
        across, down, offset = -across, -down, axis.high - offset
    return Side(across, down, offset, support, axis, axis.mirror)


def make(clips: Sequence[Clip], dtype: torch.dtype) -> None:
    """Makes clips in as few launches as there is room for, on the current stream; the same bits every time.

    Args:
        clips: with planes on one CUDA device, their pitch and first address multiples of four samples.
        dtype: of those whose target is ``FINISHED``.
    """
    for some in _launches(clips):
        packed, blocks = pack(some)
        function = compile_for(some[0].planes.format.sample_bytes, dtype, textured=some[0].textured)
        launch(function, (blocks, 1, 1), (THREADS, 1, 1), (packed,), shared_bytes=SHARED_BYTES)


def compile_for(sample_bytes: int, dtype: torch.dtype, *, textured: bool) -> Any:
    """The kernel that turns samples of this size into this dtype: compiled now, unless it is in memory or in the disk cache.

    Raises:
        DeviceError: when it cannot be compiled here.
    """
    return kernel("clip_move.cu", *_entry(sample_bytes, dtype, textured))


@functools.cache
def _entry(sample_bytes: int, dtype: torch.dtype, textured: bool) -> tuple[str, tuple[str, ...]]:
    name = f"move_u{8 * sample_bytes}_{'texture_' if textured else ''}{str(dtype).removeprefix('torch.')}"
    word = "unsigned char" if sample_bytes == 1 else "unsigned short"
    frame = "float" if textured else f"const {word}*"
    tuned = f"-DCLIP_TOGETHER={TOGETHER}", *OPTIONS
    return name, (
        f"-DCLIP_ENTRY={name}", f"-DCLIP_WORD={word}", f"-DCLIP_FRAME={frame}", f"-DCLIP_OUT={cuda_type(dtype)}", *tuned,
    )  # fmt: skip


def _launches(clips: Sequence[Clip]) -> Iterator[list[Clip]]:
    """Clips that share a launch: those with samples of one size, read in one way. A clip with more frames than a launch takes
    comes in parts."""
    for sample_bytes, textured in itertools.product((1, 2), (False, True)):
        part: list[Clip] = []
        frames = 0
        for clip in clips:
            if (clip.planes.format.sample_bytes, clip.textured) != (sample_bytes, textured):
                continue
            for piece in _pieces(clip):
                if part and (len(part) == MAX_CLIPS or frames + len(piece.frame_map) > MAX_FRAMES):
                    yield part
                    part, frames = [], 0
                part.append(piece)
                frames += len(piece.frame_map)
        if part:
            yield part


def _pieces(clip: Clip) -> Iterator[Clip]:
    if len(clip.frame_map) <= MAX_FRAMES:
        yield clip
        return
    room, count = MAX_BLENDS if clip.blend else MAX_FRAMES, clip.frames
    for begin in range(0, count, room):
        end = min(begin + room, count)
        frames = [*clip.frame_map[begin:end], *(clip.frame_map[count + begin : count + end] if clip.blend else ())]
        out, sums = clip.out + begin * clip.item_bytes * clip.strides[0], clip.sums + 4 * begin * clip.sampling.tiles
        yield replace(clip, frame_map=frames, out=out, sums=sums, blend=clip.blend[begin:end])


def pack(clips: Sequence[Clip]) -> tuple[Any, int]:
    """(the kernel's argument, its blocks)."""
    buffer = bytearray(BATCH.itemsize)
    starts: list[int] = []
    frames: list[int] = []
    blends: list[float] = []
    blocks = 0
    for number, clip in enumerate(clips):
        _pack_clip(buffer, number * _CLIP.size, clip, len(frames), len(blends) if clip.blend else -1)
        frames += clip.frame_map
        blends += clip.blend
        starts.append(blocks)
        blocks += clip.sampling.tiles * -(-clip.frames // TOGETHER)
    starts += [blocks] * (MAX_CLIPS + 1 - len(clips))
    _FIRST_BLOCK.pack_into(buffer, MAX_CLIPS * _CLIP.size, *starts)
    struct.pack_into(f"={len(frames)}h", buffer, _SOURCE_AT, *frames)
    struct.pack_into(f"={len(blends)}f", buffer, _BLEND_AT, *blends)
    return np.frombuffer(buffer, BATCH)[0], blocks


def _pack_clip(buffer: bytearray, at: int, clip: Clip, first_frame: int, first_blend: int) -> None:
    planes, sampling = clip.planes, clip.sampling
    form, data = planes.format, planes.data
    frame_samples, pitch, step = data.stride()
    assert step == 1, data.stride()
    assert pitch % 4 == 0, data.stride()
    time, channel, row, column = clip.strides
    if sampling.transposed:
        row, column = column, row
    (height, width), out = sampling.size, clip.out
    if sampling.mirrored[0]:
        out, row = out + (height - 1) * row * clip.item_bytes, -row
    if sampling.mirrored[1]:
        out, column = out + (width - 1) * column * clip.item_bytes, -column
    _CLIP.pack_into(
        buffer, at, texture_of(data) if clip.textured else data.data_ptr(), out, clip.sums, frame_samples,
        time, channel, row, column,
        _packed(sampling.rows), _packed(sampling.columns), *clip.color, *clip.fill, clip.steps, sampling.sharpness,
        _FILTERS[sampling.filter], sampling.edges, pitch, form.height,
        form.height if form.interleaved else form.height + form.chroma_height, form.interleaved, clip.clamp, clip.target,
        first_frame, clip.frames, first_blend, data.shape[1], height, width, -(-width // _TILE), sampling.tiles,
    )  # fmt: skip


def _packed(side: Side) -> bytes:
    axis = side.axis
    return _SIDE.pack(
        side.across, side.down, side.offset, side.support, axis.chroma_step, axis.chroma_offset, axis.low, axis.high,
        axis.chroma_size, side.against,
    )  # fmt: skip
