"""The activation pass and the linear ops as chains of torch's own ops, with inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTS = ("none", "gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh", "swiglu")


def arguments(shape: tuple[int, ...], act: str, gate: tuple[int, ...] | None = None, seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    wide = shape[-1] * (2 if act in GATED else 1)
    given = {"x": (*shape[:-1], wide), "bias": (wide,), "residual": shape, "gate": gate}
    return {name: torch.randn(size, generator=made).double() for name, size in given.items() if size is not None}


def eager_act(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, act: str, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The chain of torch's own ops."""
    y = x + bias
    if act in GATED:
        y, other = y.chunk(2, -1)
    else:
        other = y
    curve = {
        "none": lambda t: t,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        "silu": functional.silu,
    }[GATED.get(act, act)]
    y = y * curve(other) if act in GATED else curve(y)
    if gate is not None:
        y = y * gate.view(*gate.shape[:-1], *[1] * (y.dim() - gate.dim()), gate.shape[-1])
    return residual + y


K, F, N = 24, 40, 16


def named(act: str) -> Any:
    """As the ops call it."""
    return None if act == "none" else act


def curve(x: torch.Tensor, act: str) -> torch.Tensor:
    zero = x.new_zeros(())
    return eager_act(x, zero, zero, act)


def linear_act(x: Any, weight: Any, bias: Any = None, residual: Any = None, act: str = "gelu_tanh") -> torch.Tensor:
    y = curve(functional.linear(x, weight, bias), act)
    return y if residual is None else residual + y


def mlp(
    x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any = None, gate: Any = None, residual: Any = None, act: str = "gelu"
) -> torch.Tensor:
    y = functional.linear(curve(functional.linear(x, weight1, bias1), act), weight2, bias2)
    if gate is not None:
        y = y * gate.view(*gate.shape[:-1], *[1] * (y.dim() - gate.dim()), gate.shape[-1])
    return y if residual is None else residual + y


def norm_linear(
    x: Any, weight: Any, bias: Any = None, norm_weight: Any = None, norm_bias: Any = None, scale: Any = None, shift: Any = None,
    factor: Any = 1.0, kind: str = "layer",
) -> torch.Tensor:  # fmt: skip
    if kind == "layer":
        y = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, 1e-6)
    else:
        y = functional.rms_norm(x, x.shape[-1:], norm_weight, 1e-6)
    if scale is not None:
        y = y * (1 + scale[:, None]) + shift[:, None]
    return functional.linear(y, weight, bias) * factor


def values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights such that the products are of the size of what goes in."""
    made = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in shapes.items()}
    return {
        name: value / value.shape[-1] ** 0.5 if value.dim() == 2 and "weight" in name else value
        for name, value in found.items()
    }


def upstream(*shape: int) -> torch.Tensor:
    """A gradient that every type holds exactly."""
    return (torch.arange(torch.Size(shape).numel()) % 9 / 4 - 1).double().view(shape)


def act_case(act: str, leading: tuple[int, ...] = (3, 5), **left_out: bool) -> dict[str, torch.Tensor]:
    rows = 2 * F if act in GATED else F
    shapes = {"x": (*leading, K), "weight": (rows, K), "bias": (rows,), "residual": (*leading, F)}
    return values({name: shape for name, shape in shapes.items() if not left_out.get(name)})


def mlp_case(act: str, leading: tuple[int, ...] = (3, 5), **left_out: bool) -> dict[str, torch.Tensor]:
    rows = 2 * F if act in GATED else F
    shapes = {
        "x": (*leading, K), "weight1": (rows, K), "bias1": (rows,), "weight2": (N, F), "bias2": (N,),
        "gate": (*leading[:-1], N), "residual": (*leading, N),
    }  # fmt: skip
    return values({name: shape for name, shape in shapes.items() if not left_out.get(name)})


def norm_case(leading: tuple[int, ...] = (3, 5)) -> dict[str, torch.Tensor]:
    return values({
        "x": (*leading, K), "weight": (N, K), "bias": (N,), "norm_weight": (K,), "norm_bias": (K,),
        "scale": (leading[0], K), "shift": (leading[0], K),
    })  # fmt: skip
