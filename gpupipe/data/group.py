"""Which requests share a batch: known from metadata, before any decoding."""

from __future__ import annotations

from gpupipe.config import LoaderConfig
from gpupipe.types import ClipRequest


def batch_count(requests: int, config: LoaderConfig) -> int:
    """Batches that ``requests`` requests make."""
    size = _requests_a_batch(config)
    return requests // size if config.batch.drop_last else -(-requests // size)


def group(requests: list[ClipRequest], config: LoaderConfig) -> list[list[ClipRequest]]:
    """Cuts the sequence into batches of ``batch.size`` clips, the last one smaller or left out."""
    size = _requests_a_batch(config)
    return [requests[k * size : (k + 1) * size] for k in range(batch_count(len(requests), config))]


def _requests_a_batch(config: LoaderConfig) -> int:
    return config.batch.size // config.clip.clips_per_video
