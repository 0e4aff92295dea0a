"""What a training loop puts round its model: precision, a watch for what is not finite, averages, checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.train.checkpoint import load_checkpoint, save_checkpoint
    from gpupipe.train.ema import Ema
    from gpupipe.train.precision import Precision
    from gpupipe.train.watch import Watch

_HOMES = {
    "Ema": "ema",
    "Precision": "precision",
    "Watch": "watch",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
}

__all__ = ["Ema", "Precision", "Watch", "load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpupipe.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpupipe.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
