"""The training steps of bench_loader_train.py, in plain torch: a video transformer, and a net of thousands of small kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 400
"""As many as Kinetics-400 has."""
Step = Callable[[torch.Tensor], torch.Tensor]
"""A training step on ``video`` (B, 3, T, H, W): the loss, a scalar on the device."""


@dataclass(frozen=True)
class VitSize:
    """Sizes of a :class:`VideoVit`. ``tubelet`` are the (frames, rows, columns) of a token."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    tubelet: tuple[int, int, int] = (2, 16, 16)


VIT_B = VitSize()
VIT_TINY = VitSize(depth=2, width=32, heads=2)


class Block(nn.Module):
    """A pre-norm transformer block: attention by SDPA over all tokens, and an MLP with GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, lengths: Sequence[int] = ()) -> torch.Tensor:
        """(B, N, width) to the same. With ``cu_seqlens`` (clips + 1) B is 1, and each clip attends to its own tokens alone."""
        made: torch.Tensor
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, N, heads, width / heads) each
        if cu_seqlens is None:
            made = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        else:
            made = packed_attention(q[0], k[0], v[0], cu_seqlens, lengths)[None]
        x = x + self.out(made.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Attention of clips that lie one after the other, (N, heads, dim) each: torch's own on CUDA, clip by clip elsewhere."""
    if q.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        made = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths))
        assert isinstance(made, torch.Tensor)
        return made
    apart = zip(*(torch.split(x.transpose(0, 1), list(lengths), 1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*(x[None] for x in clip))[0] for clip in apart], 1).transpose(0, 1)


class VideoVit(nn.Module):
    """A video classifier with joint attention over space and time (model 1 of Arnab et al., ViViT, 2021), mean-pooled.

    Args:
        grid: the most tokens along time, height and width. Positions are learned, for time and for space apart.
    """

    def __init__(self, size: VitSize, grid: tuple[int, int, int]) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Linear(3 * math.prod(size.tubelet), size.width)
        self.along_time = nn.Parameter(0.02 * torch.randn(grid[0], 1, size.width))
        self.in_space = nn.Parameter(0.02 * torch.randn(1, grid[1] * grid[2], size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, CLASSES)

    def forward(self, video: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, 3, T, H, W) to logits (B, classes). Frames that ``mask`` (B, T) marks False are not pooled.

        They are attended to: a mask in attention would keep torch from its fastest kernels.
        """
        t, h, w = self.size.tubelet
        batch, colours, frames, height, width = video.shape
        times = frames // t
        patches = video.reshape(batch, colours, times, t, height // h, h, width // w, w)
        patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)  # (B, T/t, H/h, W/w, 3 * t * h * w)
        x = self.embed(patches.flatten(2, 3)) + self.along_time[:times] + self.in_space
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if mask is None:
            return self.head(x.mean(1))  # type: ignore[no-any-return]
        valid = mask[:, ::t].to(x.dtype).repeat_interleave(x.shape[1] // times, 1)[..., None]
        return self.head((x * valid).sum(1) / valid.sum(1))  # type: ignore[no-any-return]

    def packed(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Clips as ``layout="pack"`` gives them, with the tokens of each, to logits (B, classes); all have the grid's size."""
        places = (self.along_time + self.in_space).flatten(0, 1)  # one row for each token of the longest clip
        x = (self.embed(tokens) + torch.cat([places[:length] for length in lengths]))[None]
        for block in self.blocks:
            x = block(x, cu_seqlens, lengths)
        pooled = torch.stack([clip.mean(0) for clip in torch.split(self.norm(x)[0], list(lengths))])
        return self.head(pooled)  # type: ignore[no-any-return]


class ManySmall(nn.Module):
    """A recurrent net over frames that are shrunk to a few pixels: nearly every operation is a kernel of a few microseconds.

    Each of ``layers`` cells takes each frame in turn, with about a dozen small kernels in the forward pass, so that the
    interpreter and the launches take the step's time, not the GPU.
    """

    def __init__(self, layers: int, width: int, pooled: int = 7) -> None:
        super().__init__()
        self.pooled, self.width = pooled, width
        self.stem = nn.Linear(3 * pooled * pooled, width)
        self.cells = nn.ModuleList(nn.ModuleDict(_cell(width)) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """(B, 3, T, H, W) to logits (B, classes)."""
        small = F.adaptive_avg_pool3d(video, (video.shape[2], self.pooled, self.pooled))
        frames = self.stem(small.transpose(1, 2).flatten(2)).unbind(1)  # T times (B, width)
        for cell in self.cells:
            state = torch.zeros_like(frames[0])
            made = []
            for x in frames:
                gate = torch.sigmoid(cell["gate"](x) + cell["back"](state))  # type: ignore[index]
                state = cell["norm"](state + gate * (torch.tanh(cell["new"](x)) - state))  # type: ignore[index]
                made.append(state)
            frames = tuple(made)
        return self.head(frames[-1])  # type: ignore[no-any-return]


def _cell(width: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(width, width) for name in ("gate", "back", "new")} | {"norm": nn.LayerNorm(width)}


def adamw(model: nn.Module, device: torch.device, *, small_kernels: bool = False) -> torch.optim.Optimizer:
    """AdamW: in one fused kernel on CUDA, or with ``small_kernels`` one parameter after the other."""
    choice: dict[str, Any] = {"foreach": False} if small_kernels else {"fused": device.type == "cuda"}
    return torch.optim.AdamW(model.parameters(), lr=1e-5, **choice)


def train_step(logits: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, *inputs: Any) -> torch.Tensor:
    """One step in bf16 autocast over float32 parameters; labels are the clips' numbers, for it is the time that counts."""
    device = optimizer.param_groups[0]["params"][0].device
    with torch.autocast(device.type, torch.bfloat16):
        made = logits(*inputs)
        loss = F.cross_entropy(made.float(), torch.arange(len(made), device=device) % CLASSES)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def vit(size: VitSize, frames: int, side: int, device: torch.device) -> Step:
    """A step of a :class:`VideoVit` on clips of (frames, side, side)."""
    t, h, w = size.tubelet
    torch.manual_seed(0)
    model = VideoVit(size, (frames // t, side // h, side // w)).to(device)
    optimizer = adamw(model, device)
    return lambda video: train_step(model, optimizer, video)


def many_small(layers: int, width: int, device: torch.device) -> Step:
    """A step of :class:`ManySmall`."""
    torch.manual_seed(0)
    model = ManySmall(layers, width).to(device)
    optimizer = adamw(model, device, small_kernels=True)
    return lambda video: train_step(model, optimizer, video)
