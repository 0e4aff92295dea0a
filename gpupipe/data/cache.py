"""Decoded clips kept for later epochs, so that these need not decode them again.

What came first stays: once the cache is full nothing is thrown out, and nothing more is taken in. An epoch visits each sample
once, in an order of its own. A cache that threw out what was used least recently would, for a set larger than the cache, have
thrown out almost every clip just before its next use; one that keeps what it has finds the same share of the set in every epoch
(the MinIO cache of Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpupipe.data.bytes import Identity
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan
from gpupipe.device.memory import Slabs, Where
from gpupipe.device.stream import stage
from gpupipe.errors import DeviceMemoryError
from gpupipe.telemetry import Telemetry
from gpupipe.types import PlaneFormat, Planes, copy_samples

if TYPE_CHECKING:
    import torch

_Key = tuple[Identity, tuple[int, ...], str]
"""The file as it was, the frames, and the decoder that made them."""


@dataclass(frozen=True, slots=True)
class KeptClip:
    """The decoded frames of one visit, without what pads them.

    Attributes:
        parts: (N, rows, samples) uint8 or uint16 each, as :attr:`gpupipe.types.Planes.parts` gives them, in memory that is
            never written again.
        format: the layout of a frame.
        decoder: ``nvdec``, ``dali`` or ``cpu``: who made them.
        ready: what a stream must wait for before it reads them; None on the CPU.
    """

    parts: tuple[torch.Tensor, ...]
    format: PlaneFormat
    decoder: str
    ready: torch.cuda.Event | None

    def on_host(self) -> Planes:
        """The frames as planes, for a loader on the CPU; to be read only."""
        import torch

        if len(self.parts) == 1:
            return Planes(self.parts[0], self.format)
        shape = (len(self.parts[0]), self.format.rows, self.format.row_samples)
        planes = Planes(torch.empty(shape, dtype=self.parts[0].dtype), self.format)
        planes.fill(self.parts)
        return planes


class ClipCache:
    """Keeps the planes of visits, by file, frames and decoder. Shared by all threads and all epochs of a loader.

    Counts ``cache_bytes``: bytes of the planes held.

    Args:
        device: where the loader's clips are made.
        where: ``device`` or ``pinned``; see :class:`gpupipe.device.memory.Slabs`.
        limit_bytes: bound on the memory taken.
    """

    def __init__(self, device: torch.device, where: Where, limit_bytes: int, telemetry: Telemetry) -> None:
        self._slabs = Slabs(device, where, limit_bytes)
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._clips: dict[_Key, KeptClip | None] = {}
        """None for one that a thread is about to keep."""

    def find(self, index: VideoIndex, plan: Plan, decoder: str) -> KeptClip | None:
        """The planes of a plan, or None.

        Args:
            decoder: the one chosen for the video. What NVDEC or DALI may decode, software decodes to the same bits, so that its
                planes do as well. A video that NVDEC has not got, or has given up, takes those of software alone.
        """
        for maker in (decoder, "cpu"):
            clip = self._clips.get((index.identity, plan.frames, maker))
            if clip is not None:
                return clip
        return None

    def keep(self, index: VideoIndex, plan: Plan, decoder: str, planes: Planes, stream: torch.cuda.Stream | None) -> None:
        """Copies the planes of a plan, where the bound has room for them and they are not there yet.

        Without memory the cache stops growing, told once in the log.

        Args:
            planes: one frame for each of ``plan.frames``, complete on ``stream`` and left alone until it has passed.
            decoder: who made them.

        Raises:
            SyncError: when CUDA fails.
        """
        size = len(planes) * planes.format.used_bytes
        if not self._slabs.has_room(size):
            return
        key = (index.identity, plan.frames, decoder)
        with self._lock:
            if key in self._clips:
                return
            self._clips[key] = None
        clip = None
        try:
            with stage("cache", index.info.path):
                clip = self._copy(planes, size, decoder, stream)
        except DeviceMemoryError as error:
            self._slabs.stop_growing()
            held = f"{self._slabs.held_bytes / 2**30:.2f} GiB"
            self._telemetry.warn_once("cache full", f"the cache of decoded clips stays at {held}: {error.message}")
        finally:
            with self._lock:
                if clip is not None:
                    self._clips[key] = clip
                else:
                    self._clips.pop(key, None)
        if clip is not None:
            self._telemetry.count("cache_bytes", size)

    def _copy(self, planes: Planes, size_bytes: int, decoder: str, stream: torch.cuda.Stream | None) -> KeptClip | None:
        import torch

        memory = self._slabs.take(size_bytes, stream)
        if memory is None:
            return None
        with torch.cuda.stream(stream):
            parts = _views(memory, len(planes), planes.format)
            for ours, theirs in zip(parts, planes.parts, strict=True):
                copy_samples(ours, theirs, non_blocking=True)
            ready = stream.record_event() if stream is not None else None
        return KeptClip(tuple(parts), planes.format, decoder, ready)

    def close(self) -> None:
        """Lets go of all clips and their memory; what streams still read of it is freed after them."""
        with self._lock:
            self._clips.clear()
        self._slabs.close()
        self._telemetry.count("cache_bytes", -self._telemetry.value("cache_bytes"))


def _views(memory: torch.Tensor, frames: int, layout: PlaneFormat) -> Sequence[torch.Tensor]:
    """The parts of planes, one behind the other in (bytes,) uint8."""
    import torch

    samples = memory if layout.sample_bytes == 1 else memory.view(torch.uint16)
    views, at = [], 0
    for rows, width in layout.parts:
        views.append(samples[at : at + frames * rows * width].view(frames, rows, width))
        at += frames * rows * width
    return views
