"""Lanes: a CUDA stream with the decoders and the frame memory that are used on it alone; lent out, given back, used again.

Creating an NVDEC session takes about 50 ms and holds up the sessions beside it. So lanes outlive the loader or reader that
made them: the next one in this process finds them warm.
"""

from __future__ import annotations

import atexit
import os
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING

from gpupipe.data.decode.dali import DaliDecoder
from gpupipe.data.decode.nvdec import NvdecDecoder
from gpupipe.data.decode.surface import FrameStore

if TYPE_CHECKING:
    import torch

_KEPT = 16
"""Idle lanes kept for a GPU; beyond that the one that lay idle longest is freed."""


class Lane:
    """One stream and what is bound to it. For one thread at a time; all its work is ordered on the stream, whoever holds it."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.store = FrameStore(self.stream)
        self._nvdec: NvdecDecoder | None = None
        self._dali: DaliDecoder | None = None
        self.process = os.getpid()

    def nvdec(self, keep: int) -> NvdecDecoder:
        """The lane's decoders, of which at most ``keep`` stay open."""
        if self._nvdec is None:
            self._nvdec = NvdecDecoder(self.stream, self.store, keep)
        self._nvdec.keep = keep
        return self._nvdec

    def free_decoders(self) -> int:
        """Closes the lane's decoders, which it makes anew as they are needed; how many there were."""
        return self._nvdec.close() if self._nvdec is not None else 0

    def dali(self) -> DaliDecoder:
        """The lane's way to DALI, which keeps its decoders itself.

        Raises:
            DeviceError: when DALI cannot be imported.
        """
        if self._dali is None:
            self._dali = DaliDecoder(self.stream, self.store)
        return self._dali

    def close(self) -> None:
        """Frees decoders and memory, after all work on the stream has passed."""
        self.store.clear()
        if self._nvdec is not None:
            self._nvdec.close()
            self._nvdec = None


# Only single calls on deques, which need no lock: a lane may come back in a finalizer, hence amid any other code.
_idle: defaultdict[int, deque[Lane]] = defaultdict(deque)
_parents: list[Lane] = []
"""In a forked child: the parent's lanes, kept so that nothing takes them down, for CUDA does not survive a fork."""


def _after_fork() -> None:
    _parents.extend(lane for idle in _idle.values() for lane in idle)
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def take(device: torch.device) -> Lane:
    """A lane of a CUDA device: the one given back last, or a new one."""
    try:
        return _idle[device.index or 0].pop()
    except IndexError:
        return Lane(device)


def give_back(lane: Lane) -> None:
    """Lets the next one have a lane. Work may still be queued on its stream."""
    if lane.process != os.getpid():
        _parents.append(lane)
        return
    lane.store.clear()
    idle = _idle[lane.stream.device_index]
    idle.append(lane)
    if len(idle) > _KEPT:
        with suppress(IndexError):
            idle.popleft().close()


def free_decoders() -> int:
    """Frees the decoders that no loader or reader holds, and their GPU memory.

    Closed loaders and readers leave their NVDEC sessions to the next ones, at most 16 threads' of them for each GPU. Call this
    when the memory is wanted for something else.

    Returns:
        How many threads' decoders were freed.
    """
    freed = 0
    for idle in list(_idle.values()):
        with suppress(IndexError):
            while True:
                lane = idle.popleft()
                freed += 1
                lane.close()
    return freed


@atexit.register
def _free_at_exit() -> None:
    """While CUDA is still there; after a fault of the context nothing can be freed, and nothing need be."""
    with suppress(Exception):
        free_decoders()
