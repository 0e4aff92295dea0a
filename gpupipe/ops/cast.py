"""A factor and a change of type in one pass: x * factor, stored as another type."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.device.autotune import Config, choose, machine, streaming_us
from gpupipe.device.jit import jit, launch, serves, tl
from gpupipe.errors import ConfigError
from gpupipe.ops import checks, settings
from gpupipe.ops.layout import bucket, ceil_div, row_length, rows, wide
from gpupipe.ops.op import Op
from gpupipe.ops.settings import Precision


def reference(x: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype, conservative: bool) -> torch.Tensor:
    """The same in plain torch, differentiable; ``conservative`` rounds the product to the type of x first."""
    widest = torch.promote_types(x.dtype, torch.float32)
    if isinstance(factor, torch.Tensor):
        factor = factor.reshape(()).to(widest)
    y = x.to(widest) * factor
    return (y.to(x.dtype) if conservative else y).to(dtype)


@jit
def scale_cast_forward(
    x_ptr, factor_ptr, y_ptr, factor, count, size, across, inner, x_outer, x_inner,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Tile p of ``count`` rows of ``size`` elements; one row where all elements lie side by side."""
    row = tl.program_id(0).to(tl.int64) // across * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0).to(tl.int64) % across * COLS + tl.arange(0, COLS))[None, :]
    mask = (row < count)[:, None] & (columns < size)
    x_row = x_ptr + (row // inner * x_outer + row % inner * x_inner)[:, None]
    y = wide(x_row + columns, mask) * factor
    if factor_ptr is not None:
        y *= tl.load(factor_ptr).to(tl.float32)
    if ROUND:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row[:, None] * size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def _candidates(size: int) -> list[dict[str, int]]:
    fits = 1 << (size - 1).bit_length()
    return [
        {"ROWS": max(1, 128 * each // across), "COLS": across, "num_warps": 4}
        for each in (8, 16, 32)
        for across in dict.fromkeys(min(width, fits) for width in (128 * each, 512))
    ]


def _body(
    x: torch.Tensor, factor: torch.Tensor | None, times: float, dtype: torch.dtype, conservative: bool
) -> torch.Tensor:  # fmt: skip
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return y
    if x.is_contiguous():
        x = x.view(1, -1)
    x, outer, inner = rows(x)
    size = x.shape[-1]
    count = x.numel() // size

    def run(config: Config) -> None:
        across = ceil_div(size, config["COLS"])
        launch(
            scale_cast_forward, (ceil_div(count, config["ROWS"]) * across,),
            x, factor, y, times, count, size, across, row_length(x), outer, inner, ROUND=conservative, **config,
        )  # fmt: skip

    def cost(config: Config) -> float:
        elements = config["ROWS"] * config["COLS"]
        item = x.element_size() + y.element_size()
        return (1 + 40 / elements) * streaming_us(
            machine(x.device), total_bytes=x.numel() * item, programs=-(-x.numel() // elements),
            tile_bytes=elements * x.element_size(), warps=4, registers=20 + elements // 64,
        )  # fmt: skip

    key = (str(x.dtype), str(dtype), bucket(count), bucket(size), conservative)
    run(choose("scale_cast", key, x.device, lambda: _candidates(size), cost, run))
    return y


def _fake(
    x: torch.Tensor, factor: torch.Tensor | None, times: float, dtype: torch.dtype, conservative: bool
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, factor, times, _, _ = inputs
    ctx.save_for_backward(x if factor is not None and factor.requires_grad else None, factor)
    ctx.rest = times, x.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, factor = ctx.saved_tensors
    times, dtype = ctx.rest
    dx = scale_cast_op(dy, factor, times, dtype, False) if ctx.needs_input_grad[0] else None
    dfactor = None
    if ctx.needs_input_grad[1]:
        dfactor = ((dy.float() * x.float()).sum() * times).to(factor.dtype).reshape(factor.shape)
    return dx, dfactor, None, None, None


scale_cast_op = Op("scale_cast", _body, _fake, _setup, _backward)


def scale_cast(
    x: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype, *, precision: Precision | None = None
) -> torch.Tensor:
    """x * factor as another type, in one pass.

    On the CPU and for float64 it is plain torch.

    Args:
        x: any shape and strides, float32, bfloat16, float16 or float64. Elements without gaps between them, in whatever order
            of dimensions, are taken as they lie, and in eager mode the result lies likewise.
        factor: a number, or a tensor of one element on the device of x, read there (a loss scale, say). It may have a gradient.
        dtype: of the result: float32, bfloat16, float16 or float64. What is beyond its range becomes infinite.
        precision: see :func:`gpupipe.ops.precision`. Conservative rounds the product to the type of x before it is cast;
            otherwise it is rounded once. ``"fast"`` adds nothing.

    Returns:
        The shape of x, of type ``dtype``.

    Raises:
        ShapeError: when x or factor does not fit.
        ConfigError: for a ``dtype`` that is no floating type.
    """
    checks.floating("x", x)
    if dtype not in checks.FLOATS:
        raise ConfigError(f"dtype is {dtype}", fix="choose torch.float32, bfloat16, float16 or float64")
    if isinstance(factor, torch.Tensor):
        checks.floating("factor", factor, like=x)
        if factor.numel() != 1:
            raise checks.refuse("factor", factor, "a number or a tensor of one element")
    conservative = settings.mode(precision) == "conservative"
    if not settings.kernel_wanted("scale_cast") or not serves(x.device) or torch.float64 in (x.dtype, dtype):
        return reference(x, factor, dtype, conservative)
    tensor, times = (factor, 1.0) if isinstance(factor, torch.Tensor) else (None, float(factor))
    if x.is_contiguous() or torch.compiler.is_compiling():
        return scale_cast_op(x, tensor, times, dtype, conservative)  # type: ignore[no-any-return]
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    lying = x.permute(order)
    if not lying.is_contiguous():
        return scale_cast_op(x, tensor, times, dtype, conservative)  # type: ignore[no-any-return]
    y: torch.Tensor = scale_cast_op(lying, tensor, times, dtype, conservative)
    return y.permute(sorted(range(x.dim()), key=order.__getitem__))
