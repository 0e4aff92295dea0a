"""Norm and turning of queries and keys as an op, with its gradient; and on a packed tensor, whose values pass as a view."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.op import Op
from gpupipe.ops.packed import sides
from gpupipe.ops.rotary.backward import launch_backward
from gpupipe.ops.rotary.forward import launch_forward


def _fake(
    x: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    prefix: int,
    suffix: int,
    interleaved: bool,
    norm: int,
    eps: float,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = sides(x)[0].shape
    return x.new_empty(shape), x.new_empty(shape)


def _backward_fake(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor | None,
    x: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    prefix: int,
    suffix: int,
    interleaved: bool,
    norm: int,
    eps: float,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    summed = (x.shape[-2] * x.shape[-1] if norm == 2 else x.shape[-1]) if need_weights and norm else 0
    dk_shape = (0,) if k is None else k.shape
    return x.new_empty(x.shape), x.new_empty(dk_shape), x.new_empty((2, summed) if summed else (0,), dtype=torch.float32)


qk_backward_op = Op("qk_norm_rope_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:13]


def _gradients(
    ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """For all inputs of the op."""
    x, k, q_weight, k_weight, table = ctx.saved_tensors
    needs = ctx.needs_input_grad
    like = sides(x)[0]
    dq = torch.zeros_like(like) if dq is None else dq
    dk = torch.zeros_like(like) if dk is None else dk
    dx, dk, dweights = qk_backward_op(
        dq, dk, dv, x, k, q_weight, k_weight, table, *ctx.rest, bool(needs[2] or needs[3])
    )  # fmt: skip
    given = [dx, dk, None, None]
    for place, weight in ((2, q_weight), (3, k_weight)):
        if needs[place]:
            given[place] = dweights[place - 2].to(weight.dtype)
    return (*(value if need else None for value, need in zip(given, needs, strict=False)), *[None] * 10)


def _backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return _gradients(ctx, dq, dk, None)


qk_op = Op("qk_norm_rope", launch_forward, _fake, _setup, _backward)


class PackedNormRope(torch.autograd.Function):
    """The op on a packed tensor, with the values.

    An op may not return a view. A view taken outside would give the values' gradient a pass of its own and a sum over all
    three; here it goes into the packed gradient in the same launch.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = qk_op(*inputs)
        _setup(ctx, inputs, made)
        return (*made, inputs[0].select(2, 2))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, *gradients)
