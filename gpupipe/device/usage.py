"""How much memory there is, how much of it is in use, and whether an error says that it did not do."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil
    import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Of cgroup v2: a number of bytes, or ``max``."""


@dataclass(frozen=True)
class Usage:
    """Memory in bytes: of a CUDA device, or of this process on the CPU.

    Attributes:
        total: of the device; on the CPU what this process may have, of the machine or by its cgroup.
        used: on the device by all processes, as the driver tells; on the CPU this process's resident memory.
        reserved: taken by torch's allocator of this process, in use or not; on the CPU the same as ``used``.
        ceiling: what torch's allocator may take in all, by ``torch.cuda.set_per_process_memory_fraction``.
    """

    total: int
    used: int
    reserved: int
    ceiling: int

    @property
    def outside(self) -> int:
        """In use outside of torch's allocator: the CUDA context, NVDEC's decoders, CuPy, NCCL, other processes."""
        return max(0, self.used - self.reserved)

    @property
    def reachable(self) -> int:
        """What torch's allocator of this process can come to, as things stand, what it holds already included."""
        return max(0, min(self.total - self.outside, self.ceiling))


def usage(device: torch.device) -> Usage:
    """Memory as it is now. Does not wait for the device."""
    if device.type != "cuda":
        total, used = _host_bytes(), held_bytes(device)
        return Usage(total, used, used, total)
    import torch

    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return Usage(total, total - free, int(torch.cuda.memory_reserved(device)), int(share * total))


def held_bytes(device: torch.device) -> int:
    """What torch's tensors on a GPU take, or this process on the CPU: quickly, for every step. Does not wait for the device."""
    if device.type != "cuda":
        return int(_process(os.getpid()).memory_info().rss)
    import torch

    # memory_allocated() would make a sorted list of all figures first
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["current"]) if found else 0


@functools.cache
def _process(number: int) -> psutil.Process:
    import psutil

    return psutil.Process(number)


def _host_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def ran_out(error: BaseException | None) -> bool:
    """Whether an error says that memory did not do."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "not enough memory", "can't allocate memory")
    )
