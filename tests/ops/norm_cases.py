"""The norm family's ops beside their chains of torch's own, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gpupipe import ops


def spread(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return value.view(*value.shape[:-1], *[1] * (x.dim() - value.dim()), value.shape[-1])


def eager_norm(x: torch.Tensor, weight: Any, bias: Any, kind: str, eps: float) -> torch.Tensor:
    if kind == "rms":
        y = functional.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def eager(
    x: torch.Tensor,
    branch: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    kind: str = "layer",
    eps: float = 1e-6,
) -> Any:
    """The chain of torch's own ops."""
    if branch is not None:
        x = x + (branch if gate is None else spread(gate, x) * branch)
    y = eager_norm(x, weight, bias, kind, eps)
    if scale is not None:
        y = y * (1 + spread(scale, x))
    if shift is not None:
        y = y + spread(shift, x)
    return y if branch is None else (y, x)


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    "layer_norm": (ops.layer_norm, ("x", "weight", "bias"), {}),
    "layer_norm_plain": (ops.layer_norm, ("x",), {}),
    "rms_norm": (ops.rms_norm, ("x", "weight"), {"kind": "rms"}),
    "add_norm": (ops.add_norm, ("x", "branch", "weight", "bias"), {}),
    "add_rms_norm": (ops.add_norm, ("x", "branch", "weight"), {"kind": "rms"}),
    "add_modulate_norm": (ops.add_norm, ("x", "branch", "scale", "shift"), {}),
    "gate_add_norm": (ops.add_norm, ("x", "branch", "gate", "weight", "bias"), {}),
    "modulate_norm": (ops.modulate_norm, ("x", "scale", "shift"), {}),
    "modulate_affine_norm": (ops.modulate_norm, ("x", "scale", "shift", "weight", "bias"), {}),
    "scale_rms_norm": (ops.modulate_norm, ("x", "scale", "weight"), {"kind": "rms"}),
    "gate_add_modulate_norm": (ops.gate_add_modulate_norm, ("x", "branch", "gate", "scale", "shift"), {}),
    "gate_add_modulate_affine_norm": (
        ops.gate_add_modulate_norm, ("x", "branch", "gate", "scale", "shift", "weight", "bias"), {"kind": "rms"}
    ),
}  # fmt: skip


def inputs_of(names: tuple[str, ...], shape: tuple[int, ...], modulated: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(names) + sum(shape))
    shapes = {"x": shape, "branch": shape, "weight": shape[-1:], "bias": shape[-1:]}
    made = {name: torch.randn(shapes.get(name, modulated), generator=generator, dtype=torch.float64) for name in names}
    made["x"] = made["x"] * 2 + 0.5
    return made


def weights_of(names: tuple[str, ...], shape: tuple[int, ...]) -> list[torch.Tensor]:
    count = 2 if "branch" in names else 1
    return [torch.randn(shape, generator=torch.Generator().manual_seed(9 + n), dtype=torch.float64) for n in range(count)]
