"""Changes of colour on CUDA that need more of a frame than a pixel and its mean: what ``cuda_src/clip_levels.cu`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpupipe.data.transform import finish
from gpupipe.data.transform.params import ColorOp
from gpupipe.device.module import kernel, launch

KINDS = ("autocontrast", "equalize", "sharpness")
THREADS = 512
_SHARED = {"autocontrast": 4 * 2 * THREADS, "equalize": 4 * (8 * 256 + 256 + 1), "sharpness": 0}
_UNIT = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
JOB = np.dtype([("rgb", "u8"), ("out", "u8"), ("height", "i4"), ("width", "i4"), ("factor", "f4"), ("clamp", "i4")])


def change(
    rgb: torch.Tensor, ops: Sequence[ColorOp], *, clamp: bool, wholly: bool = False
) -> tuple[torch.Tensor, list[ColorOp]]:
    """Does changes of colour in order, on the current stream, the same bits every time: all but the last ones, where ``finish``
    can do these with what follows.

    Args:
        rgb: (T, 3, H, W) float32, contiguous, on a CUDA device; left as it is.
        ops: any.
        clamp: whether RGB is held within [0, 1] after each.
        wholly: none is left.

    Returns:
        RGB after those that were done, and the others.
    """
    run: list[ColorOp] = []
    for op in ops:
        alone = op.name in KINDS
        if alone or not finish.serves([*run, op]):
            rgb, run = _together(rgb, run, clamp=clamp), []
        if alone:
            rgb = _apply(rgb, op, clamp=clamp)
        else:
            run.append(op)
    return (_together(rgb, run, clamp=clamp), []) if wholly else (rgb, run)


def _together(rgb: torch.Tensor, ops: Sequence[ColorOp], *, clamp: bool) -> torch.Tensor:
    if not ops:
        return rgb
    out = torch.empty_like(rgb)
    finish.finish(rgb, ops, _UNIT, out, clamp=clamp)
    return out


def _apply(rgb: torch.Tensor, op: ColorOp, *, clamp: bool) -> torch.Tensor:
    frames, channels, height, width = rgb.shape
    out = torch.empty_like(rgb)
    job = np.array([(rgb.data_ptr(), out.data_ptr(), height, width, op.value, clamp)], JOB)[0]
    grid = (frames * channels, 1, 1)
    if op.name == "sharpness":
        grid = (-(-height * width // THREADS), frames * channels, 1)
    launch(_kernel(op.name), grid, (THREADS, 1, 1), (job,), shared_bytes=_SHARED[op.name])
    return out


def compile_for() -> None:
    """Makes the kernels ready: compiled now, unless they are in memory or in the disk cache.

    Raises:
        DeviceError: when they cannot be compiled here.
    """
    for name in KINDS:
        _kernel(name)


def _kernel(name: str) -> Any:
    return kernel("clip_levels.cu", f"levels_{name}")
