"""Tensors used again by their shape: for memory that comes and goes in every step."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupipe.device.inventory import resolve_device
from gpupipe.device.stream import hand_over
from gpupipe.errors import ConfigError

if TYPE_CHECKING:
    import torch


_IN_USE = 256
"""Tensors that others hold and that the pool looks at all the same, about: whoever keeps thousands gets them for good."""


@dataclass
class _Kept:
    tensor: torch.Tensor
    passed: torch.cuda.Event | None
    """Behind the work of whoever gave it back."""


class BufferPool:
    """Hands out tensors, and the same memory again for the same shape, type and memory order; for use by several threads::

        buffers = BufferPool("cuda")
        for batch in loader:
            noise = buffers.take(batch.video.shape).normal_()
            train_step(batch.video, noise)
            buffers.give_back(noise)
            del noise  # else it is still held when the next one is taken

    A tensor that is given back is used again when nothing else refers to its memory, no view, no graph and no storage either:
    what is still held is never written over. It may be given back while others hold it. On a GPU its next user's stream waits,
    on the device, until the stream that was current at ``give_back`` has passed that point. One that is dropped instead is
    freed as any tensor is, and so are the oldest of those that are held by the hundred.

    What it saves: on the CPU the system's clearing of fresh pages, which takes several times as long as to fill memory that is
    there. On a GPU torch's allocator knows no shapes: where these alternate, it cuts blocks up and finds none that fits later
    on; here each keeps its place.

    Args:
        device: where the tensors are, as torch has it; a CUDA device that is not there is a DeviceError.
        idle_bytes: most memory that is kept and not in use; beyond it what was given back first is freed. None: no bound.

    Attributes:
        reused, made: how many tensors were handed out again, and anew.
    """

    def __init__(self, device: torch.device | str, *, idle_bytes: int | None = None) -> None:
        import torch

        self.device = torch.device(device)
        if self.device.type == "cuda":
            resolve_device(str(self.device))
        self.reused = self.made = 0
        self._idle_bytes = idle_bytes
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._made: dict[int, Any] = {}
        """Weak references to the memory that was made here, by its address; those of what is gone linger a while."""
        self._look_at = _IN_USE

    def take(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """A tensor to be written on the current stream; what is in it is left over from others.

        Args:
            shape: of the tensor.
            dtype: default torch's own default.
            memory_format: default ``torch.contiguous_format``.
        """
        import torch

        dtype = dtype or torch.get_default_dtype()
        memory_format = memory_format or torch.contiguous_format
        with self._lock:
            found = self._find(tuple(shape), dtype, memory_format)
            if found is None:
                self.made += 1
            else:
                self.reused += 1
        if found is None:
            return self._new(shape, dtype, memory_format)
        if found.passed is not None:
            hand_over([found.tensor], [found.passed], torch.cuda.current_stream(self.device))
        return found.tensor

    def give_back(self, *tensors: torch.Tensor) -> None:
        """Lets tensors of this pool be used again, once nothing else refers to them and the current stream has passed.

        A tensor that shares its memory with another process is not kept. Of several that lie in the same memory, given back
        twice or as views, the last is.

        Raises:
            ConfigError: for what is no tensor, or one that this pool did not make.
        """
        import torch

        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"a {type(tensor).__name__} was given back to a pool", fix="give back tensors that take() gave"
                )
            if tensor.device.type != self.device.type or self.device.index not in (None, tensor.device.index):
                raise ConfigError(
                    f"a tensor on {tensor.device} was given back to a pool on {self.device}", fix="keep a pool for each device"
                )
            if tensor.untyped_storage()._cdata not in self._made:
                raise ConfigError(
                    f"a tensor {tuple(tensor.shape)} was given back to a pool that did not make it",
                    fix="give back what take() of this pool gave, or a view of it",
                )
        passed = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            hand_over(tensors, [], stream)  # for the day on which the pool drops them
            passed = stream.record_event()
        with self._lock:
            for tensor in tensors:
                place = tensor.untyped_storage()._cdata
                # two of them would each take the other for a user, for ever
                self._kept = [each for each in self._kept if each.tensor.untyped_storage()._cdata != place]
                self._kept.append(_Kept(tensor.detach(), passed))
            self._trim()

    def clear(self) -> None:
        """Lets go of all memory; what others still hold stays theirs."""
        with self._lock:
            self._kept.clear()

    @property
    def held_bytes(self) -> int:
        """Memory of the tensors that were given back, those that others still refer to included."""
        with self._lock:
            return sum(each.tensor.untyped_storage().nbytes() for each in self._kept)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        made = torch.empty(shape, dtype=dtype, device=self.device, memory_format=memory_format)
        known = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        with self._lock:
            if len(self._made) >= self._look_at:  # not each time: there may be thousands
                self._made = {place: each for place, each in self._made.items() if not each.expired()}
                self._look_at = 2 * len(self._made) + _IN_USE
            self._made[known.cdata] = known
        return made

    def _find(self, shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format) -> _Kept | None:
        found = None
        for number in range(len(self._kept) - 1, -1, -1):  # the newest is the likeliest to be in the processor's cache
            tensor = self._kept[number].tensor
            storage = tensor.untyped_storage()
            # another process may read it, and nothing here tells when it is done; or it was freed by hand, as FSDP does
            if (storage.is_shared() and not tensor.is_cuda) or storage.nbytes() < _needed_bytes(tensor):
                del self._kept[number]
                continue
            del storage  # not to count as a user
            alike = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(memory_format=memory_format)
            if alike and _is_alone(tensor):
                found = self._kept.pop(number)
                break
        self._trim()
        return found

    def _trim(self) -> None:
        if len(self._kept) > 2 * _IN_USE:
            in_use = [each for each in self._kept if not _is_alone(each.tensor)]
            for_good = {id(each) for each in in_use[:-_IN_USE]}
            self._kept = [each for each in self._kept if id(each) not in for_good]
        if self._idle_bytes is None:
            return
        idle = [each for each in self._kept if _is_alone(each.tensor)]
        size = sum(each.tensor.untyped_storage().nbytes() for each in idle)
        for each in idle:
            if size <= self._idle_bytes:
                break
            size -= each.tensor.untyped_storage().nbytes()
            self._kept = [other for other in self._kept if other is not each]


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Where a dense tensor ends in its storage."""
    return int(tensor.storage_offset() + tensor.numel()) * tensor.itemsize


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether this tensor is all that refers to its memory."""
    return _users(tensor) == _users_of_one()


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors, views and other owners there are of its memory, and how many that hold its storage's Python object.

    All of the latter are one owner together, the one that it takes to look.
    """
    import torch

    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), int(sys.getrefcount(storage))


@functools.cache
def _users_of_one() -> tuple[int, int]:
    """What a tensor has that is alone; versions of Python and torch count differently."""
    import torch

    return _users(torch.empty(1, device="cpu"))
