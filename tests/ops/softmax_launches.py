"""Softmax's launches at the shape of the benchmark."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.softmax.kernels import launch_backward, launch_forward


def launches() -> list[Launch]:
    found: list[Launch] = []
    with recording("gpupipe.ops.softmax.kernels") as taken:
        for size in (2048, 1536):
            x = torch.empty(8, 24, 2048, size, dtype=torch.bfloat16, device="meta")
            seed = torch.empty(1, dtype=torch.int64, device="meta")
            stat = torch.empty(8, 24, 2048, device="meta")
            causal = torch.empty(2048, size, dtype=torch.bool, device="meta")
            bias = torch.empty(24, 2048, size, dtype=torch.bfloat16, device="meta")
            for name, mask in {"no mask": None, "bool mask": causal, "bias": bias}.items():
                for drop in (seed, None):
                    launch_forward(x, mask, 0.1, drop, 0.1, False)
                    y, scores = (None, x) if drop is not None else (x, None)
                    launch_backward(x, y, scores, mask, 0.1, drop, 0.1, stat, stat, False, [True, mask is bias])
                    found += taken(f"{name}, {'dropout' if drop is not None else 'plain'}, {size}")
    return found
