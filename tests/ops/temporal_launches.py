"""Launches of attention along time at the shapes of the benchmark, with norm and turning and without."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.temporal.backward import launch_backward
from gpupipe.ops.temporal.forward import launch_forward


def launches() -> list[Launch]:
    found: list[Launch] = []
    with recording("gpupipe.ops.temporal.forward", "gpupipe.ops.temporal.backward", "gpupipe.ops.sums") as taken:
        qkv = torch.empty(1, 32768, 3, 24, 128, dtype=torch.bfloat16, device="meta")
        table, weight = torch.empty(2 * 32 * 64, device="meta"), torch.empty(128, device="meta")
        for name, frames, fused, interleaved in (
            ("interleaved 32", 32, True, True), ("half 32", 32, True, False), ("plain 32", 32, False, False),
            ("interleaved 8", 8, True, True),
        ):  # fmt: skip
            weights = (weight, weight, table) if fused else (None, None, None)
            tables = ([frames, 32, 32], [8, 28, 28] if fused else [0, 0, 0], [frames, 32768 // frames // 32, 32])
            rest = (None, *weights, *tables, interleaved, fused, 1e-6, False, 0.09, False, False)
            launch_forward(qkv, None, None, *rest)
            launch_backward(qkv[:, :, 0].contiguous(), qkv, None, None, *rest, True)
            found += taken(name)
    return found
