"""A norm and the linear layer behind it as one op: the normalised rows are made again in the backward, not kept."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.layout import matrix
from gpupipe.ops.linear.products import back_through_product, bias_gradient, in_type, product, weight_gradient
from gpupipe.ops.norms.backward import launch_backward
from gpupipe.ops.norms.forward import launch_forward
from gpupipe.ops.op import Op


def _body(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    narrow: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    rms: bool,
    factor: float,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and mean (empty for RMS) and 1 / deviation of each row.

    ``narrow`` is the weight in the type of the result, if it has another.
    """
    normal, _, mean, rstd = launch_forward(
        x, None, None, None, 0.0, norm_weight, norm_bias, scale, shift, eps, rms, conservative
    )  # fmt: skip
    normal = normal.to(weight.dtype if narrow is None else narrow.dtype)
    weight, bias = in_type(normal, weight, narrow, bias)
    if factor == 1:
        return product(normal, weight, bias), mean, rstd
    if conservative:
        return product(normal, weight, bias).mul_(factor), mean, rstd
    flat = matrix(normal)
    start = weight.new_empty(weight.shape[0]) if bias is None else bias
    y = torch.addmm(start, flat, weight.t(), beta=0.0 if bias is None else factor, alpha=factor)
    return y.view(*x.shape[:-1], weight.shape[0]), mean, rstd


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    narrow: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    rms: bool,
    factor: float,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = x.numel() // x.shape[-1]
    return (
        (weight if narrow is None else narrow).new_empty((*x.shape[:-1], weight.shape[0])),
        x.new_empty(0 if rms else count, dtype=torch.float32),
        x.new_empty(count, dtype=torch.float32),
    )


def _backward_body(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    rms: bool,
    factor: float,
    conservative: bool,
    weight_type: torch.dtype,
    needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Gradients of x, weight, bias, norm_weight, norm_bias, scale and shift. The weight comes in the type of the product, its
    gradient goes in ``weight_type``."""
    need_x, need_weight, need_bias, *need_norm = needs
    given: list[torch.Tensor | None] = [None] * 7
    if need_bias and bias is not None:
        given[2] = bias_gradient(dy, bias, conservative)
    if need_weight:
        normal = launch_forward(
            x, None, None, None, 0.0, norm_weight, norm_bias, scale, shift, eps, rms, conservative
        )[0]  # fmt: skip
        given[1] = weight_gradient(dy, normal.to(weight.dtype), weight_type)
        del normal
    if need_x or any(need_norm):
        dnormal = back_through_product(dy, weight)
        if factor != 1:
            dnormal.mul_(factor)
        dx, _, _, *rest = launch_backward(
            dnormal, None, x, None, None, None, 0.0, norm_weight, norm_bias, scale, shift, mean, rstd, rms, conservative,
            [need_x, False, False, *need_norm],
        )  # fmt: skip
        given[0] = dx if need_x else None
        given[3:] = rest
    for place in (1, 2):
        if (made := given[place]) is not None and factor != 1:
            made.mul_(factor)
    return tuple(dy.new_empty(0) if made is None else made for made in given)  # type: ignore[return-value]


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    rms: bool,
    factor: float,
    conservative: bool,
    weight_type: torch.dtype,
    needs: list[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    given = (x, weight, bias, norm_weight, norm_bias, scale, shift)
    return tuple(  # type: ignore[return-value]
        dy.new_empty(0)
        if value is None or not need
        else value.new_empty(value.shape, dtype=weight_type if value is weight else value.dtype)
        for value, need in zip(given, needs, strict=True)
    )


norm_linear_backward_op = Op("norm_linear_backward", _backward_body, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, bias, narrow, *norm = inputs[:8]
    _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight if narrow is None else narrow, bias, *norm, mean, rstd)
    ctx.rest = *inputs[8:], weight.dtype


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 12
    layer, norm = ctx.needs_input_grad[:3], ctx.needs_input_grad[4:8]
    needs = [*layer, *norm]
    given = norm_linear_backward_op(dy, *ctx.saved_tensors, *ctx.rest, needs)
    given = [value if need else None for value, need in zip(given, needs, strict=True)]
    return (*given[:3], None, *given[3:], None, None, None, None)


norm_linear_op = Op("norm_linear", _body, _fake, _setup, _backward)
