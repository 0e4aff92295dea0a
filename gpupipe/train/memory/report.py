"""Where a device's memory is: in use, cached, in pieces, outside of torch; and the most that it was."""

from __future__ import annotations

import difflib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized, ValuesView
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from gpupipe.device.inventory import resolve_device
from gpupipe.device.usage import usage
from gpupipe.errors import ConfigError
from gpupipe.train import arguments
from gpupipe.train.memory.tensors import python_tensors, storages

OTHER = "other"
"""The kind of what no kind was given for: activations, batches, temporary tensors."""


@dataclass(frozen=True)
class MemoryReport:
    """A device's memory at one moment, in bytes. On the CPU it is this process's, and what only torch's allocator of a GPU
    knows is None.

    Attributes:
        device: whose memory it is.
        total: of the device; on the CPU of the machine, or what the process's cgroup may have.
        used: on the device by all processes, as the driver tells; on the CPU this process's resident memory.
        allocated: in tensors. On the CPU in those that Python objects exist for.
        peak_used: on the CPU the most resident memory since the process began.
        peak_allocated: the most of it since the peak was reset.
        reserved: held by torch's allocator, in use or not.
        peak_reserved: the most of it.
        ceiling: what the allocator may hold, see :func:`gpupipe.train.reserve_memory`.
        largest_free: the largest piece of what it holds and nobody uses: the largest tensor that needs nothing of the driver.
        fragmentation: share, 0 to 1, of what it holds and nobody uses that lies outside of that piece.
        stuck: of what nobody uses, what cannot go back to the driver, for its neighbours are in use.
        graphs: held by private pools, those of CUDA graphs.
        outside: in use on the device outside of this process's allocator: NVDEC, CuPy, NCCL, the CUDA context, other processes.
        retries: how often the allocator had to give its cache back to find memory. More than a few cost time: fragmentation.
        kinds: what is in tensors, by kind; ``other`` is the rest.
    """

    device: torch.device
    total: int
    used: int
    allocated: int
    peak_used: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None
    ceiling: int | None = None
    largest_free: int | None = None
    fragmentation: float | None = None
    stuck: int | None = None
    graphs: int | None = None
    outside: int | None = None
    retries: int | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self, prefix: str = "memory/") -> dict[str, float]:
        """What is known, flat, for logs: bytes as whole numbers, the kinds as ``memory/kind/parameters``."""
        names = [name for name in self.__dataclass_fields__ if name not in ("device", "kinds")]
        found = {f"{prefix}{name}": getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | {f"{prefix}kind/{name}": size for name, size in self.kinds.items()}

    def __str__(self) -> str:
        rows = [(name, getattr(self, attribute)) for attribute, name in _ROWS.items()]
        rows += [(f"  {name}", size) for name, size in self.kinds.items()]
        lines = [f"{name:<34}{_written(size)}" for name, size in rows if size is not None]
        if self.fragmentation is not None:
            lines.append(f"{'fragmentation of the cache':<34}{self.fragmentation:>10.0%}")
        if self.retries is not None:
            lines.append(f"{'times the cache was given back':<34}{self.retries:>10d}")
        return "\n".join([f"memory of {self.device}", *lines])


_ROWS = {
    "total": "in all",
    "used": "in use",
    "peak_used": "  at most",
    "outside": "  outside of torch",
    "ceiling": "most that torch may hold",
    "reserved": "held by torch",
    "peak_reserved": "  at most",
    "graphs": "  for CUDA graphs",
    "largest_free": "  largest free piece",
    "stuck": "  free, but not to be given back",
    "allocated": "in tensors",
    "peak_allocated": "  at most",
}


def memory_report(
    device: torch.device | str = "auto",
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    **kinds: Any,
) -> MemoryReport:
    """What memory is used for now, and the most that it was. Does not wait for the device.

    It goes through the allocator's blocks, some milliseconds: for every few hundredth step, not for each. The peak is that
    since ``torch.cuda.reset_peak_memory_stats``.

    Args:
        device: as torch has it, or ``auto``. On the CPU the figures are this process's.
        model: counts its ``parameters``, ``buffers`` and ``gradients`` apart.
        optimizer: its ``optimizer state``; or that of several.
        kinds: tensors of further kinds, by name: ``averages=ema``, ``batch=batch``, ``teacher=teacher``. Mappings, lists,
            tuples and dataclasses are looked through; of modules parameters and buffers count, of other objects what their
            ``state_dict()`` holds.

    Raises:
        ConfigError: for what is no model or optimizer, or a kind that is not empty and holds no tensors.
        DeviceError: when the device is not there.
    """
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"device is {arguments.shown(device)}", fix="name what is to be counted: memory_report(model=model)")
    place = resolve_device(str(device))
    groups = _groups(model, optimizer) | {name: _values(name, values) for name, values in kinds.items()}
    if place.type != "cuda":
        found = usage(place)
        alive = sum(storages(python_tensors(place)).values())
        most, kept = max(_most_resident(), found.used), _by_kind(groups, place, alive)
        return MemoryReport(place, found.total, found.used, alive, peak_used=most, kinds=kept)
    stats = torch.cuda.memory_stats(place)
    everywhere = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [each for each in everywhere if each["device"] == place.index]
    return report_of(place, stats, segments, groups)


def report_of(
    device: torch.device, stats: Mapping[str, Any], segments: Sequence[Mapping[str, Any]], groups: Mapping[str, Iterable[Any]]
) -> MemoryReport:
    """A report from what torch's allocator says of itself: ``memory_stats`` and ``memory_snapshot``."""
    found = usage(device)
    shared = [each for each in segments if tuple(each.get("segment_pool_id", (0, 0))) == (0, 0)]
    free = [block["size"] for each in shared for block in each["blocks"] if block["state"] == "inactive"]
    largest, allocated = max(free, default=0), int(stats.get("allocated_bytes.all.current", 0))
    return MemoryReport(
        device=device,
        total=found.total,
        used=found.used,
        allocated=allocated,
        peak_allocated=int(stats.get("allocated_bytes.all.peak", 0)),
        reserved=int(stats.get("reserved_bytes.all.current", 0)),
        peak_reserved=int(stats.get("reserved_bytes.all.peak", 0)),
        ceiling=found.ceiling,
        largest_free=largest,
        fragmentation=1 - largest / sum(free) if free else 0.0,
        stuck=int(stats.get("inactive_split_bytes.all.current", 0)),
        graphs=sum(each["total_size"] for each in segments) - sum(each["total_size"] for each in shared),
        outside=found.outside,
        retries=int(stats.get("num_alloc_retries", 0)),
        kinds=_by_kind(groups, device, allocated),
    )


def _written(size: int) -> str:
    return f"{size / 1e9:>10.3f} GB" if size >= 1e9 else f"{size / 1e6:>10.3f} MB"


def _groups(model: torch.nn.Module | None, optimizer: Any) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    if model is not None:
        arguments.a_model(model)
        parameters = list(model.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        groups |= {"parameters": parameters, "buffers": list(model.buffers()), "gradients": gradients}
    if optimizer is not None:
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for each in several:
            arguments.of(torch.optim.Optimizer, each, "optimizer", "give the optimizer itself, or a list of several")
        groups["optimizer state"] = list(_tensors_in(several))
    return groups


def _values(name: str, values: Any) -> list[torch.Tensor]:
    meant = difflib.get_close_matches(name, ("model", "optimizer"), n=1, cutoff=0.8)
    if meant and isinstance(values, torch.nn.Module | torch.optim.Optimizer):
        raise ConfigError(f"{name} is {arguments.shown(values)}", fix=f"did you mean {meant[0]}=…?")
    found = list(_tensors_in(values))
    if not found and not (isinstance(values, Sized) and len(values) == 0):
        raise ConfigError(f"{name} is {arguments.shown(values)}, which holds no tensors", fix=f"give {name} tensors")
    return found


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        parts = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        parts = value.state.values()
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque | Iterator | ValuesView):
        parts = value
    elif isinstance(value, type):
        return
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    elif callable(state := getattr(value, "state_dict", None)):
        parts = [state()]
    for part in parts:
        yield from _tensors_in(part)


def _by_kind(groups: Mapping[str, Iterable[Any]], device: torch.device, allocated: int) -> dict[str, int]:
    """Bytes of each group, of tensors of the device alone; memory that several share counts for the first."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for name, values in groups.items():
        pieces = storages(_local(value) for value in values if isinstance(value, torch.Tensor) and value.device == device)
        sizes[name] = sum(size for address, size in pieces.items() if address not in seen)
        seen |= pieces.keys()
    return sizes | {OTHER: max(0, allocated - sum(sizes.values()))} if groups else {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's own part of a distributed tensor."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def _most_resident() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
