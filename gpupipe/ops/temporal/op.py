"""Attention along time as an op, and its gradient; nothing is kept between the two but what came in."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.op import Op
from gpupipe.ops.packed import sides
from gpupipe.ops.temporal.backward import launch_backward
from gpupipe.ops.temporal.forward import launch_forward


def _fake(
    x: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    mask: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    interleaved: bool,
    norm: bool,
    eps: float,
    causal: bool,
    scale: float,
    conservative: bool,
    fast: bool,
) -> torch.Tensor:
    return x.new_empty(sides(x)[0].shape)


def _backward_fake(
    dout: torch.Tensor,
    x: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    mask: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    interleaved: bool,
    norm: bool,
    eps: float,
    causal: bool,
    scale: float,
    conservative: bool,
    fast: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rest = [x.new_empty((0,) if side is None else side.shape) for side in (k, v)]
    dweights = x.new_empty((2, x.shape[-1]) if need_weights and norm else (0,), dtype=torch.float32)
    return x.new_empty(x.shape), rest[0], rest[1], dweights


temporal_backward_op = Op("temporal_attention_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, k, v, mask, q_weight, k_weight, table = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dk, dv, dweights = temporal_backward_op(
        dout, x, k, v, mask, q_weight, k_weight, table, *ctx.rest, bool(needs[4] or needs[5])
    )  # fmt: skip
    given: list[torch.Tensor | None] = [dx, dk, dv, None, None, None]
    for place, weight in ((4, q_weight), (5, k_weight)):
        if needs[place]:
            given[place] = dweights[place - 4].to(weight.dtype)
    return (*(value if need else None for value, need in zip(given, needs, strict=False)), *[None] * 11)


temporal_op = Op("temporal_attention", launch_forward, _fake, _setup, _backward)
