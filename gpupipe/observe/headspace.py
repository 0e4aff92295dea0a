"""What data costs a training loop: the same loop over a loader and over batches that are there already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpupipe.errors import SourceError

if TYPE_CHECKING:
    from gpupipe.data.loader import VideoLoader
    from gpupipe.observe.measure import Measurement
    from gpupipe.types import Batch

CACHED = 4
"""Batches that are replayed."""


@dataclass(frozen=True)
class Headspace:
    """Two loops with the same stand-in for the training step. Times are means in seconds of wall clock, from the arrival of one
    batch to that of the next, so that an epoch's first wait is not among them."""

    stand_in_seconds: float
    """What the stand-in was asked to take."""
    loader_step_seconds: float
    cached_step_seconds: float
    cost_percent: float
    """By how much a step over the loader is longer."""
    steps: int
    """Of each loop, that were timed."""
    cached_batches: int
    cached_bytes: int
    """Memory that the replayed batches took."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)


def sleeper(seconds: float) -> Callable[[Batch], None]:
    """A stand-in for the training step: it sleeps. It uses no GPU and no core, so what it leaves out is that a training step
    and the pipeline want the same GPU, memory bandwidth and interpreter lock."""
    return lambda batch: time.sleep(seconds)


def headspace(
    loader: VideoLoader,
    measured: Measurement,
    stand_in_seconds: float,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> Headspace:
    """Replays batches in the loop that :func:`gpupipe.observe.measure.measure` has run with ``step=sleeper(stand_in_seconds)``.

    Args:
        loader: the same one; its iterator and threads are ended.
        measured: how the loop over the loader went.
        stand_in_seconds: length of the stand-in.
        progress: called after each step with (steps so far, seconds so far).

    Raises:
        SourceError: when the measurement has fewer than two batches.
        GpupipeError: what :meth:`gpupipe.VideoLoader.cached` raises.
    """
    ends = measured.batch_ends
    if len(ends) < 2:
        raise SourceError("one batch tells no time from batch to batch", fix="measure longer (--seconds, --clips)")
    steps = len(ends)
    step = sleeper(stand_in_seconds)
    arrivals: list[float] = []
    with loader.cached(min(CACHED, steps), steps=steps) as batches:
        start = time.perf_counter()
        for batch in batches:
            arrivals.append(time.perf_counter() - start)
            if progress:
                progress(len(arrivals), arrivals[-1])
            step(batch)
        held, count = batches.nbytes, batches.batches
    with_loader, without = ((times[-1] - times[0]) / (steps - 1) for times in (ends, arrivals))
    return Headspace(
        stand_in_seconds=stand_in_seconds, loader_step_seconds=with_loader, cached_step_seconds=without,
        cost_percent=100 * (with_loader / without - 1), steps=steps - 1,
        cached_batches=count, cached_bytes=held,
    )  # fmt: skip
