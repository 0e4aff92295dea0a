"""Batches that lie on the device already, again and again: how fast training would be if data were free."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

import torch

from gpupipe.config.stage import whole_number
from gpupipe.device.stream import hand_over
from gpupipe.device.usage import usage
from gpupipe.errors import ClosedError, ConfigError, DeviceMemoryError, SourceError
from gpupipe.types import Batch


class CachedBatches:
    """Hands out the same few batches, in turn, without end or for ``steps`` of them; see :meth:`gpupipe.VideoLoader.cached`.

    Every ``iter()`` begins with the first one. Each time a batch is a new :class:`gpupipe.Batch` of the same tensors, with all
    that the loader's has but ``state``, which is empty. The tensors are not copied: what the loop writes into them stays.

    Attributes:
        device: where the batches are.
        batch_size: as the loader's.
        nbytes: memory that the batches hold, until :meth:`close`.
    """

    def __init__(
        self, batches: Sequence[Batch], device: torch.device, *, batch_size: int | None = None, steps: int | None = None
    ) -> None:
        self._batches = list(batches)
        self._steps = steps
        self.device = device
        self.batch_size = batch_size
        self.nbytes = held_bytes(batches)
        self._last = (0, 1)
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def batches(self) -> int:
        """How many different ones there are."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        self._check()
        return self._replay()

    def _replay(self) -> Generator[Batch, None, None]:
        for step in count() if self._steps is None else range(self._steps):
            self._check()
            batch = self._batches[step % len(self._batches)]
            if self._ready is not None:
                self._hand_over(self._ready)
            self._last = batch.part
            yield batch.like(dict(batch), state=None)

    def _hand_over(self, ready: torch.cuda.Event) -> None:
        """Makes all batches usable on the current stream, once for each stream that comes."""
        stream = torch.cuda.current_stream(self.device)
        if stream not in self._streams:
            self._streams.add(stream)
            hand_over((tensor for batch in self._batches for tensor in batch.values()), [ready], stream)

    def _check(self) -> None:
        if not self._batches:
            raise ClosedError("these cached batches are closed", fix="take others: loader.cached(…)")

    def __len__(self) -> int:
        """Batches of an iteration: ``steps``.

        Raises:
            TypeError: without ``steps``, where there is no end.
        """
        if self._steps is None:
            raise TypeError("cached batches have no length: they come again for ever, unless steps=… says how many")
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Changes nothing: all epochs are alike. For loops that are written for a loader."""

    def step_guard(self, zero_grad: Callable[[], object]) -> ReplayGuard:
        """As the loader's, for loops that use it; but nothing is cut finer: an out-of-memory error goes further."""
        return ReplayGuard(lambda: self._last)

    def close(self) -> None:
        """Lets go of the batches; may be called again. Those that the loop still holds stay."""
        self._batches = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        end = "for ever" if self._steps is None else f"for {self._steps} steps"
        return f"CachedBatches({len(self._batches)} batches, {self.nbytes / 2**20:.1f} MiB on {self.device}, {end})"


class ReplayGuard:
    """Stands around the work on one part of a step; ``done`` is True behind the block of the last one. Nothing ``failed``."""

    def __init__(self, part: Callable[[], tuple[int, int]]) -> None:
        self._part = part
        self.done = self.failed = False

    def __enter__(self) -> Self:
        self.done = False
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        number, of = self._part()
        self.done = value is None and number + 1 == of


def take(loader: Iterable[Batch], wanted: int, device: torch.device) -> list[Batch]:
    """The next batches of a loader, over the ends of epochs; more where the last one is part of a step, to have it whole.

    Raises:
        DeviceMemoryError: when so many like the first one do not fit the memory that is free.
        SourceError: when an epoch has no batch.
        GpupipeError: what the loader raises.
    """
    taken: list[Batch] = []
    while not _enough(taken, wanted):
        before = len(taken)
        for batch in loader:
            taken.append(batch)
            if _is_last_part(batch) and len(taken) == batch.part[1]:  # the first step
                _check_room(held_bytes(taken), -(-wanted // len(taken)), device)
            if _enough(taken, wanted):
                break
        if len(taken) == before:
            raise SourceError("the loader gave no batch", fix="use a smaller batch, or last='partial', or more videos")
    return taken


def whole(value: Any, name: str) -> int:
    """A number that counts something.

    Raises:
        ConfigError: when it is none, or below 1.
    """
    number = None if isinstance(value, bool) else whole_number(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r} is not a whole number above 0", fix=f"write cached(4) or cached(4, {name}=100)")
    return number


def held_bytes(batches: Sequence[Batch]) -> int:
    """Memory that the batches' tensors keep, each piece counted once: parts of a step are views of it."""
    storages = {tensor.untyped_storage() for batch in batches for tensor in batch.values()}
    sizes = {(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}
    return sum(sizes.values())


def _enough(taken: Sequence[Batch], wanted: int) -> bool:
    return len(taken) >= wanted and _is_last_part(taken[-1])


def _is_last_part(batch: Batch) -> bool:
    return batch.part[0] + 1 == batch.part[1]


def _check_room(step: int, steps: int, device: torch.device) -> None:
    """Raises DeviceMemoryError when further steps of so many bytes, ``steps`` in all, do not fit; one is there."""
    free = _free_bytes(device)
    if (steps - 1) * step > free:
        raise DeviceMemoryError(
            f"{steps} steps of {step / 2**20:.0f} MiB do not fit on {device}: {free / 2**20:.0f} MiB are free",
            fix=f"take at most {1 + free // step}",
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return usage(device).reachable - int(torch.cuda.memory_allocated(device))
    import psutil

    return int(psutil.virtual_memory().available)
