"""The cases of video autoencoders and of attention by hand: group norm, convolution, softmax."""

from __future__ import annotations

import torch
from op_case import OpCase, random
from op_timing import Inputs
from torch.nn import functional

from gpupipe import ops

Size = tuple[int, int, int]
LAST = torch.channels_last_3d


def _video(device: torch.device, channels: int, size: Size) -> torch.Tensor:
    x = random(device, 1, channels, *size, grad=False)
    return x.contiguous(memory_format=LAST).requires_grad_()


def group_norm_case(channels: int, size: Size, groups: int = 32) -> OpCase:
    """Group norm and SiLU, channels last."""

    def inputs(device: torch.device) -> Inputs:
        return {"x": _video(device, channels, size), "weight": random(device, channels), "bias": random(device, channels)}

    once = 2.0 * channels * size[0] * size[1] * size[2]
    return OpCase(
        f"group_norm_act-c{channels}-{'x'.join(map(str, size))}-bf16", "conv", inputs,
        lambda x, weight, bias: ops.group_norm_act(x, groups, weight, bias, activation="silu"),
        lambda x, weight, bias: functional.silu(functional.group_norm(x, groups, weight, bias)),
        3 * once, 5 * once,
    )  # fmt: skip


def conv_case(channels: int, size: Size) -> OpCase:
    """A 3x3x3 convolution with bias, SiLU and residual, channels last."""

    def inputs(device: torch.device) -> Inputs:
        weight = random(device, channels, channels, 3, 3, 3, grad=False) * (27 * channels) ** -0.5
        weight = weight.contiguous(memory_format=LAST).requires_grad_()
        x, residual = _video(device, channels, size), _video(device, channels, size)
        return {"x": x, "weight": weight, "bias": random(device, channels), "residual": residual}

    once = 2.0 * channels * size[0] * size[1] * size[2]
    return OpCase(
        f"conv3d_act-c{channels}-{'x'.join(map(str, size))}-bf16", "conv", inputs,
        lambda x, weight, bias, residual: ops.conv3d_act(x, weight, bias, residual, activation="silu", padding=1),
        lambda x, weight, bias, residual: residual + functional.silu(functional.conv3d(x, weight, bias, padding=1)),
        3 * once, 5 * once,
        bare=lambda x, weight, bias, residual: (functional.conv3d(x, weight, padding=1), bias.sum() + residual.sum()),
        compiled=("compile",),
    )  # fmt: skip


def softmax_case(batch: int, heads: int, length: int) -> OpCase:
    """Softmax and dropout over attention scores."""
    once = 2.0 * batch * heads * length * length
    return OpCase(
        f"softmax_dropout-{batch}x{heads}x{length}x{length}-bf16", "conv",
        lambda device: {"scores": random(device, batch, heads, length, length)},
        lambda scores: ops.softmax_dropout(scores, p=0.1, scale=0.125),
        lambda scores: functional.dropout(functional.softmax(scores * 0.125, -1), 0.1),
        2 * once, 3 * once, compiled=("compile",), repeatable=False,
    )  # fmt: skip


def conv_cases() -> list[OpCase]:
    sizes = ((128, (16, 128, 128)), (256, (16, 64, 64)), (512, (8, 32, 32)))
    return [
        *(group_norm_case(channels, size) for channels, size in sizes[:2]),
        *(conv_case(channels, size) for channels, size in sizes),
        softmax_case(8, 24, 2048),
    ]


def tiny_conv_cases() -> list[OpCase]:
    # A smaller convolution would do, but its weight gradient in bfloat16 on the CPU is torch's and reads memory nobody wrote.
    return [group_norm_case(8, (2, 3, 4), groups=4), conv_case(32, (4, 8, 8)), softmax_case(1, 2, 8)]
