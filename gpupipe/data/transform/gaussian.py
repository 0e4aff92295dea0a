"""Gaussian blur on CUDA: what ``cuda_src/clip_blur.cu`` does.

Changes of colour that wait for contrast's means come before it, normalisation, dtype and layout after it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gpupipe.data.transform import finish
from gpupipe.data.transform.finish import STEPS_BYTES
from gpupipe.data.transform.params import Size
from gpupipe.device.module import kernel, launch

MAX_CLIPS = 8
"""Clips of one launch."""
THREADS = 256
SHARED_BYTES = 64 * 1024
"""Dynamic shared memory of a block, at most."""
WIDTHS, HEIGHTS = (32, 16, 8, 4, 2, 1), (64, 32, 16, 8)
"""Outputs of a block, the most that fit: what lies around a tile is summed across by its neighbours too."""
_DOWN = 4

_CLIP = struct.Struct(f"=3Q4q6f{STEPS_BYTES}sf3i")
_REST = struct.Struct("=8i")
BATCH = np.dtype([("bytes", f"V{MAX_CLIPS * _CLIP.size + _REST.size}")])


class Clip(NamedTuple):
    """One clip to make. All clips of a launch are of one size."""

    color: finish.Clip
    """Its RGB, the changes of colour before the blur, and where it goes."""
    sigma: float
    """Standard deviation in pixels."""


class Tile(NamedTuple):
    """Outputs of a block, and the shared memory that they need."""

    height: int
    width: int
    shared_bytes: int


def tile_of(half: int) -> Tile:
    """For so many taps on either side of the middle one, 255 at most."""
    for width in WIDTHS:
        for height in HEIGHTS:
            a_row = 3 * THREADS // 32 * (width + 2 * half)
            shared = 4 * (2 * half + 2 * _DOWN + max(a_row, THREADS) + 3 * width * (height + 2 * half))
            if shared <= SHARED_BYTES:
                return Tile(height, width, shared)
    raise AssertionError(half)


def make(clips: Sequence[Clip], kernel_size: int, dtype: torch.dtype) -> None:
    """Blurs clips and writes them as ``dtype``, on the current stream; the same bits every time. uint8 gets values rounded to
    nearest and held within its range.

    Args:
        clips: on one CUDA device.
        kernel_size: taps along each axis; odd, at most 511, its half below the clips' sides.
    """
    function = compile_for(dtype)
    for begin in range(0, len(clips), MAX_CLIPS):
        some = clips[begin : begin + MAX_CLIPS]
        packed, grid, shared_bytes = pack(some, kernel_size)
        launch(function, grid, (THREADS, 1, 1), (packed,), shared_bytes=shared_bytes)


def blur(rgb: torch.Tensor, kernel_size: int, sigma: float, scale: tuple[float, ...], out: torch.Tensor) -> None:
    """The same for finished RGB.

    Args:
        rgb: (T, 3, H, W) float32 on a CUDA device.
        kernel_size: as for :func:`make`.
        sigma: standard deviation in pixels.
        scale: gain of each channel, then bias.
        out: (T, 3, H, W) of any strides on the same device; float32, float16, bfloat16 or uint8.
    """
    rgb = rgb.contiguous()
    frames, _, height, width = rgb.shape
    steps = finish.pack_steps((), clamp=False)
    color = finish.Clip(rgb.data_ptr(), True, 0, 0, steps, scale, frames, (height, width), out.data_ptr(), out.stride())
    make([Clip(color, sigma)], kernel_size, out.dtype)


def compile_for(dtype: torch.dtype) -> Any:
    """The kernel that writes this dtype: compiled now, unless it is in memory or in the disk cache.

    Raises:
        DeviceError: when it cannot be compiled here.
    """
    return kernel("clip_blur.cu", f"blur_{str(dtype).removeprefix('torch.')}")


def pack(clips: Sequence[Clip], kernel_size: int) -> tuple[Any, tuple[int, int, int], int]:
    """(the kernel's argument, the grid, bytes of shared memory)."""
    buffer = bytearray(BATCH.itemsize)
    size: Size = clips[0].color.size
    first_frame, (height, width) = 0, size
    for number, (clip, sigma) in enumerate(clips):
        assert clip.size == size, (clip.size, size)
        _CLIP.pack_into(
            buffer, number * _CLIP.size, clip.rgb, clip.sums, clip.out, *clip.strides, *clip.scale, clip.steps, sigma,
            clip.is_float, clip.sums_a_frame, first_frame,
        )  # fmt: skip
        first_frame += clip.frames
    tile = tile_of(kernel_size // 2)
    down, across = -(-height // tile.height), -(-width // tile.width)
    _REST.pack_into(
        buffer, MAX_CLIPS * _CLIP.size, len(clips), height, width, kernel_size // 2, tile.height, tile.width, across, 0
    )  # fmt: skip
    return np.frombuffer(buffer, BATCH)[0], (down * across, first_frame, 1), tile.shared_bytes
