"""An epoch's batches as visits that are to be made, in order; and how many of them there may be at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

from gpupipe.config import JitterConfig
from gpupipe.data.assembly import Assembly
from gpupipe.data.canvas import Canvas, Packed, Stacked
from gpupipe.data.group import Group
from gpupipe.data.job import Job
from gpupipe.data.visit import Task
from gpupipe.device.buffers import BufferPool
from gpupipe.device.stream import stage

_FURTHER_VISITS = 256
"""Visits beyond the depth that may be prepared for helpers, at most."""
_FURTHER_BYTES = 1 << 30
"""Memory of the batches that these belong to, at most."""
_AUTO_BYTES, _AUTO_BATCHES = 1 << 30, 4
"""A depth that sets itself goes as far as the larger of these."""
_IDLE_BYTES = 256 << 20
"""Memory of batches that were dropped, kept for those to come, at most."""


def visits_per_batch(groups: Sequence[Group]) -> int:
    """Visits that fill a batch, on average, rounded up."""
    return max(1, -(-sum(len(group.requests) for group in groups) // max(1, len(groups))))


def batch_bytes(job: Job, groups: Sequence[Group]) -> int:
    """Bytes of a batch, on average."""
    return sum(_bytes(job, group) for group in groups) // max(1, len(groups))


def further_batches(visits: int, size_bytes: int) -> int:
    """Batches beyond the depth that may be under construction while helpers are at work.

    Args:
        visits: that fill a batch.
        size_bytes: of a batch.
    """
    return min(math.ceil(_FURTHER_VISITS / visits), _FURTHER_BYTES // max(1, size_bytes))


def most_bytes(jitter: JitterConfig, size_bytes: int) -> int | None:
    """Bytes of the batches under construction or ready, at most, where one has ``size_bytes``; None: no bound."""
    if jitter.max_gib is not None:
        return int(jitter.max_gib * 2**30)
    return None if jitter.depth != "auto" else max(_AUTO_BYTES, _AUTO_BATCHES * size_bytes)


def tasks(job: Job, groups: Sequence[Group], epoch: int, reserve: Callable[[int], int | None]) -> Generator[Task | None]:
    """All visits of the epoch in order; None while ``reserve``, asked for one of so many bytes, has no number for a batch."""
    clips, number = job.config.clip.clips_per_video, 0
    # On a GPU torch's allocator does the same, in the order of the pipeline's own stream.
    buffers = BufferPool(job.device, idle_bytes=_IDLE_BYTES) if job.device.type == "cpu" else None
    for group in groups:
        size_bytes = _bytes(job, group)
        while (batch := reserve(size_bytes)) is None:
            yield None
        with stage("allocate"), job.telemetry.at("assemble"):
            assembly = Assembly(
                len(group.requests) * clips,
                partial(_canvas, job, group, buffers),
                job.device,
                job.stream,
                job.kinds,
                mix=job.config.transform.mix,
                epoch=epoch,
                index=group.index,
            )
        visits = deque(
            Task(number + place, batch, assembly, range(place * clips, (place + 1) * clips), request)
            for place, request in enumerate(group.requests)
        )
        number += len(group.requests)
        del assembly  # it may be long until the next one is asked for, and the batch dropped meanwhile
        while visits:
            yield visits.popleft()


def _canvas(job: Job, group: Group, buffers: BufferPool | None) -> Canvas:
    clips = job.config.clip.clips_per_video
    transforms = [job.makers.transform(request.shape) for request in group.requests for _ in range(clips)]
    if job.config.batch.layout == "pack":
        return Packed(transforms, job.config.batch.patch, job.device, buffers)
    return Stacked(transforms, job.device, buffers)


def _bytes(job: Job, group: Group) -> int:
    transforms = [job.makers.transform(request.shape) for request in group.requests]
    values = [math.prod(transform.clip_shape) for transform in transforms]
    most = sum(values) if job.config.batch.layout == "pack" else max(values) * len(values)
    return most * job.config.clip.clips_per_video * transforms[0].dtype.itemsize
