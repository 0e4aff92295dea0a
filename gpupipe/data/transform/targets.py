"""What goes with a clip's pixels, moved as they were: masks, boxes, points and optical flow of the displayed frames.

All places are (x, y) in pixels, with pixel k from k to k + 1. Changes of colour, blur and erasing touch none of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gpupipe.data.transform import affine
from gpupipe.data.transform.params import Size, TransformParams
from gpupipe.errors import GraphError

Move = Callable[[torch.Tensor, TransformParams], torch.Tensor]


def masks(values: torch.Tensor, params: TransformParams, size: Size, *, fill: float = 0) -> torch.Tensor:
    """(..., H, W) of any dtype to (..., height, width) of ``size``: the value of the pixel that each output's centre lies in,
    ``fill`` where that is outside of the frame.

    With parameters of each frame, the first dimension is T; so for the functions below.

    Raises:
        GraphError: when ``values`` are no tensor, or not of a frame that ``params`` fit.
    """

    def move(values: torch.Tensor, each: TransformParams) -> torch.Tensor:
        height, width = _frame(values, each)
        rows, columns = size
        centres = np.stack([np.tile(np.arange(columns) + 0.5, rows), np.repeat(np.arange(rows) + 0.5, columns)])
        x, y = _apply(each.matrix(size), centres)
        if each.affine is None:  # inside, but for rounding
            x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
        inside = torch.from_numpy((x >= 0) & (x < width) & (y >= 0) & (y < height)).to(values.device)
        place = np.clip(np.floor(y), 0, height - 1) * width + np.clip(np.floor(x), 0, width - 1)
        picked = values.flatten(-2)[..., torch.from_numpy(place.astype(np.int64)).to(values.device)]
        return torch.where(inside, picked, torch.full_like(picked, fill)).view(*values.shape[:-2], *size)

    return _each(values, params, move)


def points(values: torch.Tensor, params: TransformParams, size: Size, *, frame: Size | None = None) -> torch.Tensor:
    """(..., 2) floating-point places (x, y) in frames of size ``frame`` to places in the output; those cut off lie outside.

    Raises:
        GraphError: as :func:`masks`.
    """
    _check_places(values, params, 2, frame)

    def move(values: torch.Tensor, each: TransformParams) -> torch.Tensor:
        return _transformed(values, np.linalg.inv(each.matrix(size)).astype(np.float64), -1)

    return _each(values, params, move)


def boxes(values: torch.Tensor, params: TransformParams, size: Size, *, frame: Size | None = None) -> torch.Tensor:
    """(..., 4) floating-point boxes (x1, y1, x2, y2) to the upright boxes around them in the output, cut at its edges; a box
    that is not in the output has no area.

    Raises:
        GraphError: as :func:`masks`.
    """
    _check_places(values, params, 4, frame)

    def move(values: torch.Tensor, each: TransformParams) -> torch.Tensor:
        corners = torch.stack([values[..., [0, 1]], values[..., [2, 1]], values[..., [0, 3]], values[..., [2, 3]]], -2)
        moved = points(corners, each, size, frame=each.frame)
        most = torch.tensor(size[::-1], dtype=values.dtype, device=values.device)
        moved = torch.minimum(moved.clamp(min=0), most)
        return torch.cat([moved.amin(-2), moved.amax(-2)], -1)

    return _each(values, params, move)


def flow(values: torch.Tensor, params: TransformParams, size: Size) -> torch.Tensor:
    """(..., 2, H, W) floating-point optical flow (x, y) in pixels a frame to (..., 2, height, width): resampled with
    antialias, and each vector turned and scaled as the picture was; 0 outside of the frame.

    Raises:
        GraphError: as :func:`masks`.
    """

    def move(values: torch.Tensor, each: TransformParams) -> torch.Tensor:
        height, width = _frame(values, each)
        top, left, height, width = each.bounds if each.affine is None else (0, 0, height, width)
        place = each.matrix(size)
        turn = np.eye(3)
        turn[:2, :2] = np.linalg.inv(place[:2, :2])
        place[:2, 2] -= left, top
        moved, cover = affine.sample(values[..., top : top + height, left : left + width], place, size, antialias=True)
        moved = torch.where(cover > 0, moved / torch.where(cover > 0, cover, torch.ones_like(cover)), torch.zeros_like(moved))
        return _transformed(moved, turn, -3)

    return _each(values, params, move)


def _transformed(values: torch.Tensor, matrix: NDArray[np.float64], axis: int) -> torch.Tensor:
    """(x, y) along an axis, through a (3, 3) matrix. Written out: on CUDA torch may multiply matrices in TF32."""
    x, y = values.unbind(axis)
    return torch.stack([a * x + b * y + c for a, b, c in matrix[:2].tolist()], axis)


def _frame(values: torch.Tensor, params: TransformParams) -> Size:
    """(H, W) of the frames that ``values`` are of."""
    if values.ndim < 2:
        raise GraphError(f"values of shape {tuple(values.shape)} are no frames", fix="give (…, H, W)")
    height, width = int(values.shape[-2]), int(values.shape[-1])
    top, left, rows, columns = params.bounds
    if params.frame is None:
        if top + rows > height or left + columns > width:
            raise GraphError(f"values of a frame of {height}x{width} do not fit parameters that read {params.bounds}")
    elif (height, width) != params.frame:
        raise GraphError(
            f"values of frames of {height}x{width}, these parameters are of frames of {_as_text(params.frame)}", fix=_RESIZED
        )
    return height, width


_RESIZED = "give those of the frames as displayed; where before= changes the size, those of the frames that it gives"


def _as_text(size: Size) -> str:
    return f"{size[0]}x{size[1]} (height x width)"


def _check_tensor(values: torch.Tensor) -> None:
    if not isinstance(values, torch.Tensor):
        raise GraphError(f"values are a {type(values).__name__}, not a tensor", fix="torch.as_tensor(values) makes one")


def _check_places(values: torch.Tensor, params: TransformParams, numbers: int, frame: Size | None) -> None:
    """Raises: GraphError: for what is no places in the frames that ``params`` are of."""
    _check_tensor(values)
    if values.ndim == 0 or values.shape[-1] != numbers or not values.is_floating_point():
        what = "(…, 2): x, y" if numbers == 2 else "(…, 4): x1, y1, x2, y2"
        raise GraphError(f"values of {values.dtype} {tuple(values.shape)} are no places", fix=f"give floating-point {what}")
    if frame is None and params.displayed is not None:
        assert params.frame is not None
        raise GraphError(
            f"these parameters are of frames of {_as_text(params.frame)}, as before= gave them; the video shows "
            f"{_as_text(params.displayed)}",
            fix="move the places as before= moved the pixels, and say which frames they are in: frame=(height, width)",
        )
    if frame is not None and params.frame is not None and tuple(frame) != params.frame:
        raise GraphError(
            f"places in frames of {_as_text(frame)}, these parameters are of frames of {_as_text(params.frame)}", fix=_RESIZED
        )


def _apply(matrix: NDArray[np.float64], places: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = matrix[:2, :2] @ places + matrix[:2, 2:]
    return x, y


def _each(values: torch.Tensor, params: TransformParams, move: Move) -> torch.Tensor:
    _check_tensor(values)
    if not params.frames:
        return move(values, params)
    count = len(values) if values.ndim else 0
    if count != len(params.frames):
        fix = "each frame has its own parameters: the first dimension is T"
        raise GraphError(f"values of {count} frames for parameters of {len(params.frames)}", fix=fix)
    return torch.stack([move(value, each) for value, each in zip(values, params.frames, strict=True)])
