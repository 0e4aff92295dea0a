"""The cases round matrix products, and the element-wise rest."""

from __future__ import annotations

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
    ]  # fmt: skip


def all_linear_cases() -> list[OpCase]:
    return [*linear_cases(32768, 3072, 12288), *rest_cases(32768, 3072)]


def tiny_linear_cases() -> list[OpCase]:
    return [*linear_cases(6, 16, 32), *rest_cases(6, 16)]
