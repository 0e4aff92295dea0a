"""A linear layer with its activation, dropout and residual as one op, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops import activations
from gpupipe.ops.activation.forward import launch_act
from gpupipe.ops.linear.products import back_through_act, back_through_product, in_type, pre_and_act, product, weight_gradient
from gpupipe.ops.op import Op


def _body(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    narrow: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    keep: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and, if it is to be kept, the pre-activation. ``narrow`` is the weight in the type of x, if it has another."""
    weight, bias = in_type(x, weight, narrow, bias)
    if residual is None and seed is None:
        pre, y = pre_and_act(x, weight, bias, act, keep, conservative)
    else:
        pre = product(x, weight, bias)
        y = launch_act(pre, None, None, residual, seed, p, act, conservative)
    return y, pre if pre is not None and keep and act != "none" else x.new_empty(0)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    narrow: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    keep: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = weight.shape[0]
    size = wide // 2 if activations.split(act)[1] else wide
    y = x.new_empty((*x.shape[:-1], size), dtype=x.dtype if residual is None else residual.dtype)
    return y, x.new_empty((*x.shape[:-1], wide) if keep and act != "none" else (0,))


def _backward_body(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
    weight_type: torch.dtype,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and bias. The weight comes in the type of x, its gradient goes in ``weight_type``."""
    if act != "none" and pre is None:
        pre = product(x, *in_type(x, weight, None, bias))
    dpre, dbias, _ = back_through_act(
        dy, pre, bias if needs[2] else None, act, conservative, seed=seed, p=p, x_type=x.dtype
    )  # fmt: skip
    dx = back_through_product(dpre, weight) if needs[0] else None
    return _given(dy, dx, weight_gradient(dpre, x, weight_type) if needs[1] else None, dbias)


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
    weight_type: torch.dtype,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _given(
        dy,
        x.new_empty(x.shape) if needs[0] else None,
        weight.new_empty(weight.shape, dtype=weight_type) if needs[1] else None,
        bias.new_empty(bias.shape) if needs[2] and bias is not None else None,
    )


def _given(like: torch.Tensor, *made: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors stand for gradients that nobody asked for."""
    return tuple(like.new_empty(0) if value is None else value for value in made)  # type: ignore[return-value]


linear_act_backward_op = Op("linear_act_backward", _backward_body, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, bias, narrow, _, seed, p, act, keep, conservative = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    kept = output[1] if keep and act != "none" else None
    ctx.save_for_backward(x, weight if narrow is None else narrow, bias, kept, seed)
    ctx.rest = p, act, conservative, weight.dtype


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    x, weight, bias, pre, seed = ctx.saved_tensors
    needs = ctx.needs_input_grad
    given: tuple[torch.Tensor | None, ...] = (None, None, None)
    if any(needs[:3]):
        given = linear_act_backward_op(dy, x, weight, bias, pre, seed, *ctx.rest, list(needs[:3]))
    given = tuple(value if need else None for value, need in zip(given, needs[:3], strict=True))
    return (*given, None, dy if needs[4] else None, None, None, None, None, None)


linear_act_op = Op("linear_act", _body, _fake, _setup, _backward)
