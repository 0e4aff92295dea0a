"""A spatio-temporal diffusion transformer for video, over gpupipe.ops, with its loss and its sampler.

Blocks attend within each frame, then along time, as in Latte (Ma et al. 2024) and Open-Sora; modulation is DiT's adaLN-zero
(Peebles and Xie 2023), with queries and keys normalised (Dehghani et al. 2023) and turned by a rotary table for each axis
(Su et al. 2021). It learns rectified flow (Liu et al. 2022): the velocity that leads from noise to video on a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from gpupipe import ops

Axis = Literal["spatial", "temporal"]
EPS = 1e-6


@dataclass(frozen=True)
class VideoDiTConfig:
    """Sizes of a model. ``patch`` are the (frames, rows, columns) of a token."""

    frames: int = 16
    height: int = 64
    width: int = 64
    patch: tuple[int, int, int] = (1, 4, 4)
    hidden: int = 384
    depth: int = 8
    heads: int = 6
    channels: int = 3

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens along time, height and width."""
        return self.frames // self.patch[0], self.height // self.patch[1], self.width // self.patch[2]

    @property
    def turned(self) -> tuple[int, int, int]:
        """How many columns of a head turn with time, row and column: even numbers, about a quarter for time."""
        dim = self.hidden // self.heads
        across = dim * 3 // 8 // 2 * 2
        return dim - 2 * across, across, across


class SelfAttention(nn.Module):
    """Attention along one axis of the token grid, from packed queries, keys and values to the projection behind it."""

    attend = staticmethod(ops.attention)  # over several ranks, another one (gpupipe.train.parallel)
    split_plan: ClassVar = {"qkv": "rows*3", "out": "columns", "q_norm": "heads", "k_norm": "heads"}

    def __init__(self, config: VideoDiTConfig, axis: Axis) -> None:
        super().__init__()
        self.heads, self.grid, self.axis = config.heads, config.grid, axis
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.q_norm = nn.Parameter(torch.ones(config.hidden // config.heads))
        self.k_norm = nn.Parameter(torch.ones(config.hidden // config.heads))

    def forward(self, x: torch.Tensor, rope: ops.Rope) -> torch.Tensor:
        """(B, N, hidden) to the same."""
        qkv = ops.qkv_linear(x, self.qkv.weight, self.qkv.bias, heads=self.heads, packed=True)
        assert isinstance(qkv, torch.Tensor)
        made = self.attend(qkv, self.q_norm, self.k_norm, rope, grid=self.grid, axis=self.axis, norm="head", eps=EPS)
        return ops.linear_act(made.flatten(2), self.out.weight, self.out.bias, activation=None)


class Block(nn.Module):
    """Attention in space, attention along time, and an MLP, each behind a modulated norm and before a gated residual.

    The MLP's branch is added by whoever comes next, in one pass with its norm. It is handed on as tensors alone, since torch's
    re-entrant checkpoints see no others.
    """

    attention: ClassVar[type[SelfAttention]] = SelfAttention
    split_plan: ClassVar = {"up": "rows", "down": "columns"}

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.modulation = nn.Linear(config.hidden, 9 * config.hidden)
        self.spatial, self.temporal = self.attention(config, "spatial"), self.attention(config, "temporal")
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None, gate: torch.Tensor | None, cond: torch.Tensor, rope: ops.Rope
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, N, hidden), with branch (B, N, hidden) times gate (B, hidden) still to be added to it, and cond (B, hidden), to
        the next x, branch and gate."""
        scale1, shift1, gate1, scale2, shift2, gate2, scale3, shift3, gate3 = rows_of(self.modulation, cond, 9)
        y, x = added(x, branch, gate, scale1, shift1)
        y, x = added(x, self.spatial(y, rope), gate1, scale2, shift2)
        y, x = added(x, self.temporal(y, rope), gate2, scale3, shift3)
        return x, ops.mlp(y, self.up.weight, self.up.bias, self.down.weight, self.down.bias), gate3


def added(
    x: torch.Tensor, branch: torch.Tensor | None, gate: torch.Tensor | None, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the tokens with branch times gate added, if there is one, modulated by scale and shift (B, hidden); and these
    tokens."""
    if branch is None or gate is None:
        return ops.modulate_norm(x, scale, shift, eps=EPS), x
    return ops.gate_add_modulate_norm(x, branch, gate, scale, shift, eps=EPS)


def rows_of(layer: nn.Linear, cond: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """cond (B, hidden) to so many rows (B, hidden) that modulate."""
    return ops.linear_act(cond, layer.weight, layer.bias, activation=None).chunk(count, -1)


class VideoDiT(nn.Module):
    """From a noisy video and a time to the velocity there."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, config: VideoDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Conv3d(config.channels, config.hidden, config.patch, config.patch)
        self.time1, self.time2 = nn.Linear(256, config.hidden), nn.Linear(config.hidden, config.hidden)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.depth))
        self.modulation = nn.Linear(config.hidden, 2 * config.hidden)
        self.last = nn.Linear(config.hidden, config.channels * config.patch[0] * config.patch[1] * config.patch[2])
        self._ropes: dict[torch.device, ops.Rope] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """DiT's: each block is the identity at the start, and the velocity zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch.weight.data.flatten(1))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and (name == "last" or name.endswith("modulation")):
                nn.init.zeros_(module.weight)

    def forward(self, video: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """video (B, C, T, H, W) and time (B,), 0 for video and 1 for noise, to the velocity (B, C, T, H, W)."""
        waves = ops.timestep_embedding(time, 256, flip_sin_to_cos=True, downscale_freq_shift=0.0, scale=1000.0)
        cond = functional.silu(self.time2(functional.silu(self.time1(waves))))
        x = ops.patch_embed3d(video, self.patch.weight, self.patch.bias)
        rope = self.rope_on(video.device)
        branch = gate = None
        for block in self.blocks:
            x, branch, gate = block(x, branch, gate, cond, rope)
        scale, shift = rows_of(self.modulation, cond, 2)
        x, _ = added(x, branch, gate, scale, shift)
        grid = (video.shape[2] // self.config.patch[0], video.shape[3] // self.config.patch[1], self.config.grid[2])
        return ops.unpatch_embed3d(x, grid, self.config.patch, self.last.weight, self.last.bias)

    def rope_on(self, device: torch.device) -> ops.Rope:
        """The rotary tables of the token grid, made once a device."""
        if device not in self._ropes:
            self._ropes[device] = ops.Rope.of(self.config.grid, self.config.turned, layout="half", device=device)
        return self._ropes[device]


def flow_loss(model: nn.Module, video: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the velocity at a point between video and noise, both (B, C, T, H, W); time (B,), float32."""
    video = video.float()
    velocity = model(torch.lerp(video, noise, time[:, None, None, None, None]), time)
    return functional.mse_loss(velocity.float(), noise - video)


@torch.no_grad()
def sample(model: nn.Module, noise: torch.Tensor, steps: int) -> torch.Tensor:
    """Videos (B, C, T, H, W) from noise of that shape, by so many Euler steps of equal length."""
    x, times = noise, torch.linspace(1, 0, steps + 1).tolist()
    for now, then in pairwise(times):
        x = x + (then - now) * model(x, x.new_full((len(x),), now)).float()
    return x
