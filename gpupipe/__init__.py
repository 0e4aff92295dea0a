"""gpupipe: video files in, ready training batches on the GPU out.

Importing this package imports neither torch nor any GPU package: public names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.config import BatchConfig, ClipConfig, DecodeConfig, LoaderConfig, TransformConfig
    from gpupipe.data.decode.lanes import free_decoders
    from gpupipe.data.loader import VideoLoader
    from gpupipe.data.reader import VideoReader
    from gpupipe.data.transform import ClipTransform, TransformParams
    from gpupipe.errors import ConfigError, DecodeError, GpupipeError
    from gpupipe.types import Batch, VideoInfo

__version__ = "0.1.0"

_HOMES = {
    "VideoLoader": "gpupipe.data.loader",
    "VideoReader": "gpupipe.data.reader",
    "free_decoders": "gpupipe.data.decode.lanes",
    "ClipTransform": "gpupipe.data.transform",
    "TransformParams": "gpupipe.data.transform",
    "Batch": "gpupipe.types",
    "VideoInfo": "gpupipe.types",
    "LoaderConfig": "gpupipe.config",
    "ClipConfig": "gpupipe.config",
    "TransformConfig": "gpupipe.config",
    "BatchConfig": "gpupipe.config",
    "DecodeConfig": "gpupipe.config",
    "GpupipeError": "gpupipe.errors",
    "ConfigError": "gpupipe.errors",
    "DecodeError": "gpupipe.errors",
}

_ROOMS = ("config", "errors", "observe", "types")
"""Those that the pages name by their path, as in ``gpupipe.observe.show``."""

__all__ = [
    "Batch",
    "BatchConfig",
    "ClipConfig",
    "ClipTransform",
    "ConfigError",
    "DecodeConfig",
    "DecodeError",
    "GpupipeError",
    "LoaderConfig",
    "TransformConfig",
    "TransformParams",
    "VideoInfo",
    "VideoLoader",
    "VideoReader",
    "free_decoders",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is not None:
        return getattr(importlib.import_module(home), name)
    if name in _ROOMS:
        return importlib.import_module(f"gpupipe.{name}")
    raise AttributeError(f"module 'gpupipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
