"""The norm family's launches at the shapes of the benchmark."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.norms.backward import launch_backward
from gpupipe.ops.norms.forward import launch_forward

ROWS = 32768


def launches() -> list[Launch]:
    """Norm and modulation, gated residual, dropout, plain; at 3072 columns, and at a head's 128."""
    found: list[Launch] = []
    with recording("gpupipe.ops.norms.forward", "gpupipe.ops.norms.backward") as taken:
        for size in (3072, 128):
            x = torch.empty(1, ROWS, size, dtype=torch.bfloat16, device="meta")
            row = torch.empty(1, size, dtype=torch.bfloat16, device="meta")
            weight = torch.empty(size, device="meta")
            seed = torch.empty(1, dtype=torch.int64, device="meta")
            stat = torch.empty(ROWS, device="meta")
            cases = {
                "modulate": (None, None, None, None, None, row, row, False),
                "gate_add_modulate": (x, row, None, None, None, row, row, False),
                "dropout_add": (x, None, seed, weight, weight, None, None, False),
                "rms": (None, None, None, weight, None, None, None, True),
                "token_modulate": (None, None, None, None, None, x[0], x[0], False),
            }
            for name, (branch, gate, seeds, scaled, bias, scale, shift, rms) in cases.items():
                launch_forward(x, branch, gate, seeds, 0.1, scaled, bias, scale, shift, 1e-6, rms, False)
                residual = x if branch is not None else None
                launch_backward(
                    x, residual, x, branch, gate, seeds, 0.1, scaled, bias, scale, shift, stat, stat, rms, False, [True] * 7
                )  # fmt: skip
                found += taken(f"{name} {size}")
    return found
