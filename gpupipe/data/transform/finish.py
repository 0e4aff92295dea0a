"""Changes of colour on CUDA, together with normalisation, dtype and layout: what ``cuda_src/clip_color.cu`` does."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpupipe.data.transform.params import ColorOp
from gpupipe.device.module import kernel, launch

KINDS = ("brightness", "saturation", "grayscale", "channel_drop", "contrast", "hue", "posterize", "solarize")
"""In the order of the source's numbers. The others need more of a frame than a pixel and its mean."""
MAX_STEPS = 8
MAX_CLIPS = 8
"""Clips of one launch."""
THREADS = 256
_PIXELS_A_WARP = 8 * 32
"""A thread makes eight together."""

_STEPS = [struct.Struct(f"={n}f{4 * (MAX_STEPS - n)}x{n}B{MAX_STEPS - n}x2i") for n in range(MAX_STEPS + 1)]
"""By their number."""
STEPS_BYTES = _STEPS[0].size
_CLIP = struct.Struct(f"=3Q4q6f{STEPS_BYTES}s6i")
_COUNTS = struct.Struct("=2i")
_BATCH_BYTES = MAX_CLIPS * _CLIP.size + _COUNTS.size
_NUMBERS = {name: number for number, name in enumerate(KINDS)}


@dataclass(slots=True)
class Clip:
    """RGB of one clip, and what is to become of it. All clips of a launch are of one size."""

    rgb: int
    """Address of (T, 3, H, W): float32, or uint16 for [0, 1]."""
    is_float: bool
    sums: int
    """Address of (T, sums_a_frame) float32: each frame's greys, added up in parts, for contrast."""
    sums_a_frame: int
    """0: there is no contrast."""
    steps: bytes
    """What :func:`pack_steps` gave."""
    scale: tuple[float, ...]
    """Gain of each channel, then bias: value = RGB · gain + bias."""
    frames: int
    size: tuple[int, int]
    """(height, width)"""
    out: int
    """Address of the clip."""
    strides: tuple[int, ...]
    """Of time, channel, row and column, in elements."""


def serves(ops: Sequence[ColorOp]) -> bool:
    """Whether the kernels have all of these, and at most one that needs the frames' means."""
    contrasts = 0
    for op in ops:
        if op.name not in _NUMBERS:
            return False
        contrasts += op.name == "contrast"
    return contrasts <= 1 and len(ops) <= MAX_STEPS


def pack_steps(ops: Sequence[ColorOp], *, clamp: bool) -> bytes:
    """Changes of colour, such that :func:`serves` them, as the kernels take them; ``clamp``: RGB is held within [0, 1] after
    each."""
    values: list[float] = []
    kinds: list[int] = []
    for op in ops:
        name, value = op.name, op.value
        if name == "hue":
            value = (6 * value - 1) % 6 + 1  # as cuda_src/color.cuh wants it
        elif name == "posterize":
            value = 2.0**value
        values.append(value)
        kinds.append(_NUMBERS[name])
    return _STEPS[len(kinds)].pack(*values, *kinds, len(kinds), clamp)


def blocks_of(size: tuple[int, int]) -> int:
    """Blocks that share a frame of this (height, width)."""
    return -(-size[0] * size[1] // (_PIXELS_A_WARP * THREADS // 32))


def make(clips: Sequence[Clip], dtype: torch.dtype) -> None:
    """Does the steps of clips and writes them as ``dtype``, on the current stream; the same bits every time. uint8 gets values
    rounded to nearest and held within its range."""
    for begin in range(0, len(clips), MAX_CLIPS):
        some = clips[begin : begin + MAX_CLIPS]
        packed, grid = pack(some)
        launch(_kernel(_name(dtype)), grid, (THREADS, 1, 1), (packed,))


def finish(rgb: torch.Tensor, ops: Sequence[ColorOp], scale: tuple[float, ...], out: torch.Tensor, *, clamp: bool) -> None:
    """The same for one clip whose greys nobody has added up.

    Args:
        rgb: (T, 3, H, W) float32, contiguous, on a CUDA device.
        ops: such that :func:`serves` them.
        scale: gain of each channel, then bias.
        out: (T, 3, H, W) of any strides on the same device; float32, float16, bfloat16 or uint8.
        clamp: whether RGB is held within [0, 1] after each of ``ops``.
    """
    frames, _, height, width = rgb.shape
    names = [op.name for op in ops]
    sums = torch.empty((frames, blocks_of((height, width)) * THREADS // 32), dtype=torch.float32, device=rgb.device)
    clip = Clip(
        rgb.data_ptr(), True, sums.data_ptr(), 0, pack_steps(ops, clamp=clamp), scale, frames, (height, width),
        out.data_ptr(), out.stride(),
    )  # fmt: skip
    if "contrast" in names:
        before = pack_steps(ops[: names.index("contrast")], clamp=clamp)
        clip.sums_a_frame = sums.shape[1]
        packed, grid = pack([replace(clip, steps=before)])
        launch(_kernel("color_sums"), grid, (THREADS, 1, 1), (packed,))
    make([clip], out.dtype)


def compile_for(dtype: torch.dtype) -> None:
    """Makes the kernels ready: compiled now, unless they are in memory or in the disk cache.

    Raises:
        DeviceError: when they cannot be compiled here.
    """
    _kernel("color_sums")
    _kernel(_name(dtype))


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return f"color_{str(dtype).removeprefix('torch.')}"


def _kernel(name: str) -> Any:
    return kernel("clip_color.cu", name)


def pack(clips: Sequence[Clip]) -> tuple[bytearray, tuple[int, int, int]]:
    """(the kernels' argument, the grid)."""
    buffer = bytearray(_BATCH_BYTES)
    first_frame, (height, width) = 0, clips[0].size
    for number, clip in enumerate(clips):
        _CLIP.pack_into(
            buffer, number * _CLIP.size, clip.rgb, clip.sums, clip.out, *clip.strides, *clip.scale, clip.steps,
            clip.is_float, width, height * width, clip.sums_a_frame, first_frame, 0,
        )  # fmt: skip
        first_frame += clip.frames
    _COUNTS.pack_into(buffer, MAX_CLIPS * _CLIP.size, len(clips), first_frame)
    return buffer, (blocks_of(clips[0].size), first_frame, 1)
