"""The memory of a batch's clips: of one shape, filled up to the longest, or as tokens one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from gpupipe.data.shape import Patch, Shape
from gpupipe.data.transform import ClipTransform
from gpupipe.data.transform.picture import CHANNELS
from gpupipe.device.buffers import BufferPool


class Canvas(Protocol):
    """Where the clips of a batch are written, each by one thread, on its own stream."""

    lengths: Sequence[int]
    """Tokens of each clip; none where clips are no tokens."""

    def slot(self, number: int) -> torch.Tensor:
        """Where clip ``number`` is to be written, in the transform's ``clip_shape``; called on the writer's stream."""
        ...

    def written(self, number: int, clip: torch.Tensor) -> None:
        """Told that it has been; called on the same stream."""
        ...

    def tensors(self, kept: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """The batch's tensors by name, of the clips ``kept``; None: of all."""
        ...


def _memory(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    buffers: BufferPool | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    if buffers is None:
        return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
    memory = buffers.take(shape, dtype, memory_format=memory_format)
    buffers.give_back(memory)  # it is used again when nobody refers to it, of those who get the batch either
    return memory


class Stacked:
    """Clips of one size, the shorter ones filled up with zeros behind their end.

    Args:
        transforms: of each clip.
        buffers: that batches before this one have left; on the CPU alone, where no stream has to have passed.
    """

    lengths: Sequence[int] = ()

    def __init__(self, transforms: Sequence[ClipTransform], device: torch.device, buffers: BufferPool | None = None) -> None:
        longest = max(transforms, key=lambda transform: transform.frames)
        self._format = longest.memory_format
        self._frames = [transform.frames for transform in transforms]
        self._time = longest.time_axis
        shape = (len(transforms), *longest.clip_shape)
        self.video = _memory(shape, longest.dtype, device, buffers, self._format)

    def slot(self, number: int) -> torch.Tensor:
        slot, frames = self.video[number], self._frames[number]
        return slot if frames == slot.shape[self._time] else slot.narrow(self._time, 0, frames)

    def written(self, number: int, clip: torch.Tensor) -> None:
        frames = self._frames[number]
        missing = self.video.shape[1 + self._time] - frames
        if missing:
            self.video[number].narrow(self._time, frames, missing).zero_()

    def tensors(self, kept: Sequence[int] | None) -> dict[str, torch.Tensor]:
        if kept is None:
            return {"video": self.video}
        picked = self.video[torch.tensor(kept, device=self.video.device)]
        return {"video": picked.contiguous(memory_format=self._format)}


class Packed:
    """Tokens of clips of any shape, (N, 3 * pt * ph * pw), in the order and with the values of a patch embedding.

    A token has its patch's values in the order (channel, frame, row, column), as ``conv3d`` weights do. Tokens of a clip follow
    one another along the width, then the height, then time.
    """

    def __init__(
        self, transforms: Sequence[ClipTransform], patch: Patch, device: torch.device, buffers: BufferPool | None = None
    ) -> None:
        self._transforms, self._patch = transforms, patch
        self._grids = [Shape(each.frames, *each.config.size).grid(patch) for each in transforms]
        self.lengths: Sequence[int] = [t * h * w for t, h, w in self._grids]
        self._ends = list(accumulate(self.lengths, initial=0))
        values = CHANNELS * patch[0] * patch[1] * patch[2]
        self.tokens = _memory((self._ends[-1], values), transforms[0].dtype, device, buffers)

    def slot(self, number: int) -> torch.Tensor:
        transform = self._transforms[number]
        return torch.empty(transform.clip_shape, dtype=transform.dtype, device=self.tokens.device)

    def written(self, number: int, clip: torch.Tensor) -> None:
        (t, h, w), (pt, ph, pw) = self._grids[number], self._patch
        video = clip if self._transforms[number].time_axis == 1 else clip.transpose(0, 1)
        patches = video.view(CHANNELS, t, pt, h, ph, w, pw)  # axes that are cut in two need no copy, whatever the strides
        rows = self.tokens[self._ends[number] : self._ends[number + 1]]
        rows.view(t, h, w, CHANNELS, pt, ph, pw).copy_(patches.permute(1, 3, 5, 0, 2, 4, 6))

    def tensors(self, kept: Sequence[int] | None) -> dict[str, torch.Tensor]:
        numbers = range(len(self._grids)) if kept is None else kept
        tokens = self.tokens
        if kept is not None:
            tokens = torch.cat([tokens[self._ends[number] : self._ends[number + 1]] for number in kept])
        ends = accumulate((self.lengths[number] for number in numbers), initial=0)
        device = tokens.device
        return {
            "tokens": tokens,
            "cu_seqlens": torch.tensor(list(ends), dtype=torch.int32).to(device),
            "grid": torch.tensor([self._grids[number] for number in numbers], dtype=torch.int32).to(device),
        }
