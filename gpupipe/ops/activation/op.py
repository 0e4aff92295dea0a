"""The pass as an op, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops import activations
from gpupipe.ops.activation.backward import launch_act_backward
from gpupipe.ops.activation.forward import launch_act
from gpupipe.ops.op import Op


def _body(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    return launch_act(x, bias, gate, residual, seed, p, act, conservative)


def _fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    size = x.shape[-1] // 2 if activations.split(act)[1] else x.shape[-1]
    return x.new_empty((*x.shape[:-1], size), dtype=x.dtype if residual is None else residual.dtype)


def _backward_body(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    x_type: torch.dtype,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    glu = activations.split(act)[1]
    found = launch_act_backward(
        dy, x, bias, gate, seed, p, act, x_type, conservative, want_x=needs[0] or glu,
        like_bias=bias if needs[1] else None, want_gate=needs[2],
    )  # fmt: skip
    given = [value if need else None for value, need in zip(found[:3], needs, strict=True)]
    dx, dbias, dgate = (dy.new_empty(0) if value is None else value for value in given)
    return dx, dbias, dgate


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    x_type: torch.dtype,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = dy.shape[-1] * (1 + activations.split(act)[1])
    return (
        dy.new_empty((*dy.shape[:-1], size), dtype=x_type) if needs[0] else dy.new_empty(0),
        dy.new_empty(0) if bias is None or not needs[1] else bias.new_empty(bias.shape),
        dy.new_empty(0) if gate is None or not needs[2] else gate.new_empty(gate.shape),
    )


act_backward_op = Op("bias_act_backward", _backward_body, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, gate, _, seed, p, act, conservative = inputs
    kept = x if act != "none" or (gate is not None and gate.requires_grad) else None
    ctx.save_for_backward(kept, bias, gate, seed)
    ctx.rest = p, act, x.dtype, conservative


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, bias, gate, seed = ctx.saved_tensors
    p, act, x_type, conservative = ctx.rest
    needs = ctx.needs_input_grad
    given: tuple[torch.Tensor | None, ...] = (None, None, None)
    if any(needs[:3]):
        given = act_backward_op(dy, x, bias, gate, seed, p, act, x_type, conservative, list(needs[:3]))
    given = tuple(value if need else None for value, need in zip(given, needs[:3], strict=True))
    return (*given, dy if needs[3] else None, None, None, None, None)


act_op = Op("bias_act", _body, _fake, _setup, _backward)
