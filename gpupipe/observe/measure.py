"""How fast a loader delivers: one measuring function for ``gpupipe bench``, the demo and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gpupipe.data.verdict import limit
from gpupipe.errors import SourceError
from gpupipe.observe.machine import ResourceSampler, ResourceUse, machine_facts

if TYPE_CHECKING:
    from gpupipe.data.loader import VideoLoader
    from gpupipe.types import Batch

__all__ = ["Measurement", "ResourceSampler", "ResourceUse", "machine_facts", "measure", "quantile"]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of ``values`` do not exceed, interpolated linearly; 0.0 without any."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Measurement:
    """What one run of a loader came to. Times are in seconds of wall clock.

    Without warm-up batches the clock starts before ``iter(loader)``, so opening files, making decoders and compiling
    kernels are in ``seconds``, as a user pays for them.
    """

    seconds: float
    batches: int
    clips: int
    frames: int
    """Frames in those clips, padding included."""
    first_batch_seconds: float
    """From ``iter(loader)`` to the first batch, warm-up or not."""
    clips_per_s: float
    frames_per_s: float
    wait_seconds: float
    """Sum of the times that ``next()`` took: a loop that does nothing else waits all the time."""
    wait_p50_seconds: float
    wait_p99_seconds: float
    packets_per_frame: float | None
    """Packets sent to decoders for each frame that a clip used; None when the loader did not count."""
    decoders: dict[str, int]
    """Clips by the decoder that served them: ``nvdec``, ``cpu``."""
    substituted: int
    bad_files: dict[str, str]
    warmup_batches: int
    epochs: int
    """Passes over the source that were begun."""
    resources: ResourceUse
    batch_ends: tuple[float, ...] = field(default=(), repr=False)
    """When each batch arrived, in seconds since the clock started."""
    batch_clips: tuple[int, ...] = field(default=(), repr=False)
    """Clips of each batch."""
    cache_hits: int = 0
    """Clips that the loader's cache of decoded clips spared a decode."""
    cache_misses: int = 0
    """Clips that were decoded although there is such a cache."""
    cache_bytes: int = 0
    """Bytes of decoded planes in it at the end."""
    limit: str = ""
    """What limits, in words: see :mod:`gpupipe.data.verdict`."""
    waits: tuple[float, ...] = field(default=(), repr=False)
    """How long the loop waited for each batch, in seconds."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)


def measure(
    loader: VideoLoader,
    *,
    seconds: float | None = None,
    clips: int | None = None,
    warmup_batches: int = 0,
    progress: Callable[[int, float], None] | None = None,
    step: Callable[[Batch], object] | None = None,
) -> Measurement:
    """Takes batches from a loader, epoch after epoch, and measures how they come.

    Args:
        loader: iterated from its next epoch on. It stays open.
        seconds: stop at the first batch after so long; None: no such limit.
        clips: stop at the first batch that completes so many; None: no such limit. Without both limits, one epoch.
        warmup_batches: batches taken before the clock starts.
        progress: called after each batch with (clips so far, seconds so far).
        step: called with each batch, between the waits: a stand-in for the training step.

    Raises:
        SourceError: when an epoch has no batch at all.
        GpupipeError: what the loader raises.
    """
    run = _Run(seconds, clips)
    device = loader.device
    sampler = ResourceSampler(device)  # opens NVML, so before the clock starts
    epochs = _Epochs(loader, endless=not run.one_epoch)
    began = time.perf_counter()
    with closing(iter(epochs)) as batches:
        first = 0.0
        for _ in range(warmup_batches):
            _take(batches, step)
            first = first or time.perf_counter() - began
        _settle(device)
        before = loader.stats()
        run.start = time.perf_counter() if warmup_batches else began
        with sampler:
            while not run.done:
                asked = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                arrived = time.perf_counter()
                first = first or arrived - began
                run.add(batch, asked, arrived)
                if progress:
                    progress(run.clips, arrived - run.start)
                if step:
                    step(batch)
                del batch
            _settle(device)  # work still queued on the GPU belongs to the time
            run.end = time.perf_counter()
        after = loader.stats()
    if not run.ends:
        raise SourceError("the loader gave no batch", fix="use a smaller batch, or last='partial', or more videos")
    return run.result(first, before, after, loader, warmup_batches, epochs.begun, sampler.result())


class _Epochs:
    """The loader's batches, epoch after epoch when endless."""

    def __init__(self, loader: VideoLoader, *, endless: bool) -> None:
        self._loader = loader
        self._endless = endless
        self.begun = 0

    def __iter__(self) -> Generator[Batch, None, None]:
        while True:
            self.begun += 1
            got = 0
            for batch in self._loader:
                got += 1
                yield batch
            if not got or not self._endless:
                return


def _take(batches: Iterator[Batch], step: Callable[[Batch], object] | None) -> None:
    batch = next(batches, None)
    if batch is None:
        raise SourceError("the videos ran out during the warm-up", fix="use fewer warm-up batches or more videos")
    if step:
        step(batch)


def _settle(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


class _Run:
    """What is counted while the clock runs."""

    def __init__(self, seconds: float | None, clips: int | None) -> None:
        self.one_epoch = seconds is None and clips is None
        self._seconds = seconds
        self._clips = clips
        self.start = self.end = 0.0
        self.clips = self.frames = 0
        self.ends: list[float] = []
        self.waits: list[float] = []
        self.sizes: list[int] = []
        self.decoders: dict[str, int] = {}
        self.substituted = 0

    @property
    def done(self) -> bool:
        if not self.ends:
            return False
        enough_clips = self._clips is not None and self.clips >= self._clips
        return enough_clips or (self._seconds is not None and time.perf_counter() - self.start >= self._seconds)

    def add(self, batch: Batch, asked: float, arrived: float) -> None:
        self.clips += len(batch.clips)
        for clip in batch.clips:
            self.frames += len(clip.pick.indices)
            self.decoders[clip.decoder] = self.decoders.get(clip.decoder, 0) + 1
        self.substituted += len(batch.substituted)
        self.sizes.append(len(batch.clips))
        self.ends.append(arrived - self.start)
        self.waits.append(arrived - asked)

    def result(
        self, first: float, before: dict[str, Any], after: dict[str, Any], loader: VideoLoader, warmup: int, epochs: int,
        resources: ResourceUse,
    ) -> Measurement:  # fmt: skip
        seconds = self.end - self.start

        def counted(name: str) -> int:
            return int(after.get(name, 0) - before.get(name, 0))

        packets, used = counted("packets_decoded"), counted("frames_used")
        return Measurement(
            seconds=seconds, batches=len(self.ends), clips=self.clips, frames=self.frames, first_batch_seconds=first,
            clips_per_s=self.clips / seconds, frames_per_s=self.frames / seconds, wait_seconds=sum(self.waits),
            wait_p50_seconds=quantile(self.waits, 0.5), wait_p99_seconds=quantile(self.waits, 0.99),
            packets_per_frame=packets / used if used else None, decoders=self.decoders, substituted=self.substituted,
            bad_files=dict(loader.bad_files), warmup_batches=warmup, epochs=epochs, resources=resources,
            cache_hits=counted("cache_hits"), cache_misses=counted("cache_misses"),
            cache_bytes=int(after.get("cache_bytes", 0)),
            limit=limit(after["stages"], before["stages"]).text,
            batch_ends=tuple(self.ends), batch_clips=tuple(self.sizes), waits=tuple(self.waits),
        )  # fmt: skip
