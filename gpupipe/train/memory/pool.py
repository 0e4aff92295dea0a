"""Memory set aside at the start of a run, and room left for what allocates outside of torch.

How, and why so, by what torch documents and its allocator does:

- NVDEC, CuPy, NCCL and other processes take memory from the driver. torch's allocator gives back none that it has cached
  until it runs out itself, so a long run takes it away from them, and a decoder that is opened late fails. The ceiling of
  ``torch.cuda.set_per_process_memory_fraction`` keeps that from happening: at it the allocator frees what it has cached and
  then raises its own out-of-memory error, which a step guard or a planner can catch.
- What is set aside is one allocation, given back to the allocator's cache at once. Later allocations are cut from it, the best
  fit first, and neighbours are joined again when they are freed. A piece that is in use keeps the whole of it from going back
  to the driver, by ``empty_cache`` too: from then on no other process can take that memory. One piece and not several, for no
  tensor can lie across two.
- The allocator's blocks belong to the stream on which they were made, so it serves tensors of the stream that is current, a
  training loop's. The loader's own streams, the private pools of CUDA graphs and tensors up to 1 MB take theirs beside it,
  under the same ceiling. That is why not a ``torch.cuda.MemPool``: its memory is used only inside of its context, and not by
  the threads that run the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpupipe.config.ranges import amount_bytes
from gpupipe.config.training import MemoryConfig, reserved
from gpupipe.device.inventory import resolve_device
from gpupipe.device.usage import Usage, usage
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.telemetry import log

_GRAIN = 2 << 20
"""torch's allocator takes memory from the driver in multiples of this."""


class Allocator(Protocol):
    """torch's allocator of one device."""

    def usage(self) -> Usage: ...

    def set_ceiling(self, share: float) -> None:
        """Bounds what it takes to a share of the device's memory."""
        ...

    def take_and_cache(self, size_bytes: int) -> None:
        """Takes so much from the driver and keeps it for later allocations on the current stream.

        Raises:
            torch.OutOfMemoryError: when it is not there.
        """
        ...

    def free(self) -> None:
        """Gives back what is cached, as far as it can."""
        ...

    @property
    def splits_all(self) -> bool:
        """Whether blocks of any size are cut into smaller ones."""
        ...


class CudaAllocator:
    """That of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> Usage:
        return usage(self._device)

    def set_ceiling(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def take_and_cache(self, size_bytes: int) -> None:
        block = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        del block

    def free(self) -> None:
        torch.cuda.empty_cache()

    @property
    def splits_all(self) -> bool:
        bound = torch.cuda.memory_stats(self._device).get("max_split_size", -1)
        return bool(bound <= 0 or bound > usage(self._device).total)


@dataclass(frozen=True)
class Reserved:
    """What was set aside.

    Attributes:
        device: whose memory it is.
        held_bytes: what torch's allocator holds now, in use or ready to be.
        ceiling_bytes: what it may come to.
        outside_bytes: what was in use outside of it.
        room_bytes: what is left to them beyond that.
        reason: why nothing was done; None where it was.
    """

    device: torch.device
    held_bytes: int
    ceiling_bytes: int
    outside_bytes: int
    room_bytes: int
    reason: str | None = None

    def release(self) -> None:
        """Lifts the ceiling and gives back what no tensor uses; may be called again."""
        if self.reason is None:
            allocator = CudaAllocator(self.device)
            allocator.set_ceiling(1.0)
            allocator.free()

    def __str__(self) -> str:
        if self.reason is not None:
            return f"no memory set aside on {self.device}: {self.reason}"
        return (
            f"{self.held_bytes / 1e9:.2f} GB set aside on {self.device}, at most {self.ceiling_bytes / 1e9:.2f} GB; "
            f"{self.outside_bytes / 1e9:.2f} GB are in use outside of torch, {self.room_bytes / 1e9:.2f} GB more left for it"
        )


def reserve_memory(
    config: MemoryConfig | dict[str, Any] | float | str | bool | None, device: torch.device | str = "auto"
) -> Reserved:
    """Sets memory aside for tensors on the current stream, and leaves room for what allocates outside of torch.

    Call it once, at the start: before the model is there, in the process that trains, with the loop's stream current. After
    it out of memory comes from torch, where it can be caught, and not from a decoder.

    Args:
        config: a MemoryConfig, a dict of its fields, or an amount for ``reserve``: a share of the device's memory, ``"60GB"``.
            True: the defaults, which set a ceiling alone. None: nothing is done, as where a file says nothing of it.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. On the CPU nothing is done, and said why.

    Raises:
        ConfigError: for settings that do not fit the device, or an allocator that does not cut large blocks.
        DeviceMemoryError: when the memory is not free.
        DeviceError: when the device is not there.
    """
    settings, place = reserved(config), resolve_device(str(device))
    if settings is None:
        return Reserved(place, 0, 0, 0, 0, "it is left to torch")
    settings = MemoryConfig.parse(settings)
    if place.type != "cuda":
        made = Reserved(place, 0, 0, 0, 0, "the system's own allocator gives memory to tensors there, as they need it")
    else:
        made = set_aside(settings, place, CudaAllocator(place))
    log.info("%s", made)
    return made


def set_aside(config: MemoryConfig, device: torch.device, allocator: Allocator) -> Reserved:
    """:func:`reserve_memory` with an allocator."""
    allocator.free()  # else what is cached would be handed out for what is to come on top of it
    before = allocator.usage()
    room = amount_bytes(config.room, before.total)
    ceiling = before.total - before.outside - room
    known = f"of {before.total / 1e9:.1f} GB {before.outside / 1e9:.1f} GB are in use outside of torch"
    if ceiling < max(before.reserved, _GRAIN):
        raise ConfigError(
            f"memory.room={config.room!r} is {room / 1e9:.1f} GB, which is not there: {known} and "
            f"{before.reserved / 1e9:.1f} GB in torch",
            fix="give memory.room less, or free the GPU",
        )
    wanted = 0 if config.reserve is None else amount_bytes(config.reserve, before.total)
    if wanted > ceiling:
        raise ConfigError(
            f"memory.reserve={config.reserve!r} is {wanted / 1e9:.1f} GB, but {known}, {room / 1e9:.1f} GB are to stay free",
            fix=f"reserve at most {ceiling / 1e9:.1f} GB, give memory.room less, or free the GPU",
        )
    missing = wanted - before.reserved
    if missing >= _GRAIN and not allocator.splits_all:
        raise ConfigError(
            "PYTORCH_ALLOC_CONF has max_split_size_mb: a large block would serve no smaller tensor",
            fix="leave max_split_size_mb out, or memory.reserve",
        )
    allocator.set_ceiling(ceiling / before.total)
    if missing >= _GRAIN:
        try:
            allocator.take_and_cache(missing // _GRAIN * _GRAIN)
        except torch.OutOfMemoryError as error:
            allocator.set_ceiling(before.ceiling / before.total)
            raise DeviceMemoryError(
                f"memory.reserve={config.reserve!r}: {missing / 1e9:.1f} GB more are not free on {device}",
                fix="reserve less, or free the GPU",
            ) from error
    return Reserved(device, allocator.usage().reserved, ceiling, before.outside, room)
