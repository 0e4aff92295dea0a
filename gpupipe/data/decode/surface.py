"""A thread's own frames on the GPU: of one pitch, grown as needed, used again in stream order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpupipe.device.driver import context_of, copy_rows
from gpupipe.device.memory import PITCH_BYTES
from gpupipe.types import PlaneFormat, Planes

if TYPE_CHECKING:
    import torch


_MOST_SCRATCH_BYTES = 32 << 20
"""Beyond that scratch is left to torch's allocator, which can give it back where memory is short."""


class FrameStore:
    """Memory for the frames of one clip, and to work on them, allocated and used on one stream only, so that no event is needed
    to use it again."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._memory: torch.Tensor | None = None
        self._view: Planes | None = None
        self._scratch: torch.Tensor | None = None
        self._pitch_bytes = 0
        self._frame_bytes = 0
        self._rows = 0
        self._row_bytes = 0
        self._context = 0

    def clear(self) -> None:
        """Gives the memory back to torch's allocator, for the next use on this stream."""
        self._memory = self._view = self._scratch = None

    def reserve(self, frames: int, layout: PlaneFormat) -> None:
        """Makes room for ``frames`` frames; what lay here before is lost."""
        import torch

        self._row_bytes = layout.row_samples * layout.sample_bytes
        self._pitch_bytes = -(-self._row_bytes // PITCH_BYTES) * PITCH_BYTES
        self._rows = layout.rows
        self._frame_bytes = self._rows * self._pitch_bytes
        needed = frames * self._frame_bytes
        if self._memory is None or self._memory.numel() < needed:
            self._memory = self._view = None  # given back before more is asked for
            with torch.cuda.stream(self._stream):
                self._memory = torch.empty(needed, dtype=torch.uint8, device=self._stream.device)

    def copy_surfaces(self, frames: Iterable[tuple[int, int]], pitch_bytes: int) -> None:
        """Copies frames, luma and chroma rows together, from device memory of another pitch: (slot, address) each."""
        assert self._memory is not None
        stream = self._stream.cuda_stream
        if not self._context:
            self._context = context_of(stream)
        here, step = self._memory.data_ptr(), self._frame_bytes
        copy_rows(
            [(here + slot * step, address) for slot, address in frames],
            self._pitch_bytes,
            pitch_bytes,
            min(self._row_bytes, pitch_bytes),
            self._rows,
            stream=stream,
            context=self._context,
        )

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """At least ``size_bytes`` uint8 to work in on the stream, which the next call hands out again."""
        import torch

        scratch = self._scratch
        if scratch is None or scratch.numel() < size_bytes:
            self._scratch = scratch = None  # given back before more is asked for
            with torch.cuda.stream(self._stream):
                scratch = torch.empty(size_bytes, dtype=torch.uint8, device=self._stream.device)
            self._scratch = scratch if size_bytes <= _MOST_SCRATCH_BYTES else None
        return scratch

    def upload(self, planes: Planes) -> Planes:
        """Copies planes from the CPU to here."""
        import torch

        self.reserve(len(planes), planes.format)
        here = self.planes(len(planes), planes.format)
        with torch.cuda.stream(self._stream):
            here.data[:, :, : planes.data.shape[2]].copy_(planes.data)
        return here

    def put(self, parts: Sequence[torch.Tensor], layout: PlaneFormat, *, non_blocking: bool = False) -> Planes:
        """Copies frames to here.

        Args:
            parts: (N, rows, samples) each, on this device or on the CPU, as :attr:`gpupipe.types.Planes.parts` gives them.
            non_blocking: the host does not wait for copies out of pinned memory.
        """
        import torch

        self.reserve(len(parts[0]), layout)
        here = self.planes(len(parts[0]), layout)
        with torch.cuda.stream(self._stream):
            here.fill(parts, non_blocking=non_blocking)
        return here

    def planes(self, frames: int, layout: PlaneFormat) -> Planes:
        """The first ``frames`` frames, a view that the next :meth:`reserve` invalidates."""
        import torch

        assert self._memory is not None
        if self._view is None or (len(self._view), self._view.format) != (frames, layout):
            flat = self._memory[: frames * self._frame_bytes]
            samples = flat if layout.sample_bytes == 1 else flat.view(torch.uint16)
            self._view = Planes(samples.view(frames, layout.rows, self._pitch_bytes // layout.sample_bytes), layout)
        return self._view
