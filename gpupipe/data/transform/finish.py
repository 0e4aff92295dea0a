"""Changes of colour on CUDA, together with normalisation, dtype and layout: what ``cuda_src/clip_color.cu`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpupipe.data.transform.params import ColorOp
from gpupipe.data.transform.picture import CHANNELS, Scale
from gpupipe.device.module import kernel, launch

KINDS = ("brightness", "saturation", "grayscale", "channel_drop", "contrast", "hue", "posterize", "solarize")
"""In the order of the source's numbers. The others need more of a frame than a pixel and its mean."""
MAX_STEPS = 8
THREADS = 256
_PIXELS_A_THREAD = 4
_MOST_BLOCKS = 128
"""Of a frame: their sums are added by one thread."""

JOB = np.dtype(
    [("rgb", "u8"), ("sums", "u8"), ("out", "u8")]
    + [(name, "i8") for name in ("stride_time", "stride_channel", "stride_row", "stride_column")]
    + [("gain", "f4", (CHANNELS,)), ("bias", "f4", (CHANNELS,))]
    + [(name, "i4") for name in ("width", "pixels", "blocks", "clamp", "steps", "contrast")]
    + [("kind", "i4", (MAX_STEPS,)), ("value", "f4", (MAX_STEPS,))],
    align=True,
)


def serves(ops: Sequence[ColorOp]) -> bool:
    """Whether the kernel has all of these, and at most one that needs the frames' means."""
    names = [op.name for op in ops]
    return len(names) <= MAX_STEPS and set(names) <= set(KINDS) and names.count("contrast") <= 1


def finish(rgb: torch.Tensor, ops: Sequence[ColorOp], scale: Scale, out: torch.Tensor, *, clamp: bool) -> None:
    """Does ``ops`` in order and writes RGB · gain + bias, on the current stream; the same bits every time.

    Args:
        rgb: (T, 3, H, W) float32, contiguous, on a CUDA device.
        ops: such that :func:`serves` them.
        scale: (gain, bias) of each channel.
        out: (T, 3, H, W) of any strides on the same device; float32, float16, bfloat16, or uint8, which gets values rounded to
            nearest and held within its range.
        clamp: whether RGB is held within [0, 1] after each of ``ops``.
    """
    frames, _, height, width = rgb.shape
    job = np.zeros((), JOB)
    names = [op.name for op in ops]
    blocks = max(1, min(_MOST_BLOCKS, height * width // (THREADS * _PIXELS_A_THREAD)))
    job["rgb"], job["out"] = rgb.data_ptr(), out.data_ptr()
    for name, stride in zip(("stride_time", "stride_channel", "stride_row", "stride_column"), out.stride(), strict=True):
        job[name] = stride
    job["gain"], job["bias"] = scale
    job["width"], job["pixels"], job["blocks"], job["clamp"] = width, height * width, blocks, clamp
    job["steps"], job["contrast"] = len(ops), names.index("contrast") if "contrast" in names else -1
    for step, op in enumerate(ops):
        job["kind"][step], job["value"][step] = KINDS.index(op.name), op.value
    grid, block, shared = (blocks, frames, 1), (THREADS, 1, 1), 4 * THREADS
    if "contrast" in names:
        sums = torch.empty((frames, blocks), dtype=torch.float32, device=rgb.device)
        job["sums"] = sums.data_ptr()
        launch(_kernel("color_sums"), grid, block, [job[()]], shared_bytes=shared)
    launch(_kernel(f"color_{str(out.dtype).removeprefix('torch.')}"), grid, block, [job[()]], shared_bytes=shared)


def compile_for(dtype: torch.dtype) -> None:
    """Makes the kernels ready: compiled now, unless they are in memory or in the disk cache.

    Raises:
        DeviceError: when they cannot be compiled here.
    """
    _kernel("color_sums")
    _kernel(f"color_{str(dtype).removeprefix('torch.')}")


def _kernel(name: str) -> Any:
    return kernel("clip_color.cu", name)
