"""Memory taken in a few large pieces and handed out in small ones: never more than a bound, never given back singly.

What is handed out lives as long as the slabs. So there is no fragmentation, and pinning, which takes milliseconds and may hold
up the GPU, happens seldom.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpupipe.device.stream import hand_over

if TYPE_CHECKING:
    import torch

Where = Literal["device", "pinned"]

SLAB_BYTES = 256 << 20
"""Size of a slab, where the bound has room for it and no larger piece is asked for."""
PITCH_BYTES = 512
"""Rows of frames start at multiples of this: kernels read several neighbouring samples as one word."""
_ALIGN = 512
"""Pieces start at multiples of this many bytes."""


_WORTH_IT_BYTES = 32 << 20


def give_back_idle(device: torch.device) -> bool:
    """Has torch give memory of a CUDA device that it keeps for later back to the driver; False where that is hardly any."""
    import torch

    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if idle < _WORTH_IT_BYTES:
        return False
    torch.cuda.empty_cache()
    return True


@dataclass
class _Slab:
    memory: torch.Tensor
    allocated: torch.cuda.Event | None
    used: int = 0

    @property
    def free(self) -> int:
        return int(self.memory.numel()) - self.used


class Slabs:
    """Hands out memory, for use by several threads.

    Args:
        where: ``device``: memory of ``device``. ``pinned``: page-locked host memory, for copies to and from ``device`` that do
            not hold up the host. On the CPU both are plain host memory.
        limit_bytes: bound on the memory taken, what is not yet handed out included.
    """

    def __init__(self, device: torch.device, where: Where, limit_bytes: int) -> None:
        self._device = device
        self._pinned = where == "pinned" and device.type == "cuda"
        self._lock = threading.Lock()
        self._limit = limit_bytes
        self._held = 0
        self._slabs: list[_Slab] = []

    @property
    def held_bytes(self) -> int:
        """Memory taken from the system or from torch's allocator."""
        return self._held

    @property
    def limit_bytes(self) -> int:
        return self._limit

    def has_room(self, size_bytes: int) -> bool:
        """Whether :meth:`take` would find so many bytes."""
        with self._lock:
            return self._with_room(size_bytes) is not None or self._next_size(size_bytes) is not None

    def take(self, size_bytes: int, stream: torch.cuda.Stream | None) -> torch.Tensor | None:
        """Memory for good, ready to be written on ``stream``.

        Returns:
            (size_bytes,) uint8, not initialised; None where the bound has no room for it.

        Raises:
            RuntimeError, MemoryError: what torch raises when there is no memory within the bound either.
        """
        with self._lock:
            slab = self._with_room(size_bytes) or self._grow(size_bytes, stream)
            if slab is None:
                return None
            piece = slab.memory[slab.used : slab.used + size_bytes]
            slab.used += -(-size_bytes // _ALIGN) * _ALIGN
        if stream is not None and slab.allocated is not None:
            hand_over([piece], [slab.allocated], stream)
        return piece

    def stop_growing(self) -> None:
        """Lowers the bound to what is held."""
        with self._lock:
            self._limit = self._held

    def close(self) -> None:
        """Lets go of all memory; where it is still in use on a stream, torch's allocators wait for that."""
        with self._lock:
            self._slabs.clear()
            self._held = self._limit = 0

    def _with_room(self, size_bytes: int) -> _Slab | None:
        return next((slab for slab in self._slabs if slab.free >= size_bytes), None)

    def _next_size(self, size_bytes: int) -> int | None:
        """Bytes of a new slab with room for a piece; None where the bound has no room for one."""
        room = self._limit - self._held
        size = max(size_bytes, min(SLAB_BYTES, room))
        if self._pinned and room > 0:  # torch's allocator of pinned memory takes powers of two
            above = 1 << (size - 1).bit_length()
            size = above if above <= room else 1 << (room.bit_length() - 1)
        return size if size_bytes <= size <= room else None

    def _grow(self, size_bytes: int, stream: torch.cuda.Stream | None) -> _Slab | None:
        import torch

        size = self._next_size(size_bytes)
        if size is None:
            return None
        on_device = self._device.type == "cuda" and not self._pinned
        with torch.cuda.stream(stream):
            place = self._device if on_device else torch.device("cpu")
            memory = torch.empty(size, dtype=torch.uint8, device=place, pin_memory=self._pinned)
            slab = _Slab(memory, stream.record_event() if stream is not None and on_device else None)
        self._held += size
        self._slabs.append(slab)
        return slab
