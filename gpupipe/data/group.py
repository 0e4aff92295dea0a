"""Which requests share a batch: known from metadata, before any decoding."""

from __future__ import annotations

from dataclasses import dataclass

from gpupipe.config import LoaderConfig
from gpupipe.data.order import Order
from gpupipe.types import ClipRequest


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one batch of one rank."""

    index: int
    """Position of the batch in its epoch, from 0."""
    requests: list[ClipRequest]


def batch_count(order: Order, config: LoaderConfig, start: int = 0) -> int:
    """Batches that each rank has in an epoch of which ``start`` samples are delivered: the same number for all ranks."""
    return -(-_visits(order, config, start) // _visits_a_batch(config))


def group(order: Order, config: LoaderConfig, epoch: int, start: int = 0) -> list[Group]:
    """This rank's batches of what is left of an epoch of which ``start`` samples are delivered, over all ranks."""
    size, step = _visits_a_batch(config), samples_a_step(order, config)
    requests = order.requests(epoch, start, _visits(order, config, start))
    cuts = range(0, len(requests), size)
    return [Group(start // step + number, requests[cut : cut + size]) for number, cut in enumerate(cuts)]


def samples_a_step(order: Order, config: LoaderConfig) -> int:
    """Samples that a batch of each rank has, together."""
    return _visits_a_batch(config) * order.world_size


def _visits(order: Order, config: LoaderConfig, start: int) -> int:
    """Visits to videos that each rank makes in what is left of an epoch."""
    left, step = max(0, len(order) - start), samples_a_step(order, config)
    if config.batch.last == "partial":
        return left // order.world_size
    steps = -(-left // step) if config.batch.last == "fill" else left // step
    return steps * _visits_a_batch(config)


def _visits_a_batch(config: LoaderConfig) -> int:
    return config.batch.size // config.clip.clips_per_video
