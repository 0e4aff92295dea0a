"""Fused model kernels for video transformers, each with its gradient and a plain torch twin.

On an NVIDIA GPU they are kernels; elsewhere, and wherever :func:`use` says so, the twin runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.ops.activation import bias_act_dropout_add
    from gpupipe.ops.cast import scale_cast
    from gpupipe.ops.linear import linear_act, mlp, norm_linear, qkv_linear
    from gpupipe.ops.norms import (
        add_norm,
        dropout_add_norm,
        gate_add_modulate_norm,
        layer_norm,
        modulate_norm,
        rms_norm,
    )
    from gpupipe.ops.patch import patch_embed3d, unpatch_embed3d
    from gpupipe.ops.settings import precision, use
    from gpupipe.ops.timestep import timestep_embedding

_NORMS = ("add_norm", "dropout_add_norm", "gate_add_modulate_norm", "layer_norm", "modulate_norm", "rms_norm")
_HOMES = {
    **dict.fromkeys(_NORMS, "norms"),
    "bias_act_dropout_add": "activation",
    **dict.fromkeys(("linear_act", "mlp", "norm_linear", "qkv_linear"), "linear"),
    "patch_embed3d": "patch",
    "unpatch_embed3d": "patch",
    "scale_cast": "cast",
    "timestep_embedding": "timestep",
    "precision": "settings",
    "use": "settings",
}

NAMES = frozenset(_HOMES) - {"precision", "use"}
"""All ops."""

__all__ = [
    "NAMES",
    "add_norm",
    "bias_act_dropout_add",
    "dropout_add_norm",
    "gate_add_modulate_norm",
    "layer_norm",
    "linear_act",
    "mlp",
    "modulate_norm",
    "norm_linear",
    "patch_embed3d",
    "precision",
    "qkv_linear",
    "rms_norm",
    "scale_cast",
    "timestep_embedding",
    "unpatch_embed3d",
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
