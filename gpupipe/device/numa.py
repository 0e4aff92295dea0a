"""Which cores are near a GPU: those of the NUMA node that it is attached to, as Linux tells in sysfs.

What crosses from node to node takes longer and shares a narrow link: threads that feed a GPU run best on its own node.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpupipe.device.inventory import cpu_quota

_SYSTEM = Path("/sys")


def nodes(system: Path = _SYSTEM) -> dict[int, frozenset[int]]:
    """Cores of each NUMA node that has some; empty where the system tells of none."""
    found = {}
    for folder in system.glob("devices/system/node/node[0-9]*"):
        with suppress(OSError, ValueError):
            cores = numbers((folder / "cpulist").read_text())
            if cores:
                found[int(folder.name.removeprefix("node"))] = cores
    return found


def numbers(said: str) -> frozenset[int]:
    """``"0-3,8"`` as numbers.

    Raises:
        ValueError: for anything else.
    """
    found: set[int] = set()
    for part in filter(None, said.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_of_gpu(index: int, system: Path = _SYSTEM) -> int | None:
    """The node of a CUDA device as torch numbers it; None where nobody tells."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    place: list[int | None] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = place
    if domain is None or bus is None or device is None:
        return None
    folder = system / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_near(gpu: int, sharing: int, system: Path = _SYSTEM) -> frozenset[int] | None:
    """The cores on which threads that feed a GPU are to run.

    Args:
        gpu: as torch numbers it.
        sharing: processes that share this machine, with a GPU each.

    Returns:
        Those of this process's affinity that are on the GPU's node. None where it is not to be bound: on one node alone, where
        nobody tells the GPU's, or where they are fewer than this process's share of the cores that it may use (its affinity,
        bounded by a cgroup's quota, over those that share).
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    known = nodes(system)
    node = node_of_gpu(gpu, system) if len(known) > 1 else None
    if node is None:
        return None
    allowed = os.sched_getaffinity(0)
    near = known.get(node, frozenset()) & allowed
    if near == allowed or len(near) < max(1, cpu_quota() // max(1, sharing)):
        return None
    return near


def bind(cores: frozenset[int]) -> None:
    """Has the calling thread, and all that it starts, run on these cores. Where the system refuses, it runs where it did."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
