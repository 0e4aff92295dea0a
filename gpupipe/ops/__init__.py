"""Fused model kernels for video transformers, each with its gradient and a plain torch twin.

On an NVIDIA GPU they are kernels; elsewhere, and wherever :func:`use` says so, the twin runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.ops.activation import bias_act_dropout_add
    from gpupipe.ops.cast import scale_cast
    from gpupipe.ops.conv3d import conv3d_act
    from gpupipe.ops.grid_attention import attention
    from gpupipe.ops.group_norm import group_norm_act
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
    from gpupipe.ops.rope import Rope
    from gpupipe.ops.rotary import qk_norm_rope
    from gpupipe.ops.settings import precision, use
    from gpupipe.ops.softmax import scaled_softmax, softmax_dropout
    from gpupipe.ops.temporal import temporal_attention
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
    "conv3d_act": "conv3d",
    "group_norm_act": "group_norm",
    "scaled_softmax": "softmax",
    "softmax_dropout": "softmax",
    "precision": "settings",
    "Rope": "rope",
    "attention": "grid_attention",
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
    "bias_act_dropout_add",
    "conv3d_act",
    "dropout_add_norm",
    "gate_add_modulate_norm",
    "group_norm_act",
    "layer_norm",
    "linear_act",
    "mlp",
    "modulate_norm",
    "norm_linear",
    "patch_embed3d",
    "precision",
    "qk_norm_rope",
    "qkv_linear",
    "rms_norm",
    "scale_cast",
    "scaled_softmax",
    "softmax_dropout",
    "temporal_attention",
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
