"""The transform on CUDA: packs what ``cuda_src/clip_transform.cu`` needs into its one argument, and launches it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpupipe.data.transform.geometry import Axis, Geometry
from gpupipe.data.transform.reference import Color
from gpupipe.device.module import kernel, launch
from gpupipe.device.texture import BASE_BYTES, MAX_ROWS, PITCH_BYTES, PitchedBuffer
from gpupipe.types import Planes

TILE = (32, 8)
"""(width, height) of the outputs that a block makes, one a thread."""
MAX_FRAMES = 256
"""Frames of one launch: as many as the argument has room for."""
TABLE_BYTES = 48 * 1024
"""Dynamic shared memory that any GPU gives without being asked; beyond it weights are computed where they are used."""
_TAPS_BYTES = 32
_ALIGNED_ROWS = BASE_BYTES // PITCH_BYTES
"""A texture may start at any multiple of so many rows, whatever the pitch."""
_BLOCKS = 1024
"""Blocks that fill the largest GPU; beyond that a block makes several frames with the weights it has worked out."""

CUDA_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.uint8: "unsigned char",
}

_PLACES = ("start", "scale", "support", "chroma_step", "chroma_offset")
_COUNTS = ("low", "high", "outputs", "mirror", "chroma_size")
_AXIS_FIELDS = _PLACES + _COUNTS
AXIS = np.dtype(
    [(name, "f4" if name.startswith("chroma") else "f8") for name in _PLACES]
    + [(name, "i4") for name in (*_COUNTS, "max_taps", "max_chroma_taps")]
    + [("inverse", "f4")],
    align=True,
)
PARAMS = np.dtype(
    [("texture", "u8"), ("out", "u8")]
    + [(name, "i8") for name in ("stride_time", "stride_channel", "stride_row", "stride_column")]
    + [("rows", AXIS), ("columns", AXIS), ("matrix", "f4", (3, 4)), ("gain", "f4", (3,)), ("bias", "f4", (3,))]
    + [(name, "i4") for name in ("transposed", "height", "width", "frames", "frames_per_block", "first_row", "frame_rows")]
    + [(name, "i4") for name in ("u_row", "v_row", "u_column", "v_column", "chroma_pitch", "tabled", "clamp")]
    + [("source", "i2", (MAX_FRAMES,)), ("target", "i2", (MAX_FRAMES,))],
    align=True,
)


def transform(planes: Planes, geometry: Geometry, color: Color, frame_map: Sequence[int], out: torch.Tensor) -> None:
    """Writes frame ``frame_map[t]`` to ``out[t]`` for each t, on the current stream; the same bits every time.

    Args:
        planes: decoded frames on a CUDA device, in one pitched buffer (see :class:`gpupipe.device.texture.PitchedBuffer`).
        geometry: sampling of the stored frame.
        color: from codes to output values.
        frame_map: T positions into ``planes``.
        out: (T, 3, H, W) of any strides on the same device; float32, float16, bfloat16 or uint8.
    """
    function = compile_for(planes.format.sample_bytes, out.dtype)
    buffer = PitchedBuffer.of(planes.data)
    params, shared_bytes = _pack(planes, geometry, color, out)
    tiles = -(-out.shape[3] // TILE[0]), -(-out.shape[2] // TILE[1])

    rows = planes.format.rows
    a_texture = (MAX_ROWS - _ALIGNED_ROWS + 1) // rows
    for begin in range(0, len(planes), a_texture):
        end = min(begin + a_texture, len(planes))
        jobs = [(source - begin, target) for target, source in enumerate(frame_map) if begin <= source < end]
        first_row = begin * rows // _ALIGNED_ROWS * _ALIGNED_ROWS
        params["first_row"] = begin * rows - first_row
        for k in range(0, len(jobs), MAX_FRAMES):
            part = np.array(jobs[k : k + MAX_FRAMES], np.int16)
            frames = len(part)
            params["texture"] = buffer.texture(first_row, end * rows - first_row, planes.format.row_samples)
            params["source"][:frames], params["target"][:frames] = part[:, 0], part[:, 1]
            params["frames"] = frames
            params["frames_per_block"] = a_block = max(1, min(8, tiles[0] * tiles[1] * frames // _BLOCKS))
            launch(function, (*tiles, -(-frames // a_block)), (*TILE, 1), [params[()]], shared_bytes=shared_bytes)


def compile_for(sample_bytes: int, dtype: torch.dtype) -> Any:
    """The kernel that turns samples of this size into this dtype: compiled now, unless it is in memory or in the disk cache.

    Raises:
        DeviceError: when it cannot be compiled here.
    """
    name, options = _entry(sample_bytes, dtype)
    return kernel("clip_transform.cu", name, options)


@functools.cache
def _entry(sample_bytes: int, dtype: torch.dtype) -> tuple[str, tuple[str, ...]]:
    """Name of the kernel for these samples and this output, and the options that compile it alone."""
    name = f"clip_u{8 * sample_bytes}_{str(dtype).removeprefix('torch.')}"
    word = "unsigned char" if sample_bytes == 1 else "unsigned short"
    return name, (f"-DCLIP_ENTRY={name}", f"-DCLIP_WORD={word}", f"-DCLIP_OUT={CUDA_TYPES[dtype]}")


def _pack(planes: Planes, geometry: Geometry, color: Color, out: torch.Tensor) -> tuple[Any, int]:
    """(argument without the texture and the frames, bytes of dynamic shared memory)."""
    form = planes.format
    params = np.zeros((), PARAMS)
    params["out"] = out.data_ptr()
    for name, stride in zip(("stride_time", "stride_channel", "stride_row", "stride_column"), out.stride(), strict=True):
        params[name] = stride
    pack_axis(params["rows"], geometry.rows)
    pack_axis(params["columns"], geometry.columns)
    params["matrix"], params["gain"], params["bias"] = color.matrix, color.gain, color.bias
    params["clamp"] = color.clamp
    params["transposed"] = geometry.transposed
    params["height"], params["width"] = out.shape[2:]
    params["frame_rows"] = form.rows
    params["u_row"] = form.height
    params["v_row"] = form.height if form.interleaved else form.height + form.chroma_height
    params["v_column"] = 1 if form.interleaved else 0
    params["chroma_pitch"] = 2 if form.interleaved else 1

    slots = TILE[::-1] if geometry.transposed else TILE
    taps_bytes = _TAPS_BYTES * sum(TILE)
    weights = sum(
        n * (axis.max_taps() + axis.max_chroma_taps()) for n, axis in zip(slots, (geometry.columns, geometry.rows), strict=True)
    )
    tabled = taps_bytes + 4 * weights <= TABLE_BYTES
    params["tabled"] = tabled
    return params, taps_bytes + 4 * weights if tabled else taps_bytes


def pack_axis(packed: Any, axis: Axis) -> None:
    for name in _AXIS_FIELDS:
        packed[name] = getattr(axis, name)
    packed["max_taps"], packed["max_chroma_taps"] = axis.max_taps(), axis.max_chroma_taps()
    packed["inverse"] = 1 / axis.support
