"""Fused model kernels for video transformers, each with its gradient and a plain torch twin.

On an NVIDIA GPU they are kernels; elsewhere, and wherever :func:`use` says so, the twin runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.ops.conv3d import conv3d_act
    from gpupipe.ops.group_norm import group_norm_act
    from gpupipe.ops.norms import (
        add_norm,
        dropout_add_norm,
        gate_add_modulate_norm,
        layer_norm,
        modulate_norm,
        rms_norm,
    )
    from gpupipe.ops.settings import precision, use
    from gpupipe.ops.softmax import scaled_softmax, softmax_dropout

_NORMS = ("add_norm", "dropout_add_norm", "gate_add_modulate_norm", "layer_norm", "modulate_norm", "rms_norm")
_HOMES = {
    **dict.fromkeys(_NORMS, "norms"),
    "conv3d_act": "conv3d",
    "group_norm_act": "group_norm",
    "scaled_softmax": "softmax",
    "softmax_dropout": "softmax",
    "precision": "settings",
    "use": "settings",
}

NAMES = frozenset(_HOMES) - {"precision", "use"}
"""All ops."""

__all__ = [
    "NAMES",
    "add_norm",
    "conv3d_act",
    "dropout_add_norm",
    "gate_add_modulate_norm",
    "group_norm_act",
    "layer_norm",
    "modulate_norm",
    "precision",
    "rms_norm",
    "scaled_softmax",
    "softmax_dropout",
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
