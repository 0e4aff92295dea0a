"""A block of a video diffusion transformer in two forms over the same parameters, and a stack of it for training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from op_cases_attention import Grid, full_tables, parted, tables, turned
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpupipe import ops

Axis = Literal["spatial", "temporal", "full"]
Form = Literal["gpupipe", "eager"]
EPS = 1e-6
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""torch's attention, the fastest on Hopper first."""


@dataclass(frozen=True)
class Size:
    """Columns of a token, heads that share them, and the token grid (T, H, W)."""

    hidden: int
    heads: int
    grid: Grid

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    def __str__(self) -> str:
        return f"n{self.tokens}-h{self.hidden}-bf16"


class SelfAttention(nn.Module):
    """Attention with QK-RMSNorm and rotary embedding, from packed QKV to the projection.

    Args:
        axis: ``"spatial"`` each frame for itself, ``"temporal"`` each pixel for itself, ``"full"`` all tokens.
    """

    def __init__(self, size: Size, axis: Axis, device: torch.device) -> None:
        super().__init__()
        self.heads, self.grid, self.axis = size.heads, size.grid, axis
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, device=device)
        self.out = nn.Linear(size.hidden, size.hidden, device=device)
        self.q_weight = nn.Parameter(torch.ones(size.hidden // size.heads, device=device))
        self.k_weight = nn.Parameter(torch.ones(size.hidden // size.heads, device=device))

    def fused(self, y: torch.Tensor, rope: ops.Rope) -> torch.Tensor:
        """(B, N, hidden) to the same, by ``gpupipe.ops``."""
        qkv = ops.qkv_linear(y, self.qkv.weight, self.qkv.bias, heads=self.heads, packed=True)
        assert isinstance(qkv, torch.Tensor)
        made = ops.attention(
            qkv, self.q_weight, self.k_weight, rope, grid=self.grid, axis=self.axis, norm="head", eps=EPS
        )  # fmt: skip
        return ops.linear_act(made.flatten(2), self.out.weight, self.out.bias, activation=None)

    def plain(self, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, N, hidden) to the same, by torch's own ops; ``cos`` and ``sin`` (N, hidden / heads / 2), float32."""
        q, k, v = parted(self.qkv(y), 2, (3, self.heads, -1)).unbind(2)
        q = turned(functional.rms_norm(q, q.shape[-1:], self.q_weight, EPS), cos, sin, "half")
        k = turned(functional.rms_norm(k, k.shape[-1:], self.k_weight, EPS), cos, sin, "half")
        frames, pixels = self.grid[0], self.grid[1] * self.grid[2]
        if self.axis == "temporal":  # (B * pixels, heads, T, dim), views for one sample
            q, k, v = (parted(x, 1, (frames, pixels)).permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (q, k, v))
        else:  # (B * T, heads, pixels, dim), or (B, heads, N, dim)
            parts = frames if self.axis == "spatial" else 1
            q, k, v = (parted(x, 1, (parts, -1)).flatten(0, 1).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(BACKENDS, set_priority=True):
            made = functional.scaled_dot_product_attention(q, k, v)
        if self.axis == "temporal":
            made = parted(made, 0, (y.shape[0], pixels)).permute(0, 3, 1, 2, 4)
        else:
            made = made.transpose(1, 2)
        return self.out(made.reshape(y.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention sub-blocks, one an axis, then an MLP with tanh GELU; each behind a modulated norm, with a gated residual.

    Scale, shift and gate come from a conditioning vector, one row a sample (adaptive layer norm; Peebles and Xie 2023). Gates
    are not zero at the start, as models often have them, for then no gradient would reach the sub-blocks.

    Args:
        axes: ``("spatial", "temporal")`` is the factorised block, ``("full",)`` the one with 3-D attention.
        form: ``"gpupipe"``, or ``"eager"``, which does the same by torch's own ops; may be changed at any time.
    """

    def __init__(self, size: Size, axes: Sequence[Axis], form: Form, device: torch.device) -> None:
        super().__init__()
        self.form: Form = form
        self.parts = len(axes) + 1
        self.modulation = nn.Linear(size.hidden, 3 * self.parts * size.hidden, device=device)
        self.attention = nn.ModuleList(SelfAttention(size, axis, device) for axis in axes)
        self.up = nn.Linear(size.hidden, 4 * size.hidden, device=device)
        self.down = nn.Linear(4 * size.hidden, size.hidden, device=device)
        self.rope = tables(size.grid, size.hidden // size.heads, "half", device)
        self.cos, self.sin = full_tables(self.rope, size.grid)

    def forward(self, x: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """x (B, N, hidden) and cond (B, hidden), both of the parameters' type, to (B, N, hidden)."""
        rows = self.modulation(functional.silu(cond)).chunk(3 * self.parts, -1)
        scales, shifts, gates = (rows[first :: 3] for first in range(3))  # fmt: skip
        return (self._fused if self.form == "gpupipe" else self._plain)(x, scales, shifts, gates)

    def _fused(
        self, x: torch.Tensor, scales: Sequence[torch.Tensor], shifts: Sequence[torch.Tensor], gates: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        y = ops.modulate_norm(x, scales[0], shifts[0], eps=EPS)
        for at, layer in enumerate(self.attention):
            assert isinstance(layer, SelfAttention)
            branch = layer.fused(y, self.rope)
            y, x = ops.gate_add_modulate_norm(x, branch, gates[at], scales[at + 1], shifts[at + 1], eps=EPS)
        return ops.mlp(y, self.up.weight, self.up.bias, self.down.weight, self.down.bias, gate=gates[-1], residual=x)

    def _plain(
        self, x: torch.Tensor, scales: Sequence[torch.Tensor], shifts: Sequence[torch.Tensor], gates: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        for at in range(self.parts):
            y = functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scales[at][:, None]) + shifts[at][:, None]
            if at + 1 < self.parts:
                layer = self.attention[at]
                assert isinstance(layer, SelfAttention)
                branch = layer.plain(y, self.cos, self.sin)
            else:
                branch = self.down(functional.gelu(self.up(y), approximate="tanh"))
            x = x + gates[at][:, None] * branch
        return x


class Denoiser(nn.Module):
    """Factorised blocks between two linear layers: from noisy tokens to the velocity of rectified flow (Liu et al. 2022)."""

    def __init__(self, channels: int, blocks: int, size: Size, form: Form, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(channels, size.hidden, device=device)
        self.time = nn.Linear(size.hidden, size.hidden, device=device)
        self.blocks = nn.ModuleList(Block(size, ("spatial", "temporal"), form, device) for _ in range(blocks))
        self.last = nn.Linear(size.hidden, channels, device=device)
        self.speeds = 1000 * torch.exp(torch.arange(0, size.hidden, 2, device=device) * (-math.log(10000.0) / size.hidden))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x (B, N, channels) of the parameters' type and time (B,) from 0 to 1, float32, to (B, N, channels)."""
        angles = time[:, None] * self.speeds
        cond = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, cond)
        return self.last(functional.layer_norm(x, x.shape[-1:], eps=EPS))  # type: ignore[no-any-return]
