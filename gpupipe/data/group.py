"""Which requests share a batch: known from metadata, before any decoding."""

from __future__ import annotations

from gpupipe.config import BatchConfig
from gpupipe.types import ClipRequest


def batch_count(requests: int, config: BatchConfig) -> int:
    """Batches that ``requests`` requests make."""
    return requests // config.size if config.drop_last else -(-requests // config.size)


def group(requests: list[ClipRequest], config: BatchConfig) -> list[list[ClipRequest]]:
    """Cuts the sequence into batches of ``config.size``, the last one smaller or left out."""
    count = batch_count(len(requests), config)
    return [requests[k * config.size : (k + 1) * config.size] for k in range(count)]
