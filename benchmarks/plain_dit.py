"""The video diffusion transformer of the samples in torch's own ops: the same parameters, the best that plain code does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from block_model import BACKENDS
from op_cases_attention import full_tables, parted, turned
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from video_dit import EPS, Block, SelfAttention, VideoDiT

Tables = tuple[torch.Tensor, torch.Tensor]


class PlainAttention(SelfAttention):
    """torch's fused RMSNorm and its SDPA on views, the backend that is fastest on Hopper first."""

    def forward(self, x: torch.Tensor, rope: Any) -> torch.Tensor:
        """(B, N, hidden) to the same; ``rope`` are cosines and sines (N, dim / 2), float32."""
        q, k, v = parted(self.qkv(x), 2, (3, self.heads, -1)).unbind(2)
        cos, sin = rope
        # Weights in the type of what they are for: torch's fused norm takes no other.
        q = turned(functional.rms_norm(q, q.shape[-1:], self.q_norm.to(q.dtype), EPS), cos, sin, "half")
        k = turned(functional.rms_norm(k, k.shape[-1:], self.k_norm.to(k.dtype), EPS), cos, sin, "half")
        frames = self.grid[0]
        if self.axis == "temporal":  # (B * pixels, heads, T, dim)
            q, k, v = (parted(side, 1, (frames, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1) for side in (q, k, v))
        else:  # (B * T, heads, pixels, dim)
            q, k, v = (parted(side, 1, (frames, -1)).flatten(0, 1).transpose(1, 2) for side in (q, k, v))
        with sdpa_kernel(BACKENDS, set_priority=True):
            made = functional.scaled_dot_product_attention(q, k, v)
        if self.axis == "temporal":
            made = parted(made, 0, (x.shape[0], -1)).permute(0, 3, 1, 2, 4)
        else:
            made = made.transpose(1, 2)
        return self.out(made.reshape(x.shape))  # type: ignore[no-any-return]


class PlainBlock(Block):
    """As DiT's authors write it, with torch's fused layer norm."""

    attention = PlainAttention

    def forward(self, x: torch.Tensor, cond: torch.Tensor, rope: Any) -> torch.Tensor:  # type: ignore[override]
        rows = self.modulation(cond).chunk(9, -1)
        x = x + rows[2][:, None] * self.spatial(modulated(x, rows), rope)
        x = x + rows[5][:, None] * self.temporal(modulated(x, rows[3:]), rope)
        y = self.down(functional.gelu(self.up(modulated(x, rows[6:])), approximate="tanh"))
        return x + rows[8][:, None] * y  # type: ignore[no-any-return]


class PlainVideoDiT(VideoDiT):
    """Patches are a reshape and a product, since the kernel of their convolution is its stride."""

    block = PlainBlock

    def forward(self, video: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        speeds = 1000 * torch.exp(torch.arange(128, device=video.device) * (-math.log(10000.0) / 128))
        angles = time[:, None] * speeds
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        cond = functional.silu(self.time2(functional.silu(self.time1(waves))))
        (t, h, w), (pt, ph, pw) = self.config.grid, self.config.patch
        parts = video.reshape(len(video), -1, t, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
        x = functional.linear(parts.reshape(len(video), t * h * w, -1), self.patch.weight.flatten(1), self.patch.bias)
        tables = self.tables_on(video.device)
        for block in self.blocks:
            x = block(x, cond, tables)
        made = self.last(modulated(x, self.modulation(cond).chunk(2, -1)))
        made = made.reshape(len(video), t, h, w, pt, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return made.reshape(video.shape)  # type: ignore[no-any-return]

    def tables_on(self, device: torch.device) -> Tables:
        """Cosines and sines of every token, made once."""
        found: Tables | None = getattr(self, "_tables", None)
        if found is None or found[0].device != device:
            found = full_tables(self.rope_on(device), self.config.grid)
            self._tables = found
        return found


def modulated(x: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of x (B, N, H) by scale and shift, each (B, H), all in the type of x.

    Autocast would have the norm's input and output in float32, which moves twice the bytes: torch's kernel is float32 within.
    """
    with torch.autocast(x.device.type, enabled=False):
        return functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + rows[0][:, None]) + rows[1][:, None]
