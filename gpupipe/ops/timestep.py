"""Sines and cosines of a time at geometrically spaced frequencies (Vaswani et al. 2017), as diffusion models take a time."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from gpupipe.device.jit import jit, launch, serves, tl
from gpupipe.errors import ConfigError
from gpupipe.ops import checks, settings
from gpupipe.ops.layout import ceil_div
from gpupipe.ops.op import Op
from gpupipe.ops.settings import Precision


def reference(
    times: torch.Tensor, dim: int, cosine_first: bool, shift: float, scale: float, period: float, dtype: torch.dtype
) -> torch.Tensor:
    """The same in plain torch, differentiable."""
    half = dim // 2
    widest = torch.float64 if times.dtype == torch.float64 else torch.float32
    exponent = torch.arange(half, dtype=widest, device=times.device) * (-math.log(period) / (half - shift))
    phase = scale * (times.to(widest)[..., None] * exponent.exp())
    parts = [phase.sin(), phase.cos()]
    y = torch.cat(parts[::-1] if cosine_first else parts, -1)
    return (torch.nn.functional.pad(y, (0, 1)) if dim % 2 else y).to(dtype)


@jit
def _frequency(column, step, rest):
    """exp((step + rest) * column), worked out in float64: the phase multiplies its error by the time."""
    return tl.exp(column.to(tl.float64) * step + column.to(tl.float64) * rest).to(tl.float32)


@jit
def _waves(phase):
    """Sine and cosine of any phase: quarter turns are taken off in float64, and Taylor's series serves the rest, to pi / 4."""
    wide = phase.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - turns * 1.5707963267948966).to(tl.float32)
    quarter = (turns - 4.0 * tl.floor(turns * 0.25)).to(tl.int32)
    s = r * r
    sine = r * (1.0 + s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880)))))
    cosine = 1.0 + s * (-1 / 2 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320 - s * (1 / 3628800)))))
    odd = quarter % 2 == 1
    first = tl.where(odd, cosine, sine)
    second = tl.where(odd, sine, cosine)
    return tl.where(quarter >= 2, -first, first), tl.where((quarter == 1) | (quarter == 2), -second, second)


@jit
def timestep_forward(
    times_ptr, y_ptr, count, step, rest, scale, DIM: tl.constexpr, COSINE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Program (r, c) makes ``COLS`` sines and as many cosines of ``ROWS`` times."""
    half: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    time = tl.load(times_ptr + row, mask=row < count, other=0.0).to(tl.float32)
    phase = scale * (time[:, None] * _frequency(column, step, rest)[None, :])
    mask = (row < count)[:, None] & (column < half)[None, :]
    y_row = y_ptr + row[:, None] * DIM
    y_type = y_ptr.dtype.element_ty
    sine, cosine = _waves(phase)
    tl.store(y_row + COSINE * half + column[None, :], sine.to(y_type), mask=mask)
    tl.store(y_row + (1 - COSINE) * half + column[None, :], cosine.to(y_type), mask=mask)
    if DIM % 2:
        tl.store(y_row + DIM - 1 + column[None, :], tl.zeros((ROWS, COLS), y_type), mask=mask & (column == 0)[None, :])


@jit
def timestep_backward(
    dy_ptr, times_ptr, dtimes_ptr, count, step, rest, scale,
    DIM: tl.constexpr, COSINE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program r makes the gradient of ``ROWS`` times."""
    half: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    time = tl.load(times_ptr + row, mask=row < count, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    dy_row = dy_ptr + row[:, None] * DIM
    for first in range(0, half, COLS):
        column = first + tl.arange(0, COLS)
        frequency = _frequency(column, step, rest)[None, :]
        phase = scale * (time[:, None] * frequency)
        mask = (row < count)[:, None] & (column < half)[None, :]
        dsine = tl.load(dy_row + COSINE * half + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dcosine = tl.load(dy_row + (1 - COSINE) * half + column[None, :], mask=mask, other=0.0).to(tl.float32)
        sine, cosine = _waves(phase)
        total += tl.where(mask, (dsine * cosine - dcosine * sine) * (scale * frequency), 0.0)
    tl.store(dtimes_ptr + row, tl.sum(total, 1).to(dtimes_ptr.dtype.element_ty), mask=row < count)


_ROWS, _COLS = 4, 128


def _step(dim: int, shift: float, period: float) -> tuple[float, float]:
    """By which the logarithm of the frequency changes with a column: as float32, and the rest of it."""
    step = -math.log(period) / (dim // 2 - shift)
    near: float = struct.unpack("f", struct.pack("f", step))[0]
    return near, step - near


def _body(
    times: torch.Tensor, dim: int, cosine_first: bool, shift: float, scale: float, period: float, dtype: torch.dtype
) -> torch.Tensor:
    y = torch.empty((*times.shape, dim), dtype=dtype, device=times.device)
    count = times.numel()
    if count:
        launch(
            timestep_forward, (ceil_div(count, _ROWS), ceil_div(dim // 2, _COLS)),
            times.contiguous(), y, count, *_step(dim, shift, period), scale,
            DIM=dim, COSINE=cosine_first, ROWS=_ROWS, COLS=_COLS, num_warps=4,
        )  # fmt: skip
    return y


def _fake(
    times: torch.Tensor, dim: int, cosine_first: bool, shift: float, scale: float, period: float, dtype: torch.dtype
) -> torch.Tensor:
    return times.new_empty((*times.shape, dim), dtype=dtype)


def _backward_body(
    dy: torch.Tensor, times: torch.Tensor, cosine_first: bool, shift: float, scale: float, period: float
) -> torch.Tensor:
    dtimes = torch.empty(times.shape, dtype=times.dtype, device=times.device)
    count, dim = times.numel(), dy.shape[-1]
    if count:
        launch(
            timestep_backward, (ceil_div(count, _ROWS),),
            dy.contiguous(), times.contiguous(), dtimes, count, *_step(dim, shift, period), scale,
            DIM=dim, COSINE=cosine_first, ROWS=_ROWS, COLS=_COLS, num_warps=4,
        )  # fmt: skip
    return dtimes


def _backward_fake(
    dy: torch.Tensor, times: torch.Tensor, cosine_first: bool, shift: float, scale: float, period: float
) -> torch.Tensor:
    return times.new_empty(times.shape)


backward_op = Op("timestep_embedding_backward", _backward_body, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.rest = inputs[2:6]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (times,) = ctx.saved_tensors
    return backward_op(dy, times, *ctx.rest), None, None, None, None, None, None


timestep_op = Op("timestep_embedding", _body, _fake, _setup, _backward)


def timestep_embedding(
    timesteps: torch.Tensor,
    dim: int,
    *,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1.0,
    scale: float = 1.0,
    max_period: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Sines, then cosines, of ``scale * t * max_period ** (-i / (dim // 2 - downscale_freq_shift))`` for i below dim // 2.

    The arguments mean what they mean in diffusers' ``get_timestep_embedding``. An odd ``dim`` ends with a zero. On the CPU and
    for float64 it is plain torch.

    Args:
        timesteps: any shape: one a sample (B,) or one a token (B, N); any floating or integer type.
        dim: of the result's last dimension, at least 2.
        flip_sin_to_cos: cosines first.
        downscale_freq_shift: see above; less than dim // 2.
        scale: of the phase.
        max_period: above 0.
        dtype: of the result; all is worked out in float32, and the frequencies in float64.
        precision: see :func:`gpupipe.ops.precision`; all modes are alike.

    Returns:
        (..., dim), of type ``dtype``.

    Raises:
        ShapeError: when timesteps is no tensor of numbers.
        ConfigError: for another value outside its range.
    """
    if not isinstance(timesteps, torch.Tensor) or timesteps.is_complex() or timesteps.dtype == torch.bool:
        raise checks.refuse("timesteps", timesteps, "a tensor of a floating or integer type")
    if dim < 2:
        raise ConfigError(f"dim is {dim}", fix="dim must be 2 or more")
    if not downscale_freq_shift < dim // 2:
        raise ConfigError(f"downscale_freq_shift is {downscale_freq_shift}", fix=f"it must be below {dim // 2}, half of dim")
    if not max_period > 0:
        raise ConfigError(f"max_period is {max_period}", fix="it must be above 0")
    if dtype not in checks.FLOATS:
        raise ConfigError(f"dtype is {dtype}", fix="choose torch.float32, bfloat16, float16 or float64")
    settings.mode(precision)
    chosen = flip_sin_to_cos, float(downscale_freq_shift), float(scale), float(max_period), dtype
    wanted = settings.kernel_wanted("timestep_embedding") and serves(timesteps.device)
    if not wanted or torch.float64 in (timesteps.dtype, dtype):
        return reference(timesteps, dim, *chosen)
    return timestep_op(timesteps, dim, *chosen)  # type: ignore[no-any-return]
