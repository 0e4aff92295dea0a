"""Launches of the pass after a convolution, at the shapes of the benchmark, in both memory orders."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.conv3d.kernels import launch_backward, launch_finish

SHAPES = ((1, 128, 16, 128, 128), (1, 256, 16, 64, 64), (1, 512, 8, 32, 32))


def launches() -> list[Launch]:
    found: list[Launch] = []
    with recording("gpupipe.ops.conv3d.kernels") as taken:
        for shape in SHAPES:
            for last in (True, False):
                c = torch.empty(shape, dtype=torch.bfloat16, device="meta")
                c = c.contiguous(memory_format=torch.channels_last_3d) if last else c
                bias = torch.empty(shape[1], dtype=torch.bfloat16, device="meta")
                launch_finish(c, bias, c, "silu", last, False)
                launch_finish(c, bias, None, "gelu", last, False)
                launch_backward(c, c, bias, "silu", last, False, [True, True])
                launch_backward(c, c, None, "gelu", last, False, [True, False])
                launch_backward(c, None, bias, "none", last, False, [False, True])
                found += taken(f"{shape} {'last' if last else 'first'}")
    return found
