"""The residual blocks of video autoencoders, their causal convolutions, and norms over channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpupipe import ops
from gpupipe.train import layout
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.probe import activation_of, attempt, same, silent
from gpupipe.train.report import Entry

_TINY = 1e-24
"""Squared length below which ``torch.nn.functional.normalize`` no longer divides by it: 1e-12 by default."""


class FusedChannelNorm(Fused):
    """RMS norm over channels of a video or picture (B, C, ...), as Wan's autoencoder has it."""

    kind = "norm"
    gamma: torch.Tensor
    bias: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        gamma = getattr(module, "gamma", None)
        if not isinstance(gamma, nn.Parameter) or set(module._parameters) - {"gamma"} or any(True for _ in module.children()):
            return None
        size = gamma.shape[0] if gamma.dim() else 0
        if gamma.numel() != size or gamma.dim() not in (3, 4):
            return None
        x = torch.linspace(-1, 2, 2 * size * 6).view(2, size, *(1,) * (gamma.dim() - 2), 6).mul(7).sin()
        kept, weight = module._parameters["gamma"], 1 + 0.5 * torch.arange(size).float().cos().view(gamma.shape)
        module._parameters["gamma"] = nn.Parameter(weight, requires_grad=False)
        try:
            trial = attempt(module, x)
        finally:
            module._parameters["gamma"] = kept
        expected = functional.normalize(x, dim=1) * size**0.5 * weight
        return {} if trial is not None and same(trial.result, expected) else None

    def fused_forward(self, x: torch.Tensor) -> Any:
        return channel_norm(self, x)


def channel_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm of such a module."""
    rows = x.movedim(1, -1)
    return ops.rms_norm(rows, module.gamma.flatten(), eps=_TINY / x.shape[1]).movedim(-1, 1)


def convolution(module: Any) -> str | None:
    """``"zeros"`` or ``"replicate"`` for a convolution that pads time in front only; None for any other module."""
    if isinstance(module, nn.Conv3d):
        padding = getattr(module, "_padding", None)
        front = (module.kernel_size[0] - 1) * module.dilation[0]
        plain = module.padding_mode == "zeros" and module.padding == (0, 0, 0)
        if not plain or not isinstance(padding, tuple) or len(padding) != 6 or padding[4:] not in ((front, 0), (0, 0)):
            return None
        return "zeros" if padding[0] == padding[1] and padding[2] == padding[3] else None
    inner = getattr(module, "conv", None)
    if type(inner) is not nn.Conv3d or inner.padding_mode != "zeros" or getattr(module, "pad_mode", None) != "replicate":
        return None
    return "replicate" if len(getattr(module, "time_causal_padding", ())) == 6 else None


def convolve(
    module: Any, x: torch.Tensor, past: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """Such a convolution of x, with what came before it, and what is added."""
    if isinstance(module, nn.Conv3d):
        padding: Any = module._padding
        return ops.conv3d_act(
            x, module.weight, module.bias, residual, stride=module.stride, padding=(0, padding[2], padding[0]),  # type: ignore[arg-type]
            dilation=module.dilation, groups=module.groups, causal="zeros" if padding[4] else None,  # type: ignore[arg-type]
            past=past if padding[4] else None,
        )  # fmt: skip
    inner = module.conv
    padded = functional.pad(x, module.time_causal_padding, mode=module.pad_mode)
    return ops.conv3d_act(
        padded, inner.weight, inner.bias, residual, stride=inner.stride, padding=inner.padding, dilation=inner.dilation,
        groups=inner.groups,
    )  # fmt: skip


class FusedResidualConvolutions(Fused):
    """norm, activation, convolution, twice, and what came in added: in the pass behind the second convolution."""

    kind = "conv_block"
    norm1: Any
    norm2: Any
    conv1: Any
    conv2: Any
    dropout: Any
    conv_shortcut: Any
    nonlinearity: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        names = ("norm1", "conv1", "norm2", "conv2", "dropout", "nonlinearity")
        if not all(isinstance(getattr(module, name, None), nn.Module) for name in names) or not hasattr(
            module, "conv_shortcut"
        ):
            return None
        ways = {convolution(module.conv1), convolution(module.conv2)}
        norms = [_norm(one) for one in (module.norm1, module.norm2)]
        activation = activation_of(module.nonlinearity)
        if None in ways or len(ways) > 1 or None in norms or norms[0] != norms[1] or activation is None:
            raise Left("its norms, activation or convolutions are none of ours")
        return {"norm": norms[0], "activation": activation, "padding": ways.pop()}

    @classmethod
    def layouts(cls, module: nn.Module, name: str) -> list[Entry]:
        zeros = convolution(getattr(module, "conv1", None)) == "zeros"
        return [Entry(name, "video", layout.CONVOLUTION if zeros else layout.REPLICATED)]

    def fused_forward(self, x: torch.Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None) -> Any:
        parts = (self.norm1, self.norm2, self.conv1, self.conv2, self.nonlinearity)
        if not silent(*parts, getattr(self.conv1, "conv", None), getattr(self.conv2, "conv", None)):
            return NotImplemented
        if self.settings["padding"] == "zeros":
            x = layout.for_convolution(x)
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        y = self._normed(self.norm1, x)
        y = convolve(self.conv1, y, self._past(y, feat_cache, feat_idx))
        y = self.dropout(self._normed(self.norm2, y))
        return convolve(self.conv2, y, self._past(y, feat_cache, feat_idx), shortcut)

    def _normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        if self.settings["norm"] == "group":
            return ops.group_norm_act(
                x, norm.num_groups, norm.weight, norm.bias, activation=self.settings["activation"], eps=norm.eps
            )  # fmt: skip
        return self.nonlinearity(channel_norm(norm, x))  # type: ignore[no-any-return]

    def _past(self, x: torch.Tensor, cache: list[Any] | None, at: list[int] | None) -> torch.Tensor | None:
        """The frames before x of a video in pieces, as the streaming decoder keeps them; and those of x kept for the next."""
        if cache is None or at is None:
            return None
        place = at[0]
        past: torch.Tensor | None = cache[place]
        kept = x[:, :, -2:].clone()
        if kept.shape[2] < 2 and past is not None:
            kept = torch.cat([past[:, :, -1:], kept], 2)
        cache[place] = kept
        at[0] += 1
        return past


def _norm(module: Any) -> str | None:
    if type(module).forward is nn.GroupNorm.forward:
        return "group"
    return "channel" if FusedChannelNorm.recognise(module) is not None else None


class FusedPatches(Fused):
    """A convolution of video whose kernel is its stride: a reshape and one matrix product."""

    kind = "conv_block"
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: tuple[int, int, int]

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        if type(module).forward is not nn.Conv3d.forward or not isinstance(module, nn.Conv3d):
            return None
        apart = module.kernel_size == module.stride and module.groups == 1 and set(module.dilation) == {1}
        pixels = set(module.kernel_size) == {1}  # it is one product already, and cuDNN knows that
        return {"does": "patches"} if apart and not pixels and set(module.padding) == {0} else None

    def fused_forward(self, input: torch.Tensor) -> Any:
        if input.dim() != 5:
            return NotImplemented
        return ops.conv3d_act(input, self.weight, self.bias, stride=self.stride)


class FusedCausalConvolution(Fused):
    """A convolution that pads time in front only, by zeros, and takes the frames before."""

    kind = "conv_block"

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        return {"padding": "zeros"} if isinstance(module, nn.Conv3d) and convolution(module) == "zeros" else None

    def fused_forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> Any:
        return convolve(self, layout.for_convolution(x), cache_x)
