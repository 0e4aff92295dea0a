"""Group norm's launches at the shapes of the benchmark, in both memory orders."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.group_norm.backward import launch_backward
from gpupipe.ops.group_norm.forward import launch_forward

SHAPES = ((1, 128, 16, 128, 128), (1, 256, 16, 64, 64), (2, 512, 8, 32, 32))
GROUPS = 32


def launches() -> list[Launch]:
    found: list[Launch] = []
    with recording("gpupipe.ops.group_norm.forward", "gpupipe.ops.group_norm.backward") as taken:
        for shape in SHAPES:
            for last in (True, False):
                x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
                x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
                weight = torch.empty(shape[1], device="meta")
                stat = torch.empty(shape[0], GROUPS, device="meta")
                launch_forward(x, GROUPS, weight, weight, 1e-5, "silu", last, False)
                launch_backward(x, x, GROUPS, weight, weight, stat, stat, "silu", last, False, [True] * 3)
                found += taken(f"{shape} {'last' if last else 'first'}")
    return found
