"""The two halves that every linear op with an activation is made of, each in one place: forward, (pre-activation, activation),
and backward, (gradient of the pre-activation, gradient of the bias). Products are the vendor's.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from gpupipe.ops.activation.backward import launch_act_backward
from gpupipe.ops.activation.forward import launch_act
from gpupipe.ops.layout import matrix

_ROWS = 8
"""Fewest rows of a sum over them."""


def in_type(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias in the type of x, in which the product is made; ``narrow`` is the weight in it, if it has another."""
    return weight if narrow is None else narrow, None if bias is None else bias.to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N), contiguous."""
    return functional.linear(matrix(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def pre_and_act(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str, keep: bool, conservative: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The product, and the activation of it.

    Where the pre-activation is not to be kept, cuBLASLt's epilogue applies the tanh form of GELU to sums in float32, before
    they are rounded; conservative mode does not allow that.
    """
    if act == "gelu_tanh" and x.is_cuda and not keep and not conservative:
        shift = weight.new_zeros(weight.shape[0]) if bias is None else bias
        made = torch._addmm_activation(shift, matrix(x), weight.t(), use_gelu=True)
        return None, made.view(*x.shape[:-1], weight.shape[0])
    pre = product(x, weight, bias)
    if act == "none":
        return None, pre
    return pre if keep else None, launch_act(pre, None, None, None, None, 0.0, act, conservative)


def back_through_act(
    dy: torch.Tensor,
    pre: torch.Tensor | None,
    bias: torch.Tensor | None,
    act: str,
    conservative: bool,
    *,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
    x_type: torch.dtype,
    want_act: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of the pre-activation, that of the bias (if one is given: its shape and type), and the activation anew.

    ``pre`` is None without an activation: then the gradient that came is the one that goes on, unless dropout stood between or
    it is of another type than x.
    """
    if act == "none" and seed is None and dy.dtype == x_type:
        return dy, None if bias is None else bias_gradient(dy, bias, conservative), None
    dpre, dbias, _, activated = launch_act_backward(
        dy, None if pre is None else pre.view(*dy.shape[:-1], pre.shape[-1]), None, None, seed, p, act, x_type, conservative,
        like_bias=bias, want_act=want_act,
    )  # fmt: skip
    assert dpre is not None
    return dpre, dbias, activated


def back_through_product(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a product's x."""
    return (matrix(dy) @ weight).view(*dy.shape[:-1], weight.shape[1])


def bias_gradient(dy: torch.Tensor, bias: torch.Tensor, conservative: bool) -> torch.Tensor:
    """The gradient of a product's bias: the sum of all rows."""
    rows = matrix(dy)
    if dy.is_cuda and dy.dtype in (torch.bfloat16, torch.float16) and len(rows):
        # As a product with ones: cuBLAS reads at the rate of the memory where our pass, with nothing to write, does not.
        return torch.mm(rows.new_ones(1, len(rows)), rows, out_dtype=torch.float32)[0].to(bias.dtype)
    dbias = launch_act_backward(
        dy, None, None, None, None, 0.0, "none", dy.dtype, conservative, want_x=False, like_bias=bias
    )[1]  # fmt: skip
    assert dbias is not None
    return dbias


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a product's weight, whose type is ``dtype``: sums in float32 are not rounded to that of x first."""
    left, right = matrix(dy), matrix(x)
    wide = torch.promote_types(x.dtype, dtype)  # of the two half types neither holds what the other does
    if x.is_cuda and len(left) == 1:  # cuBLAS takes one row for a matrix whose rows are not aligned, and is slow
        left, right = (functional.pad(each, (0, 0, 0, _ROWS - 1)) for each in (left, right))
    if wide == x.dtype:
        return (left.t() @ right).to(dtype)
    if x.is_cuda:
        return torch.mm(left.t(), right, out_dtype=wide).to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return (left.to(wide).t() @ right.to(wide)).to(dtype)
