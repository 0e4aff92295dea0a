"""Launches of the norm and turning of queries and keys at the shapes of the benchmark."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.rotary.backward import launch_backward
from gpupipe.ops.rotary.forward import launch_forward

GRID = [32, 32, 32]


def launches() -> list[Launch]:
    found: list[Launch] = []
    with recording("gpupipe.ops.rotary.forward", "gpupipe.ops.rotary.backward", "gpupipe.ops.sums") as taken:
        table = torch.empty(2 * 32 * 64, device="meta")
        for name, heads, norm, interleaved in (
            ("interleaved 3072", 24, 1, True), ("half 3072", 24, 1, False), ("full 2048", 16, 2, True),
        ):  # fmt: skip
            qkv = torch.empty(1, 32768, 3, heads, 128, dtype=torch.bfloat16, device="meta")
            weight = torch.empty(128 if norm == 1 else heads * 128, device="meta")
            tables = (table, [32, 32, 32], [8, 28, 28], GRID, 0, 0, interleaved, norm, 1e-6)
            launch_forward(qkv, None, weight, weight, *tables, False)
            out = qkv[:, :, 0].contiguous()
            launch_backward(out, out, out, qkv, None, weight, weight, *tables, True)
            found += taken(name)
    return found
