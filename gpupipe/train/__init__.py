"""What a training loop uses: fused ops in models that someone else wrote, checked and reported; and modules to write one's own.

Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.train.comparing import compare
    from gpupipe.train.fusing import fuse, unfuse
    from gpupipe.train.modules import GridAttention, LayerNorm, Mlp, RMSNorm
    from gpupipe.train.residual import residual_attention, residual_mlp
    from gpupipe.train.switches import use

_HOMES = {
    "compare": "comparing",
    "fuse": "fusing",
    "unfuse": "fusing",
    **dict.fromkeys(("GridAttention", "LayerNorm", "Mlp", "RMSNorm"), "modules"),
    **dict.fromkeys(("residual_attention", "residual_mlp"), "residual"),
    "use": "switches",
}

__all__ = [
    "GridAttention",
    "LayerNorm",
    "Mlp",
    "RMSNorm",
    "compare",
    "fuse",
    "residual_attention",
    "residual_mlp",
    "unfuse",
    "use",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpupipe.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpupipe.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
