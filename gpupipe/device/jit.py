"""Triton: whether its kernels can run here, and names for kernel files that also load where it is not installed.

With ``TRITON_INTERPRET=1`` in the environment before the first import, kernels run on CPU tensors, slowly, as tests want it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

reason: str | None = None
"""Why no Triton kernel can run in this process; None when some can."""
try:
    import triton
    import triton.language as tl
    from triton import jit
except (ImportError, RuntimeError, OSError) as error:
    reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    triton = tl = None

    def jit(function: Any) -> Any:
        """Leaves a kernel as it stands: nobody will launch it."""
        return function


__all__ = ["interpreted", "jit", "launch", "reason", "serves", "tl", "triton"]

_OLDEST = (8, 0)
"""The compute capability from which on bf16 is native."""


_INTERPRETED = reason is None and bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """True when Triton runs its kernels on the CPU."""
    return _INTERPRETED


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel on the current stream of its tensors' GPU: arguments by position, constants and options by name."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, enable_fp_fusion=True, **constants)
        return
    with torch.cuda.device(device):  # Triton goes by the current GPU
        kernel[grid](*args, enable_fp_fusion=True, **constants)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def serves(device: torch.device) -> bool:
    """True when Triton kernels run on tensors of this device."""
    if device.type == "cuda":
        return reason is None and not _INTERPRETED and _capable(device.index or 0)
    return device.type == "cpu" and _INTERPRETED


@functools.cache
def _capable(gpu: int) -> bool:
    """False too for a torch built for another maker's GPUs, which also call themselves ``cuda``."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(gpu) >= _OLDEST
