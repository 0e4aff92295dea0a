"""3-D convolution with what follows it: the library's convolution (or a matrix product), then one pass for the rest.

A convolution whose kernel equals its stride, and one of a single pixel, is a matrix product, and is done as one.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional

from gpupipe.device.jit import serves
from gpupipe.errors import ConfigError
from gpupipe.ops import activations, checks, settings
from gpupipe.ops.activations import Activation
from gpupipe.ops.conv3d.kernels import finish_into, launch_backward, launch_finish
from gpupipe.ops.conv3d.product import as_product, serves_as_product
from gpupipe.ops.op import Op, watched
from gpupipe.ops.planes import LARGEST, channels_last, empty, positions
from gpupipe.ops.settings import Precision

Triple = int | tuple[int, int, int]
Causal = Literal["zeros", "first"]


def conv3d_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    stride: Triple = 1,
    padding: Triple = 0,
    dilation: Triple = 1,
    groups: int = 1,
    causal: Causal | None = None,
    past: torch.Tensor | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """act(conv3d(x, weight) + bias) + residual.

    The convolution is torch's, and follows its settings (TF32, benchmark, determinism, autocast); what comes after it is one
    pass, or none where neither activation nor residual is asked for. Its gradients repeat bit for bit, and second derivatives
    are not offered.

    Args:
        x: (B, C, T, H, W), contiguous or channels-last; float32, bfloat16, float16 or float64.
        weight: (O, C / groups, kt, kh, kw).
        bias: (O,).
        residual: of the result's shape; added last.
        activation: ``"silu"``, ``"gelu"`` (the exact form), ``"gelu_tanh"`` or None.
        stride, padding, dilation, groups: as torch's ``conv3d`` takes them: one number, or one each of time, height and
            width.
        causal: pads time in front only, by (kt - 1) * dilation frames, so that no frame sees a later one: with ``"zeros"``, or
            with copies of the ``"first"`` frame. What ``padding`` says of time is not used then.
        past: (B, C, k, H, W), k at most that many frames that came before x, as streaming decoders keep them: they take the
            places next to x, and ``causal`` fills what is left (with the first of them for ``"first"``).
        precision: see :func:`gpupipe.ops.precision`; ``"conservative"`` rounds after bias and activation.

    Returns:
        (B, O, T', H', W') in the memory order the convolution gives it, channels-last for a kernel that equals its stride; of
        the residual's type if there is one, else of the convolution's.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for settings that cannot work.
    """
    checks.floating("x", x)
    if x.dim() != 5:
        raise checks.refuse("x", x, "(B, C, T, H, W)")
    checks.floating("weight", weight, like=x)
    if groups < 1 or weight.dim() != 5 or weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups:
        raise checks.refuse(
            "weight", weight, f"(O, C / groups, kt, kh, kw) for the {x.shape[1]} channels of x and groups={groups}"
        )  # fmt: skip
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise checks.refuse("weight", weight, f"{checks.said(x).split()[0]}, as x is (outside of autocast)")
    checks.vector("bias", bias, weight.shape[0], weight, of="channel")
    act = activations.known(activation)
    steps, around, apart = (
        _triple(name, value, least)
        for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    )
    conservative = settings.mode(precision) == "conservative"
    if causal is not None:
        if causal not in ("zeros", "first"):
            raise ConfigError(f"causal is {causal!r}", fix="choose 'zeros', 'first' or None")
        x = _with_past(x, past, (weight.shape[2] - 1) * apart[0], causal)
        around = (0, *around[1:])
    elif past is not None:
        raise ConfigError("past is given without causal", fix="say what fills the rest: causal='zeros' or 'first'")
    alone = act == "none" and residual is None and (bias is None or bias.dtype == weight.dtype)
    convolve = as_product if serves_as_product(x, weight, steps, around, apart, groups) else _convolve
    c = convolve(x, weight, bias if alone else None, steps, around, apart, groups)
    if residual is not None:
        checks.same_shape("residual", residual, c, "the result")
    if alone:
        return c
    widest = c.dtype if residual is None else torch.promote_types(c.dtype, residual.dtype)
    kernel = settings.kernel_wanted("conv3d_act") and serves(c.device) and widest != torch.float64
    if not kernel or positions(c) > LARGEST:
        return finish(c, bias, residual, act, conservative)
    last = channels_last(c)
    if _may_overwrite(c, bias, residual):
        return finish_into(c, c, bias, residual, act, last, conservative)
    return finish_op(c, bias, residual, act, last, conservative)  # type: ignore[no-any-return]


def _triple(name: str, value: Triple, least: int) -> tuple[int, int, int]:
    found = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(found) != 3 or any(each < least for each in found):
        raise ConfigError(
            f"{name} is {value!r}", fix=f"{name} is a number of at least {least}, or three of them: time, height, width"
        )
    return found


def _with_past(x: torch.Tensor, past: torch.Tensor | None, front: int, causal: str) -> torch.Tensor:
    """x with ``front`` frames before it."""
    kept = 0
    if past is not None:
        checks.floating("past", past, like=x)
        if past.dim() != 5 or (*past.shape[:2], *past.shape[3:]) != (*x.shape[:2], *x.shape[3:]) or past.shape[2] > front:
            b, c, _, h, w = x.shape
            raise checks.refuse("past", past, f"({b}, {c}, k, {h}, {w}) with k at most {front}, as many as the kernel sees")
        kept = past.shape[2]
    if front == 0:
        return x
    if kept == 0 and causal == "zeros":
        return functional.pad(x, (0, 0, 0, 0, front, 0))
    parts = [x] if past is None or kept == 0 else [past.to(x.dtype), x]
    if kept < front:
        rest = (*x.shape[:2], front - kept, *x.shape[3:])
        parts.insert(0, x.new_zeros(()).expand(rest) if causal == "zeros" else parts[0][:, :, :1].expand(rest))
    memory = torch.channels_last_3d if channels_last(x) else torch.contiguous_format
    return torch.cat(parts, 2).contiguous(memory_format=memory)


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, int, int],
    padding: tuple[int, int, int],
    dilation: tuple[int, int, int],
    groups: int,
) -> torch.Tensor:
    return functional.conv3d(x, weight, bias, stride, padding, dilation, groups)


def _may_overwrite(c: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> bool:
    """True when nobody needs c again, and the result fits in its place."""
    given = [value for value in (c, bias, residual) if value is not None]
    if watched(*given) or (torch.is_grad_enabled() and any(value.requires_grad for value in given)):
        return False
    dense = c.is_contiguous() or c.is_contiguous(memory_format=torch.channels_last_3d)
    return dense and (residual is None or residual.dtype == c.dtype)


def finish(
    c: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, act: str, conservative: bool
) -> torch.Tensor:
    """What follows the convolution, in plain torch; differentiable. ``act`` as :func:`activations.known` gives it."""
    wide = torch.promote_types(c.dtype, torch.float32)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(c.dtype).to(wide) if conservative else value

    y = activations.apply(c.to(wide) if bias is None else rounded(c.to(wide) + bias.to(wide).view(-1, 1, 1, 1)), act)
    if residual is None:
        return y.to(c.dtype)
    return (rounded(y) + residual.to(torch.promote_types(wide, residual.dtype))).to(residual.dtype)


def _fake(
    c: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    last: bool,
    conservative: bool,
) -> torch.Tensor:
    return empty(c.shape, c if residual is None else residual, last)


def _backward_fake(
    dy: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    last: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    dz = empty(dy.shape, dy if c is None else c, last) if needs[0] else dy.new_empty(0)
    return dz, dy.new_empty(0) if bias is None or not needs[1] else bias.new_empty(bias.shape)


finish_backward_op = Op("conv_finish_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    c, bias, _, activation, last, conservative = inputs
    ctx.save_for_backward(None if activation == "none" else c, bias)
    ctx.rest = activation, last, conservative, c.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    c, bias = ctx.saved_tensors
    activation, last, conservative, narrow = ctx.rest
    needs = ctx.needs_input_grad
    dz: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    asked = [needs[0] and c is not None, needs[1]]
    if any(asked):
        dz, dbias = finish_backward_op(dy, c, bias, activation, last, conservative, asked)
    if c is None:
        dz = dy.to(narrow)
    given = (dz, dbias, dy, None, None, None)
    return tuple(value if need else None for value, need in zip(given, needs, strict=True))


finish_op = Op("conv_finish", launch_finish, _fake, _setup, _backward)
