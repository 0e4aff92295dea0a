"""The models of bench_train.py: the reference video transformer, and two of diffusers', built from their configurations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from block_model import BACKENDS
from plain_dit import PlainVideoDiT
from torch import nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel
from video_dit import VideoDiT, VideoDiTConfig, flow_loss

from gpupipe.device.inventory import load
from gpupipe.train import fuse

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Video, noise and time."""


class Model(Protocol):
    """A video model, and the step that it is trained by."""

    @property
    def case(self) -> str:
        """What stands in the names of its cases: depth, tokens and columns."""
        ...

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(C, T, H, W) of what it learns."""
        ...

    @property
    def fullgraph(self) -> bool:
        """Whether ``torch.compile`` owes one graph; else it may break it, as a user lets it."""
        ...

    def build(self, fused: bool, device: torch.device) -> nn.Module:
        """With the same weights each time. Those that are zero at the start are drawn: through them no gradient would go on."""
        ...

    def loss(self, net: nn.Module, video: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Of rectified flow. Video and noise are (B, C, T, H, W), time is (B,) of 0 to 1, float32."""
        ...

    def one_block(self) -> Self:
        """The same with one block of each kind: its gradients are compared in float32, in which the whole would not fit."""
        ...


@dataclass(frozen=True)
class Reference:
    """samples/video_dit.py; not fused it is the same in torch's own ops."""

    config: VideoDiTConfig
    fullgraph: bool = True

    @property
    def case(self) -> str:
        t, h, w = self.config.grid
        return f"dit-d{self.config.depth}-n{t * h * w}-h{self.config.hidden}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.config.channels, self.config.frames, self.config.height, self.config.width

    def build(self, fused: bool, device: torch.device) -> nn.Module:
        net = drawn(lambda: (VideoDiT if fused else PlainVideoDiT)(self.config), device)
        if isinstance(net, PlainVideoDiT):
            net.tables_on(device)  # made in the first step, they would be compiled for, and all anew for the second
        return net

    def loss(self, net: nn.Module, video: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return flow_loss(net, video, noise, time)

    def one_block(self) -> Reference:
        return replace(self, config=replace(self.config, depth=1))


@dataclass(frozen=True)
class Published:
    """A transformer of diffusers as it is published; fused by :func:`gpupipe.train.fuse`.

    Not fused, its RMSNorms are torch's own (see :class:`RmsNorm`); all have the fastest of torch's SDPA that takes their
    arguments.

    Attributes:
        family: ``wan`` or ``hunyuan``.
        heads, dim: attention heads, and columns of each.
        layers: blocks; of ``hunyuan`` those with two streams, then those with one.
        grid: tokens along time, height and width.
        words: tokens of the text.
        columns: of the text, and of what is pooled of it.
        feed: columns within an MLP.
    """

    family: str
    heads: int
    dim: int
    layers: tuple[int, ...]
    grid: tuple[int, int, int]
    words: int
    columns: tuple[int, int] = (4096, 768)
    feed: int = 0
    channels: int = 16
    patch: int = 2
    fullgraph: bool = False

    @property
    def case(self) -> str:
        depth = "x".join(map(str, self.layers))
        return f"{self.family}-d{depth}-n{math.prod(self.grid)}-h{self.heads * self.dim}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        t, h, w = self.grid
        return self.channels, t, h * self.patch, w * self.patch

    def build(self, fused: bool, device: torch.device) -> nn.Module:
        load("diffusers")
        net = drawn(lambda: _BUILDERS[self.family](self), device)
        if fused:
            fuse(net)
        else:
            fused_norms(net)
        return net

    def loss(self, net: nn.Module, video: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        video = video.float()
        mixed = torch.lerp(video, noise, time[:, None, None, None, None])
        given = conditions(self, len(video), video.device)
        with sdpa_kernel(BACKENDS, set_priority=True):
            velocity = net(hidden_states=mixed, timestep=1000 * time, return_dict=False, **given)[0]
        return functional.mse_loss(velocity.float(), noise - video)

    def one_block(self) -> Published:
        """Over a part of the grid, for float32 attention over all of it takes seconds."""
        t, h, w = self.grid
        return replace(self, layers=tuple(1 for _ in self.layers), grid=(min(t, 4), min(h, 16), min(w, 16)))


@functools.cache
def conditions(model: Published, batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What the model is given beside the video: they stand for what frozen encoders make of a text."""
    source = torch.Generator().manual_seed(4)
    text, pooled = (
        torch.randn(batch, *shape, generator=source) for shape in ((model.words, model.columns[0]), (model.columns[1],))
    )
    if model.family == "wan":
        return {"encoder_hidden_states": text.to(device)}
    return {
        "encoder_hidden_states": text.to(device),
        "encoder_attention_mask": torch.ones(batch, model.words, dtype=torch.int64, device=device),
        "pooled_projections": pooled.to(device),
        "guidance": torch.full((batch,), 6000.0, device=device),
    }


def _wan(model: Published) -> nn.Module:
    from diffusers import WanTransformer3DModel

    made: nn.Module = WanTransformer3DModel(
        patch_size=(1, model.patch, model.patch), num_attention_heads=model.heads, attention_head_dim=model.dim,
        in_channels=model.channels, out_channels=model.channels, text_dim=model.columns[0], ffn_dim=model.feed,
        num_layers=model.layers[0],
    )  # fmt: skip
    return made


def _hunyuan(model: Published) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    time = model.dim // 8 // 2 * 2
    across = (model.dim - time) // 4 * 2
    made: nn.Module = HunyuanVideoTransformer3DModel(
        in_channels=model.channels, out_channels=model.channels, num_attention_heads=model.heads,
        attention_head_dim=model.dim, num_layers=model.layers[0], num_single_layers=model.layers[1], patch_size=model.patch,
        text_embed_dim=model.columns[0], pooled_projection_dim=model.columns[1],
        rope_axes_dim=(model.dim - 2 * across, across, across),
    )  # fmt: skip
    return made


_BUILDERS: dict[str, Callable[[Published], nn.Module]] = {"wan": _wan, "hunyuan": _hunyuan}


class RmsNorm(nn.Module):
    """torch's fused RMSNorm in the type of its input, in the place of one that a model brings along.

    diffusers' own is half a dozen kernels, and that of torch's module too where autocast leaves its weight in float32.
    """

    def __init__(self, other: nn.Module, shape: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = other.weight  # type: ignore[assignment]
        self.shape, self.eps = tuple(shape), other.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return functional.rms_norm(x, self.shape, weight, self.eps)  # type: ignore[arg-type]


def fused_norms(net: nn.Module) -> None:
    """Puts :class:`RmsNorm` into a model of diffusers; names of parameters stay."""
    from diffusers.models.normalization import RMSNorm

    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, RmsNorm(child, child.normalized_shape))
            elif isinstance(child, RMSNorm) and child.bias is None:
                setattr(module, name, RmsNorm(child, child.dim))


def drawn(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A model with the same weights each time, none of them zero."""
    torch.manual_seed(0)
    with torch.device(device):
        net = make()
        for value in net.parameters():
            if not value.any():
                nn.init.normal_(value, std=0.02)
    return net


def inputs_of(model: Model, batch: int, device: torch.device) -> Inputs:
    source = torch.Generator().manual_seed(1)  # on the CPU, so that every device gets the same values
    video, noise = (torch.randn(batch, *model.shape, generator=source).to(device) for _ in range(2))
    return video, noise, torch.rand(batch, generator=source).to(device)
