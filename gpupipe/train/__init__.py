"""What a training loop uses: fused ops in models of others; precision, graphs, memory; preparation beside training.

Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.config import MemoryConfig, TrainingConfig
    from gpupipe.device.buffers import BufferPool
    from gpupipe.train.checkpoint import load_checkpoint, save_checkpoint
    from gpupipe.train.comparing import compare
    from gpupipe.train.ema import Ema
    from gpupipe.train.executor import PipelineExecutor
    from gpupipe.train.fusing import fuse, unfuse
    from gpupipe.train.graphs import AdaptiveGraph, GraphReport
    from gpupipe.train.memory.largest import BatchPlan, largest_batch
    from gpupipe.train.memory.leaks import LeakWatch
    from gpupipe.train.memory.pool import reserve_memory
    from gpupipe.train.memory.report import MemoryReport, memory_report
    from gpupipe.train.metrics import Metrics
    from gpupipe.train.modules import GridAttention, LayerNorm, Mlp, RMSNorm
    from gpupipe.train.precision import Precision
    from gpupipe.train.recomputing import recompute
    from gpupipe.train.residual import residual_attention, residual_mlp
    from gpupipe.train.switches import use
    from gpupipe.train.watch import Watch

_HOMES = {
    **dict.fromkeys(("AdaptiveGraph", "GraphReport"), "graphs"),
    "BufferPool": "gpupipe.device.buffers",
    "Ema": "ema",
    **dict.fromkeys(("GridAttention", "LayerNorm", "Mlp", "RMSNorm"), "modules"),
    "LeakWatch": "memory.leaks",
    "MemoryConfig": "gpupipe.config",
    **dict.fromkeys(("MemoryReport", "memory_report"), "memory.report"),
    "Metrics": "metrics",
    "PipelineExecutor": "executor",
    "Precision": "precision",
    "TrainingConfig": "gpupipe.config",
    "Watch": "watch",
    **dict.fromkeys(("BatchPlan", "largest_batch"), "memory.largest"),
    "compare": "comparing",
    **dict.fromkeys(("fuse", "unfuse"), "fusing"),
    **dict.fromkeys(("load_checkpoint", "save_checkpoint"), "checkpoint"),
    "recompute": "recomputing",
    "reserve_memory": "memory.pool",
    **dict.fromkeys(("residual_attention", "residual_mlp"), "residual"),
    "use": "switches",
}

__all__ = [
    "AdaptiveGraph",
    "BatchPlan",
    "BufferPool",
    "Ema",
    "GraphReport",
    "GridAttention",
    "LayerNorm",
    "LeakWatch",
    "MemoryConfig",
    "MemoryReport",
    "Metrics",
    "Mlp",
    "PipelineExecutor",
    "Precision",
    "RMSNorm",
    "TrainingConfig",
    "Watch",
    "compare",
    "fuse",
    "largest_batch",
    "load_checkpoint",
    "memory_report",
    "recompute",
    "reserve_memory",
    "residual_attention",
    "residual_mlp",
    "save_checkpoint",
    "unfuse",
    "use",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpupipe.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(home if home.startswith("gpupipe.") else f"gpupipe.train.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
