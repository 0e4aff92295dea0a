"""Group norm and the activation after it, as the residual blocks of video autoencoders have them: three passes over memory.

Two reads, the second as far as possible from L2, and one write; either memory order is taken as it comes, and kept.
"""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.errors import ConfigError
from gpupipe.ops import activations, checks, settings
from gpupipe.ops.activations import Activation
from gpupipe.ops.group_norm.backward import launch_backward
from gpupipe.ops.group_norm.forward import FINISH, launch_forward
from gpupipe.ops.op import Op
from gpupipe.ops.planes import LARGEST, channels_last, empty, positions
from gpupipe.ops.settings import Precision


def group_norm_act(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    eps: float = 1e-5,
    precision: Precision | None = None,
) -> torch.Tensor:
    """act((x - mean) / sqrt(var + eps) * weight + bias), mean and var over a group of channels (Wu and He 2018).

    Statistics are float32, and keep their digits where the mean is large. Gradients repeat bit for bit; second derivatives are
    not offered. On the CPU, for float64 and for groups of more than 2048 channels it is plain torch.

    Args:
        x: (B, C, ...), such as (B, C, T, H, W), contiguous or in a channels-last format; float32, bfloat16, float16 or float64.
        groups: how many groups the channels make, one or more.
        weight, bias: (C,), any floating type.
        activation: ``"silu"``, ``"gelu"`` (the exact form), ``"gelu_tanh"`` or None.
        precision: see :func:`gpupipe.ops.precision`; ``"conservative"`` rounds before the activation.

    Returns:
        Like x, in its memory order.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for ``groups`` that do not share the channels evenly, or an activation that does not exist.
    """
    checks.floating("x", x)
    if x.dim() < 2 or x.shape[1] == 0:
        raise checks.refuse("x", x, "(B, C, ...) with at least one channel")
    channels = x.shape[1]
    eps = checks.epsilon(eps)
    if not isinstance(groups, int) or groups < 1 or channels % groups:
        raise ConfigError(f"groups is {groups!r} for {channels} channels", fix="groups must divide the channels evenly")
    checks.vector("weight", weight, channels, x, of="channel")
    checks.vector("bias", bias, channels, x, of="channel")
    act = activations.known(activation)
    conservative = settings.mode(precision) == "conservative"
    if not settings.kernel_runs("group_norm_act", x) or channels // groups > FINISH or positions(x) > LARGEST:
        return reference(x, groups, weight, bias, eps, act, conservative)
    return group_norm_op(x, groups, weight, bias, eps, act, channels_last(x), conservative)[0]  # type: ignore[no-any-return]


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """The same in plain torch; differentiable. ``act`` as :func:`gpupipe.ops.activations.known` gives it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        unused = sum(value.sum() for value in (weight, bias) if value is not None)
        return activations.apply(x + 0 * unused, act).to(x.dtype)
    factor, offset = (None if value is None else value.to(wide) for value in (weight, bias))
    y = torch.group_norm(x.to(wide), groups, factor, offset, eps)
    if conservative:
        y = y.to(x.dtype).to(wide)
    y = activations.apply(y, act).to(x.dtype)
    return empty(x.shape, x, True).copy_(y) if channels_last(x) and y.is_contiguous() else y


def _fake(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    last: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = (x.shape[0], groups)
    return empty(x.shape, x, last), x.new_empty(stats, dtype=torch.float32), x.new_empty(stats, dtype=torch.float32)


def _backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    activation: str,
    last: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = empty(x.shape, x, last) if needs[0] else x.new_empty(0)
    rest = [
        x.new_empty(0) if value is None or not need else value.new_empty(value.shape)
        for value, need in ((weight, needs[1]), (bias, needs[2]))
    ]
    return (dx, *rest)  # type: ignore[return-value]


group_norm_backward_op = Op("group_norm_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, groups, weight, bias, _, activation, last, conservative = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.rest = groups, activation, last, conservative


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    x, weight, bias, mean, rstd = ctx.saved_tensors
    groups, activation, last, conservative = ctx.rest
    needs = ctx.needs_input_grad
    dx, dweight, dbias = group_norm_backward_op(
        dy, x, groups, weight, bias, mean, rstd, activation, last, conservative, [needs[0], needs[2], needs[3]]
    )
    given = (dx, None, dweight, dbias, None, None, None, None)
    return tuple(value if need else None for value, need in zip(given, needs, strict=True))


group_norm_op = Op("group_norm", launch_forward, _fake, _setup, _backward)
