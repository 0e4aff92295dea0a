"""Batches handed out in parts, for gradient accumulation: as large as memory allows, with the whole kept for another try.

A batch is a step of the optimizer. Its parts are views of it, so what is in a step, and in which order steps come, does not
depend on how it is cut. A step that ran out of memory is cut finer and comes again from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, Self

import torch

from gpupipe.device.usage import ran_out, usage
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.telemetry import log
from gpupipe.types import Batch

_FIRST_PARTS = 8
"""Into how many parts the first step is cut, before anything is known: one that is too large would cost a step."""
_MARGIN = 0.9
"""Share of the memory that parts may be expected to take: the rest is for what changes from step to step, and fragmentation."""
_FORGET_STEPS = 500
"""Steps after which a size that failed once may be tried again."""


class Memory(Protocol):
    """The device's memory, in bytes."""

    def begin(self) -> None:
        """The peak counts from here on."""
        ...

    @property
    def used(self) -> int:
        """In use by this process now."""
        ...

    @property
    def peak(self) -> int:
        """Most in use since :meth:`begin`."""
        ...

    @property
    def limit(self) -> int:
        """What this process may use, beside the others on the device."""
        ...

    def free(self) -> None:
        """Gives back what is not in use."""
        ...


class CudaMemory:
    """That of torch's allocator on a GPU, and what other processes and NVDEC leave of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def used(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    @property
    def limit(self) -> int:
        return usage(self._device).reachable

    def free(self) -> None:
        torch.cuda.empty_cache()


class Sizes:
    """How many clips a part may have: a number, or what memory allows.

    A part of n clips is taken to need n times what a clip of the largest part so far has taken on top of what was in use before
    the step. Where that cannot be measured (on the CPU), a step is one part until it fails.

    Args:
        size: clips of a part, at most; ``auto``: as many as fit.
        memory: of the device; None: not known.
    """

    def __init__(self, size: int | Literal["auto"], memory: Memory | None) -> None:
        self._fixed = None if size == "auto" else size
        self._memory = memory
        self._bytes_a_clip = 0.0
        self._failed_at: int | None = None
        self._since = 0
        self._failed = False
        self._base = 0

    def parts(self, clips: int) -> int:
        """Into how many parts a step of so many clips is to be cut; the memory that is in use now is taken for its basis."""
        if self._memory is not None:
            self._memory.begin()
            self._base = self._memory.used
        return -(-clips // max(1, min(clips, self._most(clips))))

    def measured(self, clips: int) -> None:
        """Says that a part of so many clips is done."""
        if self._memory is not None and clips:
            self._bytes_a_clip = max(0.0, self._memory.peak - self._base) / clips

    def succeeded(self) -> None:
        """Says that a step is done."""
        self._since += 1
        if self._since >= _FORGET_STEPS:
            self._failed_at = None

    def failed(self, clips: int) -> None:
        """Says that memory did not do for a part of so many clips."""
        self._failed_at, self._since, self._failed = min(clips, self._failed_at or clips), 0, True

    def free_after_failure(self) -> None:
        """Gives back memory that is not in use, once after each failure."""
        if self._memory is not None and self._failed:
            self._memory.free()
        self._failed = False

    def _most(self, clips: int) -> int:
        if self._fixed is not None:
            most = self._fixed
        elif self._memory is None:
            most = clips
        elif not self._bytes_a_clip:
            most = -(-clips // _FIRST_PARTS)
        else:
            most = int((_MARGIN * self._memory.limit - self._base) / self._bytes_a_clip)
        return most if self._failed_at is None else min(most, max(1, self._failed_at // 2))


class Parts:
    """One batch, handed out part by part; again from the beginning where that is asked for."""

    def __init__(self, batch: Batch, count: int) -> None:
        self.batch = batch
        clips = len(batch.clips)
        self._cuts = [clips * k // count for k in range(count + 1)]
        self.next = 0

    @property
    def count(self) -> int:
        return len(self._cuts) - 1

    @property
    def largest(self) -> int:
        """Clips of the largest part."""
        return max(end - begin for begin, end in zip(self._cuts, self._cuts[1:], strict=False))

    def take(self) -> Batch:
        """The next part: a view of the batch, with its own share of the step."""
        begin, end = self._cuts[self.next : self.next + 2]
        self.next += 1
        return part_of(self.batch, begin, end, (self.next - 1, self.count))


def part_of(batch: Batch, begin: int, end: int, part: tuple[int, int]) -> Batch:
    """Clips ``begin`` to ``end`` of a batch, without a copy of their pixels."""
    tensors = {}
    for name, tensor in batch.items():
        if name not in ("tokens", "cu_seqlens"):
            tensors[name] = tensor[begin:end]
    if "tokens" in batch:
        first = sum(batch.lengths[:begin])
        tensors["tokens"] = batch["tokens"][first : first + sum(batch.lengths[begin:end])]
        tensors["cu_seqlens"] = batch["cu_seqlens"][begin : end + 1] - first
    return batch.like(
        tensors,
        clips=batch.clips[begin:end],
        text={name: values[begin:end] for name, values in batch.text.items()},
        substituted=batch.substituted if part[0] == 0 else (),
        state=None,
        lengths=batch.lengths[begin:end],
        part=part,
        share=(end - begin) / len(batch.clips),
    )


def agree(values: Sequence[int], device: torch.device, world_size: int) -> list[int]:
    """The greatest of each value over all ranks; every rank must ask at the same time.

    Raises:
        ConfigError: when there are other ranks, but no torch.distributed to ask them.
    """
    if world_size == 1:
        return list(values)
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() == world_size):
        raise ConfigError(
            f"batch.micro_size='auto' needs torch.distributed with {world_size} ranks, which must agree on the parts of a step",
            fix="call torch.distributed.init_process_group first, or give micro_size a number",
        )
    on = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    asked = torch.tensor(list(values), dtype=torch.int64, device=on)
    distributed.all_reduce(asked, distributed.ReduceOp.MAX)
    return [int(value) for value in asked.tolist()]


class Steps(Protocol):
    """Who hands out steps in parts."""

    def any_rank(self, mine: bool) -> bool:
        """Whether this is so on any rank."""
        ...

    def succeed(self) -> bool:
        """Says that the work on the part that was handed out last went well; True when it was the last of its step."""
        ...

    def retry(self) -> int | None:
        """Hands out the step again from its beginning, in more parts: how many; None where it is not to be cut finer."""
        ...


class StepGuard:
    """Stands around the work on one part of a step; see :meth:`gpupipe.VideoLoader.step_guard`.

    Attributes:
        done: True behind the block when the last part of a step has gone well: now the optimizer may step.
        failed: True behind the block when memory ran out, here or on another rank: the step comes again, in smaller parts.
    """

    def __init__(self, steps: Steps, on_failure: Callable[[], object]) -> None:
        self._steps = steps
        self._on_failure = on_failure
        self.done = self.failed = False

    def __enter__(self) -> Self:
        self.done = self.failed = False
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> bool:
        mine = ran_out(value)
        if value is not None and not mine:
            return False
        self.failed = self._steps.any_rank(mine)
        if not self.failed:
            self.done = self._steps.succeed()
            return False
        finer = self._steps.retry()
        if finer is None:
            if mine:
                return False
            raise DeviceMemoryError("another rank ran out of memory with one clip at a time", fix="see its error")
        self._on_failure()
        log.warning("a step ran out of memory: it comes again, in %d parts", finer)
        return True
