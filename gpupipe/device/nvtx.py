"""Ranges for NVIDIA's profilers (Nsight Systems, Nsight Compute), when asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpupipe.telemetry import Marker

ASKED_BY = "GPUPIPE_NVTX"
"""The environment variable that asks for them, by anything but nothing or 0."""


class _Nvtx:
    def push(self, name: str) -> None:
        import torch

        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        import torch

        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def marker(device: torch.device) -> Marker | None:
    """What shows ranges to a profiler; None where nobody asked for them, or the device is not a CUDA one."""
    asked = os.environ.get(ASKED_BY, "").strip() not in ("", "0")
    return _Nvtx() if asked and device.type == "cuda" else None
