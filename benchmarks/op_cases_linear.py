"""The cases round matrix products, and the element-wise rest."""

from __future__ import annotations

import math

import torch
from op_case import OpCase, random
from op_timing import Inputs
from torch.nn import functional

from gpupipe import ops


def _weight(device: torch.device, rows: int, columns: int) -> torch.Tensor:
    weight: torch.Tensor = random(device, rows, columns, grad=False) * columns**-0.5
    return weight.requires_grad_()


def linear_cases(tokens: int, size: int, inner: int) -> list[OpCase]:
    """Linear with tanh-GELU, a whole MLP, a norm before a linear, QKV."""
    shape = f"n{tokens}-h{size}-bf16"
    once = 2.0 * tokens

    def wide(device: torch.device) -> Inputs:
        return {"x": random(device, 1, tokens, size), "weight": _weight(device, inner, size), "bias": random(device, inner)}

    def block(device: torch.device) -> Inputs:
        first = {"x": random(device, 1, tokens, size), "weight1": _weight(device, inner, size), "bias1": random(device, inner)}
        return {**first, "weight2": _weight(device, size, inner), "bias2": random(device, size)}

    def normed(device: torch.device) -> Inputs:
        return {"x": random(device, 1, tokens, size), "weight": _weight(device, 3 * size, size)}

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x, approximate="tanh")

    return [
        OpCase(
            f"linear_act-{shape}", "linear", wide,
            lambda x, weight, bias: ops.linear_act(x, weight, bias, activation="gelu_tanh"),
            lambda x, weight, bias: gelu(functional.linear(x, weight, bias)),
            once * (size + inner), once * (2 * size + 3 * inner),
            bare=functional.linear, compiled=("compile",),
        ),
        OpCase(
            f"mlp-{shape}", "linear", block,
            lambda x, weight1, bias1, weight2, bias2: ops.mlp(x, weight1, bias1, weight2, bias2, activation="gelu_tanh"),
            lambda x, weight1, bias1, weight2, bias2: functional.linear(
                gelu(functional.linear(x, weight1, bias1)), weight2, bias2
            ),
            once * (2 * size + 2 * inner), once * (3 * size + 5 * inner),
            bare=lambda x, weight1, bias1, weight2, bias2: functional.linear(
                functional.linear(x, weight1, bias1), weight2, bias2
            ),
            compiled=("compile",),
        ),
        OpCase(
            f"norm_linear-{shape}", "linear", normed,
            lambda x, weight: ops.norm_linear(x, weight),
            lambda x, weight: functional.linear(functional.layer_norm(x, (size,), eps=1e-6), weight),
            once * 4 * size, once * 8 * size, bare=functional.linear, compiled=("compile",),
        ),
        OpCase(
            f"qkv_linear-{shape}", "linear", normed,
            lambda x, weight: ops.qkv_linear(x, weight),
            lambda x, weight: tuple(part.contiguous() for part in functional.linear(x, weight).chunk(3, -1)),
            once * 4 * size, once * 8 * size, bare=functional.linear, compiled=(),
        ),
    ]  # fmt: skip


def rest_cases(tokens: int, size: int) -> list[OpCase]:
    """One pass each."""
    shape = f"n{tokens}-h{size}-bf16"
    once = 2.0 * tokens * size

    def branch(device: torch.device) -> Inputs:
        return {"x": random(device, 1, tokens, size), "bias": random(device, size), "residual": random(device, 1, tokens, size)}

    return [
        OpCase(
            f"bias_act_dropout_add-{shape}", "rest", branch,
            lambda x, bias, residual: ops.bias_act_dropout_add(x, bias, residual, activation="gelu_tanh"),
            lambda x, bias, residual: residual + functional.gelu(x + bias, approximate="tanh"),
            3 * once, 3 * once, compiled=("compile",),
        ),
        OpCase(
            f"scale_cast-n{tokens}-h{size}-fp32", "rest",
            lambda device: {
                "x": random(device, tokens, size, dtype=torch.float32),
                "factor": torch.full((1,), 0.125, device=device),
            },
            lambda x, factor: ops.scale_cast(x, factor, torch.bfloat16), lambda x, factor: (x * factor).to(torch.bfloat16),
            3 * once, 3 * once, compiled=("compile",),
        ),
        OpCase(
            f"timestep_embedding-n{tokens}-h256-fp32", "rest",
            lambda device: {"t": (1000 * torch.rand(tokens, device=device)).requires_grad_()},
            lambda t: ops.timestep_embedding(t, 256), lambda t: _waves(t, 256),
            4.0 * tokens * 257, 4.0 * tokens * 258, compiled=("compile",),
        ),
    ]  # fmt: skip


def _waves(t: torch.Tensor, dim: int) -> torch.Tensor:
    """As diffusers works it out."""
    half = dim // 2
    phase = t[:, None] * torch.exp(torch.arange(half, device=t.device) * (-math.log(10000.0) / (half - 1)))
    return torch.cat([phase.sin(), phase.cos()], -1)


def patch_case(grid: tuple[int, int, int], channels: int, size: int) -> OpCase:
    """Patches of 1 x 2 x 2 of a latent video as tokens."""
    frames, rows, columns = grid
    tokens, values = math.prod(grid), 4 * channels

    def video(device: torch.device) -> Inputs:
        weight = random(device, size, channels, 1, 2, 2, grad=False) * values**-0.5
        return {
            "video": random(device, 1, channels, frames, 2 * rows, 2 * columns),
            "weight": weight.requires_grad_(), "bias": random(device, size),
        }  # fmt: skip

    moved = 2.0 * tokens * (values + size)
    return OpCase(
        f"patch_embed3d-n{tokens}-h{size}-bf16", "rest", video,
        lambda video, weight, bias: ops.patch_embed3d(video, weight, bias),
        lambda video, weight, bias: functional.conv3d(video, weight, bias, stride=(1, 2, 2)).flatten(2).transpose(1, 2),
        moved, 2 * moved, compiled=("compile",),
    )  # fmt: skip


def all_linear_cases() -> list[OpCase]:
    return [*linear_cases(32768, 3072, 12288), *rest_cases(32768, 3072), patch_case((32, 32, 32), 16, 3072)]


def tiny_linear_cases() -> list[OpCase]:
    return [*linear_cases(6, 16, 32), *rest_cases(6, 16), patch_case((2, 3, 4), 4, 16)]
