"""Changes of colour on finished RGB: the definitions of torchvision.transforms.v2.functional for float pictures, for video.

Statistics (contrast's mean, autocontrast's extremes, equalise's histogram) are those of each frame. With ``clamp`` every step
keeps RGB within [0, 1] as torchvision's does; without, brightness, contrast, saturation, hue and sharpness may leave it.
Products and convolutions are written out as sums: on CUDA torch may do its own in TF32, which has 10 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.transform.params import ColorName, ColorOp

GREY = (0.2989, 0.587, 0.114)
"""Shares of R, G and B in torchvision's grey: BT.601's, cut to four digits."""


def fold(ops: Sequence[ColorOp]) -> tuple[NDArray[np.float64], tuple[ColorOp, ...]]:
    """The leading operations that are linear as one (3, 3) matrix over R, G, B, and those that follow."""
    folded = np.eye(3)
    for done, op in enumerate(ops):
        matrix = linear(op)
        if matrix is None:
            return folded, tuple(ops[done:])
        folded = matrix @ folded
    return folded, ()


def linear(op: ColorOp) -> NDArray[np.float64] | None:
    """An operation as a (3, 3) matrix over R, G, B; None for one that is not linear in a pixel's own colour."""
    grey = np.tile(GREY, (3, 1))
    if op.name == "brightness":
        return op.value * np.eye(3)
    if op.name == "saturation":
        return op.value * np.eye(3) + (1 - op.value) * grey
    if op.name == "grayscale":
        return grey
    if op.name == "channel_drop":
        return np.diag((np.arange(3) != op.value).astype(np.float64))
    return None


def adjust(rgb: torch.Tensor, ops: Sequence[ColorOp], *, clamp: bool = True) -> torch.Tensor:
    """Does ``ops`` in order to (T, 3, H, W) floating-point RGB."""
    for op in ops:
        matrix = linear(op)
        if matrix is None:
            rgb = _STEPS[op.name](rgb, op.value)
        else:
            rgb = torch.stack([_weighted(rgb, row) for row in matrix.tolist()], 1)
        rgb = rgb.clamp_(0, 1) if clamp else rgb
    return rgb


def _weighted(rgb: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(T, H, W): the channels' sum with these weights."""
    red, green, blue = rgb.unbind(1)
    return weights[0] * red + weights[1] * green + weights[2] * blue


def _contrast(rgb: torch.Tensor, factor: float) -> torch.Tensor:
    mean = _weighted(rgb, GREY).mean(dim=(1, 2)).view(-1, 1, 1, 1)
    return rgb * factor + mean * (1 - factor)


def _hue(rgb: torch.Tensor, turn: float) -> torch.Tensor:
    """Turns the hue of HSV. Each channel is max - (max - min) w(hue), so nothing is divided by the value, and colours beyond
    [0, 1] turn like those within."""
    most, least = rgb.amax(1), rgb.amin(1)
    span = most - least
    safe = torch.where(span == 0, torch.ones_like(span), span)
    red, green, blue = rgb.unbind(1)
    hue = torch.where(
        most == red,
        (green - blue) / safe,
        torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    channels = []
    for phase in (5, 3, 1):
        k = torch.remainder(phase + hue + 6 * turn, 6)
        channels.append(most - span * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(channels, 1)


def _sharpness(rgb: torch.Tensor, factor: float) -> torch.Tensor:
    """Away from, or towards, the mean of the 3x3 neighbourhood with the centre counted five times; edge pixels stay."""
    if min(rgb.shape[-2:]) <= 2:
        return rgb
    inner = rgb[..., 1:-1, 1:-1]
    smooth = (_slide(_slide(rgb, [1, 1, 1], 2), [1, 1, 1], 3) + 4 * inner) / 13
    out = rgb.clone()
    out[..., 1:-1, 1:-1] = inner * factor + smooth * (1 - factor)
    return out


def _posterize(rgb: torch.Tensor, bits: float) -> torch.Tensor:
    levels = 1 << int(bits)
    return (rgb * levels).floor().clamp_(0, levels - 1) / levels


def _solarize(rgb: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.where(rgb >= threshold, 1 - rgb, rgb)


def _autocontrast(rgb: torch.Tensor, _: float) -> torch.Tensor:
    least, most = rgb.amin((2, 3), keepdim=True), rgb.amax((2, 3), keepdim=True)
    flat = most == least
    least = torch.where(flat, torch.zeros_like(least), least)
    return ((rgb - least) / torch.where(flat, torch.ones_like(most), most - least)).clamp_(0, 1)


def _equalize(rgb: torch.Tensor, _: float) -> torch.Tensor:
    """Histogram equalisation in 256 bins, by the integer rule of Pillow's ImageOps.equalize."""
    # The factor spreads [0, 1] evenly over 0 ... 255, as torchvision's ToDtype(uint8, scale=True) does.
    codes = (rgb.clamp(0, 1) * (256 - 1e-3)).long().flatten(2)
    histogram = torch.zeros((*codes.shape[:2], 256), dtype=torch.long, device=rgb.device)
    histogram.scatter_add_(2, codes, torch.ones_like(codes))
    upto = histogram.cumsum(2)
    last = histogram.gather(2, codes.amax(2, keepdim=True))
    step = (codes.shape[2] - last) // 255
    table = torch.zeros_like(histogram)
    table[..., 1:] = ((upto[..., :-1] + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    equalized = torch.where(step == 0, codes, table.gather(2, codes))
    return equalized.view(rgb.shape).to(rgb.dtype) / 255


_STEPS: dict[ColorName, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "contrast": _contrast,
    "hue": _hue,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}


def blur(rgb: torch.Tensor, kernel_size: int, sigma: float) -> torch.Tensor:
    """Gaussian blur of (T, 3, H, W) along both axes, the picture mirrored at its edges; ``kernel_size`` odd, its half below H
    and W."""
    half = kernel_size // 2
    weights = np.exp(-0.5 * (np.arange(-half, half + 1) / sigma) ** 2)
    taps = (weights / weights.sum()).tolist()
    padded = torch.nn.functional.pad(rgb, [half] * 4, mode="reflect")
    return _slide(_slide(padded, taps, 2), taps, 3)


def _slide(values: torch.Tensor, taps: Sequence[float], axis: int) -> torch.Tensor:
    """The sum of neighbours along an axis with these weights, where all of them are there."""
    length = values.shape[axis] - len(taps) + 1
    total = values.narrow(axis, 0, length) * taps[0]
    for k, weight in enumerate(taps[1:], 1):
        total.add_(values.narrow(axis, k, length), alpha=weight)
    return total
