"""Two linear layers with an activation between them, gate and residual behind them, as one op, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.activation.backward import launch_act_backward
from gpupipe.ops.activation.forward import launch_act
from gpupipe.ops.linear.products import back_through_act, back_through_product, in_type, pre_and_act, product, weight_gradient
from gpupipe.ops.op import Op

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _body(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    narrow1: torch.Tensor | None,
    narrow2: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    act: str,
    keep: bool,
    keep_branch: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the pre-activation and what the gate multiplies, the last two only if they are to be kept.

    ``narrow1`` and ``narrow2`` are the weights in the type of x, where they have another.
    """
    (weight1, bias1), (weight2, bias2) = in_type(x, weight1, narrow1, bias1), in_type(x, weight2, narrow2, bias2)
    pre, hidden = pre_and_act(x, weight1, bias1, act, keep, conservative)
    branch = product(hidden, weight2, bias2)
    y = branch
    if gate is not None or residual is not None:
        y = launch_act(branch, None, gate, residual, None, 0.0, "none", conservative)
    kept = branch if keep_branch and gate is not None else x.new_empty(0)
    return y, x.new_empty(0) if pre is None else pre, kept


def _fake(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    narrow1: torch.Tensor | None,
    narrow2: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    act: str,
    keep: bool,
    keep_branch: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], weight2.shape[0])
    return (
        x.new_empty(shape, dtype=x.dtype if residual is None else residual.dtype),
        x.new_empty((*x.shape[:-1], weight1.shape[0]) if keep else (0,)),
        x.new_empty(shape if keep_branch and gate is not None else (0,)),
    )


def _backward_body(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    gate: torch.Tensor | None,
    pre: torch.Tensor | None,
    branch: torch.Tensor | None,
    act: str,
    conservative: bool,
    weight1_type: torch.dtype,
    weight2_type: torch.dtype,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight1, bias1, weight2, bias2 and gate. Weights come in the type of x, their gradients go in theirs."""
    need_x, need_weight1, need_bias1, need_weight2, need_bias2, need_gate = needs
    dbranch = dy
    dx, dweight1, dbias1, dweight2, dbias2, dgate, dpre = (None,) * 7
    through_gate = gate is not None or dy.dtype != x.dtype
    if through_gate or (need_bias2 and bias2 is not None):
        made, dbias2, dgate, _ = launch_act_backward(
            dy, branch, None, gate, None, 0.0, "none", x.dtype, conservative,
            want_x=through_gate, like_bias=bias2 if need_bias2 else None, want_gate=need_gate,
        )  # fmt: skip
        dbranch = dy if made is None else made
    inner = need_x or need_weight1 or need_bias1
    if inner or need_weight2:
        if pre is None:
            pre = product(x, *in_type(x, weight1, None, bias1))
        if inner:
            dpre, dbias1, hidden = back_through_act(
                back_through_product(dbranch, weight2), pre, bias1 if need_bias1 else None, act, conservative,
                x_type=x.dtype, want_act=need_weight2,
            )  # fmt: skip
        else:
            hidden = launch_act(pre, None, None, None, None, 0.0, act, conservative)
        if need_weight2 and hidden is not None:
            dweight2 = weight_gradient(dbranch, hidden, weight2_type)
        del hidden
    if dpre is not None:
        dx = back_through_product(dpre, weight1) if need_x else None
        dweight1 = weight_gradient(dpre, x, weight1_type) if need_weight1 else None
    return _given(dy, dx, dweight1, dbias1, dweight2, dbias2, dgate)


def _given(like: torch.Tensor, *made: torch.Tensor | None) -> Gradients:
    """Empty tensors stand for gradients that nobody asked for."""
    return tuple(like.new_empty(0) if value is None else value for value in made)  # type: ignore[return-value]


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    gate: torch.Tensor | None,
    pre: torch.Tensor | None,
    branch: torch.Tensor | None,
    act: str,
    conservative: bool,
    weight1_type: torch.dtype,
    weight2_type: torch.dtype,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    given = (x, weight1, bias1, weight2, bias2, gate)
    types = (x.dtype, weight1_type, None, weight2_type, None, None)
    made = (
        value.new_empty(value.shape, dtype=dtype or value.dtype) if need and value is not None else None
        for need, value, dtype in zip(needs, given, types, strict=True)
    )
    return _given(dy, *made)


mlp_backward_op = Op("mlp_backward", _backward_body, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight1, bias1, weight2, bias2, narrow1, narrow2, gate, _, act, keep, keep_branch, conservative = inputs
    _, pre, branch = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(pre, branch)
    own = weight1 if narrow1 is None else narrow1, weight2 if narrow2 is None else narrow2
    kept = pre if keep else None, branch if keep_branch and gate is not None else None
    ctx.save_for_backward(x, own[0], bias1, own[1], bias2, gate, *kept)
    ctx.rest = act, conservative, weight1.dtype, weight2.dtype


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 13
    *layers, _, _, gate, residual = ctx.needs_input_grad[:9]
    needs = [*layers, gate]
    given: tuple[torch.Tensor | None, ...] = (None,) * 6
    if any(needs):
        given = mlp_backward_op(dy, *ctx.saved_tensors, *ctx.rest, needs)
    given = tuple(value if need else None for value, need in zip(given, needs, strict=True))
    return (*given[:5], None, None, given[5], dy if residual else None, None, None, None, None)


mlp_op = Op("mlp", _body, _fake, _setup, _backward)
