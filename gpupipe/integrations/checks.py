"""What must hold between a loader and its trainer, whichever it is."""

from __future__ import annotations

from typing import Any

from gpupipe.data.loader import VideoLoader
from gpupipe.errors import ConfigError


def ranks_fit(loader: VideoLoader, ranks: int, trainer: str) -> None:
    """
    Raises:
        ConfigError: unless the loader divides its videos among so many ranks.
    """
    if loader.config.world_size != ranks:
        raise ConfigError(
            f"this loader was made for {loader.config.world_size} rank(s), {trainer} has {ranks} that share the data",
            fix=f"make the loader once {trainer} knows its ranks, or give it rank= and world_size=",
        )


def one_state_serves_all(loader: VideoLoader) -> None:
    """
    Raises:
        ConfigError: when each rank of the loader needs a state of its own, where one file is kept for all.
    """
    if loader.config.world_size != 1 and not loader.config.jitter.in_order:
        raise ConfigError(
            "batches that come as they are completed need a state for each rank, this checkpoint keeps one for all",
            fix="keep jitter.in_order, or save loader.state_dict() for each rank yourself",
        )


def accelerator_ranks(accelerator: Any) -> int:
    """Processes of an accelerate ``Accelerator`` that share the data: not those that work on the same batch."""
    parallel = getattr(accelerator, "parallelism_config", None)
    return int(accelerator.num_processes) // (int(parallel.non_data_parallel_size) if parallel is not None else 1)
