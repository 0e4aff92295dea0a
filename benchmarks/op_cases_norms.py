"""The norm family's cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from op_case import OpCase, Subject, random, without
from op_timing import Inputs
from torch.nn import functional

from gpupipe import ops


def _modulated(y: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return y * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _liger(name: str) -> Callable[[], Subject]:
    def load() -> Subject:
        if name == "rms_norm":
            function: Any = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
            return lambda x, weight: function.apply(x, weight, 1e-6, 0.0, "llama", False)
        function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda x, weight, bias: function.apply(x, weight, bias, 1e-6)

    return load


def _quack() -> Subject:
    function: Any = importlib.import_module("quack").rmsnorm
    return lambda x, weight: function(x, weight, eps=1e-6)


def norm_cases(tokens: int, size: int) -> list[OpCase]:
    """The norm family: one sample, bf16, modulation and weights of one row."""
    shape = f"n{tokens}-h{size}-bf16"
    once = 2.0 * tokens * size  # bytes of one read or write of all

    def modulated(device: torch.device) -> Inputs:
        x, scale, shift = random(device, 1, tokens, size), random(device, 1, size), random(device, 1, size)
        return {"x": x, "scale": scale, "shift": shift}

    def gated(device: torch.device) -> Inputs:
        return {**modulated(device), "branch": random(device, 1, tokens, size), "gate": random(device, 1, size)}

    def affine(device: torch.device) -> Inputs:
        return {"x": random(device, 1, tokens, size), "weight": random(device, size), "bias": random(device, size)}

    def eager_gated(
        x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + gate.unsqueeze(1) * branch
        return _modulated(functional.layer_norm(total, (size,), eps=1e-6), scale, shift), total

    def eager_dropout(x: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + functional.dropout(branch, 0.1)
        return functional.layer_norm(total, (size,), eps=1e-6), total

    return [
        OpCase(
            f"modulate_norm-{shape}", "norms", modulated,
            lambda x, scale, shift: ops.modulate_norm(x, scale, shift),
            lambda x, scale, shift: _modulated(functional.layer_norm(x, (size,), eps=1e-6), scale, shift),
            2 * once, 3 * once,
        ),
        OpCase(
            f"gate_add_modulate_norm-{shape}", "norms", gated,
            lambda x, branch, gate, scale, shift: ops.gate_add_modulate_norm(x, branch, gate, scale, shift),
            eager_gated, 4 * once, 6 * once,
        ),
        OpCase(
            f"dropout_add_norm-{shape}", "norms", lambda device: without(gated(device), "gate", "scale", "shift"),
            lambda x, branch: ops.dropout_add_norm(x, branch, p=0.1), eager_dropout, 4 * once, 5 * once, repeatable=False,
        ),
        OpCase(
            f"rms_norm-{shape}", "norms", lambda device: without(affine(device), "bias"),
            lambda x, weight: ops.rms_norm(x, weight),
            lambda x, weight: functional.rms_norm(x, (size,), weight, 1e-6),
            2 * once, 3 * once, {"liger": _liger("rms_norm"), "quack": _quack},
        ),
        OpCase(
            f"layer_norm-{shape}", "norms", affine,
            lambda x, weight, bias: ops.layer_norm(x, weight, bias, eps=1e-6),
            lambda x, weight, bias: functional.layer_norm(x, (size,), weight, bias, 1e-6),
            2 * once, 3 * once, {"liger": _liger("layer_norm")},
        ),
    ]  # fmt: skip
