"""Fused model kernels for video transformers, each with its gradient and a plain torch twin.

On an NVIDIA GPU they are kernels; elsewhere, and wherever :func:`use` says so, the twin runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.ops.grid_attention import attention
    from gpupipe.ops.norms import (
        add_norm,
        dropout_add_norm,
        gate_add_modulate_norm,
        layer_norm,
        modulate_norm,
        rms_norm,
    )
    from gpupipe.ops.rope import Rope
    from gpupipe.ops.rotary import qk_norm_rope
    from gpupipe.ops.settings import precision, use
    from gpupipe.ops.temporal import temporal_attention

_NORMS = ("add_norm", "dropout_add_norm", "gate_add_modulate_norm", "layer_norm", "modulate_norm", "rms_norm")
_HOMES = {
    **dict.fromkeys(_NORMS, "norms"),
    "Rope": "rope",
    "attention": "grid_attention",
    "precision": "settings",
    "qk_norm_rope": "rotary",
    "temporal_attention": "temporal",
    "use": "settings",
}

NAMES = frozenset(_HOMES) - {"Rope", "precision", "use"}
"""All ops."""

__all__ = [
    "NAMES",
    "Rope",
    "add_norm",
    "attention",
    "dropout_add_norm",
    "gate_add_modulate_norm",
    "layer_norm",
    "modulate_norm",
    "precision",
    "qk_norm_rope",
    "rms_norm",
    "temporal_attention",
    "use",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpupipe.ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpupipe.ops.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
