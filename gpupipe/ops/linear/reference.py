"""The linear ops in plain torch: the CPU's way, the twin to bisect with, and the truth that tests hold kernels to."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpupipe.ops.activation import reference as activation
from gpupipe.ops.norms import reference as norms


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer, whatever autocast says: the types have been chosen."""
    with torch.autocast(x.device.type, enabled=False):
        return functional.linear(x, weight, bias)


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """residual + dropout(act(x @ weight.T + bias))."""
    return activation.bias_act(product(x, weight, bias), None, None, residual, p, act, conservative)


def mlp(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """residual + gate * (act(x @ weight1.T + bias1) @ weight2.T + bias2), gate (M, N)."""
    hidden = linear_act(x, weight1, bias1, None, 0.0, act, conservative)
    return activation.bias_act(product(hidden, weight2, bias2), None, gate, residual, 0.0, "none", conservative)


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    rms: bool,
    factor: float,
    conservative: bool,
) -> torch.Tensor:
    """factor * (norm(x) @ weight.T + bias), the norm modulated by scale and shift (M, H)."""
    normal, _ = norms.norm(
        x, None, None, norm_weight, norm_bias, scale, shift, eps=eps, rms=rms, conservative=conservative
    )  # fmt: skip
    y = product(normal.to(weight.dtype), weight, bias)
    return y if factor == 1 else y * factor
