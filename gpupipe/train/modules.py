"""Modules over the fused ops, to write models with: parameters named as in torch and timm, so that states go either way."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from gpupipe import ops
from gpupipe.errors import ConfigError
from gpupipe.ops.activations import AnyActivation, known, split
from gpupipe.ops.grid_attention import Axis
from gpupipe.ops.rope import Rope
from gpupipe.train.arguments import a_number, shown, whole, without_scale


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, with modulation if there is any: x (..., H), scale and shift as in
    :func:`gpupipe.ops.modulate_norm`, both or neither.
    """

    def __init__(self, size: int, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> None:
        whole(size, "size", 1)
        a_number(eps, "eps", "a small number above 0")
        super().__init__(size, eps=eps, elementwise_affine=elementwise_affine, bias=bias)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        if scale is None:
            without_scale(shift=shift)
            return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)
        return ops.modulate_norm(x, scale, shift, self.weight, self.bias, eps=self.eps)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, with modulation if there is any, as :class:`LayerNorm`."""

    def __init__(self, size: int, eps: float = 1e-6, elementwise_affine: bool = True) -> None:
        whole(size, "size", 1)
        a_number(eps, "eps", "a small number above 0")
        super().__init__(size, eps=eps, elementwise_affine=elementwise_affine)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        assert self.eps is not None
        if scale is None:
            without_scale(shift=shift)
            return ops.rms_norm(x, self.weight, eps=self.eps)
        return ops.modulate_norm(x, scale, shift, self.weight, kind="rms", eps=self.eps)


class Mlp(nn.Module):
    """residual + gate * (act(x W1 + b1) W2 + b2), with dropout behind either layer; ``fc1`` and ``fc2`` as in timm.

    Args:
        size: columns that come in and go out.
        hidden: columns between; a gated activation has twice as many before it.
        activation: as in :func:`gpupipe.ops.mlp`.
        bias: whether the layers have one.
        dropout: the share that is dropped behind either, in training.

    Raises:
        ConfigError: for sizes below 1, another activation, or a dropout that is no share.
    """

    def __init__(
        self, size: int, hidden: int, activation: AnyActivation = "gelu_tanh", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        whole(size, "size", 1)
        whole(hidden, "hidden", 1)
        a_number(dropout, "dropout", "the share to drop, from 0 to 1")
        if not 0 <= dropout <= 1:
            raise ConfigError(f"dropout is {dropout!r}", fix="dropout is the share to drop, from 0 to 1")
        self.activation = activation
        self.dropout = dropout
        self.fc1 = nn.Linear(size, hidden * (1 + split(known(activation, gated=True))[1]), bias=bias)
        self.fc2 = nn.Linear(hidden, size, bias=bias)

    def forward(
        self, x: torch.Tensor, gate: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:  # fmt: skip
        one, two = self.fc1, self.fc2
        if not self.training or self.dropout == 0:
            return ops.mlp(
                x, one.weight, one.bias, two.weight, two.bias, activation=self.activation, gate=gate, residual=residual
            )  # fmt: skip
        hidden = ops.linear_act(x, one.weight, one.bias, activation=self.activation, p=self.dropout)
        branch = ops.linear_act(hidden, two.weight, two.bias, activation=None)
        return ops.bias_act_dropout_add(branch, residual=residual, gate=gate, p=self.dropout)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"


class GridAttention(nn.Module):
    """Attention on a token grid, within frames, along time or over all; ``qkv``, ``q_norm``, ``k_norm``, ``proj`` as in timm.

    Args:
        size: columns.
        heads: how many share them.
        axis: see :func:`gpupipe.ops.attention`.
        qkv_bias: whether the first layer has one.
        qk_norm: whether queries and keys go through an RMS norm over each head.

    Raises:
        ConfigError: for sizes below 1, another axis, or heads that do not divide the columns.
    """

    attend = staticmethod(ops.attention)

    def __init__(self, size: int, heads: int, axis: Axis = "full", qkv_bias: bool = True, qk_norm: bool = True) -> None:
        super().__init__()
        whole(size, "size", 1)
        whole(heads, "heads", 1)
        if axis not in get_args(Axis):
            raise ConfigError(f"axis is {shown(axis)}", fix=f"choose among {', '.join(get_args(Axis))}")
        if size % heads:
            raise ConfigError(f"heads is {heads} for {size} columns", fix="heads must divide the columns evenly")
        self.heads = heads
        self.axis: Axis = axis
        self.qkv = nn.Linear(size, 3 * size, bias=qkv_bias)
        self.q_norm = RMSNorm(size // heads) if qk_norm else None
        self.k_norm = RMSNorm(size // heads) if qk_norm else None
        self.proj = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, grid: tuple[int, int, int], rope: Rope | None = None) -> torch.Tensor:
        """x (B, T * H * W, size) on the grid (T, H, W), and rotary tables: the same shape."""
        qkv = ops.qkv_linear(x, self.qkv.weight, self.qkv.bias, heads=self.heads, packed=True)
        assert isinstance(qkv, torch.Tensor)
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        norm = None if self.q_norm is None else "head"
        made = self.attend(qkv, q_weight, k_weight, rope, grid=grid, axis=self.axis, norm=norm)  # type: ignore[arg-type]
        return ops.linear_act(made.flatten(2), self.proj.weight, self.proj.bias, activation=None)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, axis={self.axis!r}"
