"""The one op behind all norms, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.ops.norms.backward import launch_backward
from gpupipe.ops.norms.forward import launch_forward
from gpupipe.ops.op import Op


def _fake(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    rms: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    count = x.numel() // x.shape[-1]
    y = x.new_empty(x.shape)
    return (
        y,
        x.new_empty(x.shape if branch is not None else (0,)),
        x.new_empty(0 if rms else count, dtype=torch.float32),
        x.new_empty(count, dtype=torch.float32),
    )


def _backward_fake(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rms: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own = branch is not None and (gate is not None or seed is not None)
    given = (branch if own else None, gate, weight, bias, scale, shift)
    rest = [
        total.new_empty(0) if value is None or not need else value.new_empty(value.shape)
        for value, need in zip(given, needs[1:], strict=True)
    ]
    return (total.new_empty(total.shape), *rest)  # type: ignore[return-value]


norm_backward_op = Op("norm_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, branch, gate, seed, p, weight, bias, scale, shift, _, rms, conservative = inputs
    _, total, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd, *(() if branch is not None else (total,)))
    kept = branch if gate is not None or seed is not None else None
    normalised = x if branch is None else total
    ctx.save_for_backward(normalised, kept, gate, seed, weight, bias, scale, shift, mean, rstd)
    ctx.has_branch = branch is not None
    ctx.rest = p, rms, conservative


def _backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    total, branch, gate, seed, weight, bias, scale, shift, mean, rstd = ctx.saved_tensors
    p, rms, conservative = ctx.rest
    needs = ctx.needs_input_grad
    asked = [needs[0], needs[1], needs[2], needs[5], needs[6], needs[7], needs[8]]
    if dy is None:
        dy = torch.zeros_like(total)
    dx, dbranch, dgate, dweight, dbias, dscale, dshift = norm_backward_op(
        dy, dsum if ctx.has_branch else None, total, branch, gate, seed, p, weight, bias, scale, shift, mean, rstd, rms,
        conservative, asked,
    )  # fmt: skip
    if branch is None:
        dbranch = dx
    given = (dx, dbranch, dgate, None, None, dweight, dbias, dscale, dshift, None, None, None)
    return tuple(value if need else None for value, need in zip(given, needs, strict=True))


norm_op = Op("norm", launch_forward, _fake, _setup, _backward)
