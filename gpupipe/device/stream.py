"""CUDA streams and the one rule by which a tensor goes from stream to stream.

The rule: the consumer's stream waits for the producer's event, and the tensor's memory is marked as used by the consumer's
stream, so that the caching allocator hands the block out again only after the consumer's work has passed. Nothing else in
gpupipe waits for an event of another stream or marks memory.

torch gives up the interpreter lock when an event of its own is recorded, waited for and dropped. A thread of a loader then has
to win it back from the training loop, and the loop from the thread: so a pipeline's events are :class:`Mark`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpupipe.device.doing import at
from gpupipe.device.driver import new_event, new_stream, record_event, wait_event
from gpupipe.errors import DeviceMemoryError, GpupipeError, SyncError

if TYPE_CHECKING:
    import torch

_NOT_PINNED = "CUDA error: out of memory"
"""What torch says when the host has no more memory to pin; of the GPU's own memory it has an error of its own."""

_idle: defaultdict[int, list[int]] = defaultdict(list)
"""By GPU, streams of :func:`own_stream` whose owner has gone."""


def own_stream(device: torch.device, owner: object) -> torch.cuda.Stream:
    """A stream of a CUDA device that nobody else is given as long as ``owner`` lives; it runs beside the default stream.

    Streams that torch makes come from a pool of 32, again and again: two that were made at different times may be one.
    """
    import torch

    idle = _idle[device.index or 0]
    handle = idle.pop() if idle else new_stream(device.index or 0)
    weakref.finalize(owner, idle.append, handle).atexit = False
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call, no-any-return]


_spare: defaultdict[int, list[int]] = defaultdict(list)
"""By GPU, events of marks that are gone. Whoever waits for one goes on waiting for what it was recorded behind."""


class Mark:
    """A place in the work of a stream of gpupipe's own, behind all that it has been given so far."""

    __slots__ = ("_event", "_gpu")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        gpu = stream.device_index
        spare = _spare[gpu]
        event = spare.pop() if spare else new_event(gpu)
        record_event(event, stream.cuda_stream, gpu)
        self._event, self._gpu = event, gpu

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait for it: a :class:`torch.cuda.Event`'s method, for :func:`hand_over`."""
        wait_event(self._event, stream.cuda_stream, self._gpu, keep_lock=False)

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Makes a further stream of gpupipe's own wait for it, and keeps the interpreter lock."""
        wait_event(self._event, stream.cuda_stream, self._gpu, keep_lock=True)

    def __del__(self) -> None:
        if hasattr(self, "_event"):  # it was recorded
            _spare[self._gpu].append(self._event)


def hand_over(tensors: Iterable[torch.Tensor], events: Iterable[torch.cuda.Event | Mark], consumer: torch.cuda.Stream) -> None:
    """Makes ``tensors``, complete once ``events`` have passed, usable on ``consumer`` and safe to drop at any time.

    CPU tensors are left alone. Does not block the host.
    """
    for event in events:
        event.wait(consumer)
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(consumer)


@contextmanager
def stage(name: str, path: str | None = None) -> Iterator[None]:
    """Names the stage in which CUDA failed, and meanwhile what this thread is at.

    Raises:
        DeviceMemoryError: for out of memory inside the block, the host's included.
        SyncError: for any other CUDA fault inside the block.
    """
    try:
        with at(name, path):
            yield
    except GpupipeError:
        raise
    except Exception as error:
        import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise DeviceMemoryError(
                f"stage {name!r}: the GPU is out of memory: {error}",
                fix="use a smaller batch or jitter depth, or free memory on this GPU",
                path=path,
            ) from error
        text = str(error)
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or _NOT_PINNED in text:
            raise DeviceMemoryError(
                f"stage {name!r}: this machine is out of memory: {text.strip() or 'no message'}",
                fix="use smaller batches, clips or sizes, a smaller jitter depth or fewer decode threads",
                path=path,
            ) from error
        if is_cuda_fault(error):
            raise fault(name, error, path) from error
        raise


def fault(name: str, what: object, path: str | None) -> SyncError:
    """The error for a fault of the CUDA context in a stage."""
    fix = "run again with CUDA_LAUNCH_BLOCKING=1 to find the kernel; the process must be restarted"
    return SyncError(f"stage {name!r}: CUDA reported a fault: {what}", fix=fix, path=path)


def is_cuda_fault(error: BaseException) -> bool:
    """True for errors that torch, CuPy or PyNvVideoCodec raise when the CUDA context reports a fault."""
    if type(error).__name__ in ("AcceleratorError", "CUDARuntimeError", "CUDADriverError"):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("CUDA error" in text or "CUDA_ERROR_" in text or "device-side assert" in text)
