"""What a training loop uses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.train.fuse import fuse, unfuse
    from gpupipe.train.switches import use

_HOMES = {
    "fuse": "fuse",
    "unfuse": "fuse",
    "use": "switches",
}

__all__ = ["fuse", "unfuse", "use"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpupipe.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpupipe.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
