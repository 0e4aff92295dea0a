"""DeepSpeed: an endless loader of micro-batches for an engine, in the engine's checkpoints; for its pipeline engine too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpupipe.data.loader import VideoLoader
from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError
from gpupipe.integrations.checks import one_state_serves_all, ranks_fit
from gpupipe.types import Batch

load("deepspeed")  # its absence is told in one line, with what to install

from deepspeed.utils import groups

_KEY = "gpupipe"
"""Where a checkpoint's client state has the loader's."""


def data_ranks(engine: Any) -> tuple[int, int]:
    """(rank, number of ranks) among those that share the data; stages of a pipeline and sequence-parallel peers are one."""
    grid = getattr(engine, "grid", None)
    if grid is not None:
        return grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    return groups._get_data_parallel_rank(), groups._get_data_parallel_world_size() or engine.dp_world_size


def engine_loader(engine: Any, videos: Any, **settings: Any) -> VideoLoader:
    """A loader of the engine's micro-batches on its device, with its ranks, that goes through epoch after epoch: so every
    window of accumulated gradients is full.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        videos, settings: as for :class:`gpupipe.VideoLoader`.

    Raises:
        ConfigError: when ``batch`` asks for another size than ``train_micro_batch_size_per_gpu``, or batches come out of order,
            so that each rank would need a state of its own.
    """
    size, (rank, ranks) = engine.train_micro_batch_size_per_gpu(), data_ranks(engine)
    known = {"config": {"batch": size}, "device": str(engine.device), "rank": rank, "world_size": ranks, "repeat": True}
    loader = VideoLoader(videos, **{**known, **settings})
    try:
        ranks_fit(loader, ranks, "the engine")
        one_state_serves_all(loader)
        if loader.batch_size != size:
            raise ConfigError(f"train_micro_batch_size_per_gpu={size}, but batch={loader.batch_size}", fix="leave out batch=")
    except ConfigError:
        loader.close()
        raise
    return loader


def micro_batches(engine: Any, loader: VideoLoader, steps: int) -> Iterator[Batch]:
    """Micro-batches until the engine has made so many steps, those before a checkpoint included."""
    if engine.global_steps < steps:
        for batch in loader:
            yield batch
            if engine.global_steps >= steps:
                return


def pairs(loader: VideoLoader, inputs: str = "video", labels: str = "label") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches as ``PipelineEngine.train_batch`` pulls them: what the first stage takes, and what the loss is given."""
    for batch in loader:
        yield batch[inputs], batch[labels]


def save_checkpoint(
    engine: Any, loader: VideoLoader, folder: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None
) -> None:
    """``engine.save_checkpoint`` with the loader's place in the client state.

    Raises:
        ConfigError: amid a window of accumulated gradients, which a checkpoint does not hold.
    """
    done = engine.micro_steps % engine.gradient_accumulation_steps()
    if done:
        raise ConfigError(
            f"this checkpoint would lose the gradients of {done} micro-batches, which DeepSpeed does not save",
            fix="save behind a step: when engine.micro_steps is a multiple of engine.gradient_accumulation_steps()",
        )
    engine.save_checkpoint(folder, tag=tag, client_state={**(client_state or {}), _KEY: loader.state_dict()})


def load_checkpoint(engine: Any, loader: VideoLoader, folder: str, tag: str | None = None) -> dict[str, Any]:
    """``engine.load_checkpoint``, and the loader goes on where it stood. Returns the client state.

    Raises:
        ConfigError: when there is no checkpoint, or one without a VideoLoader's place.
    """
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    if path is None or _KEY not in client_state:
        what = "no checkpoint" if path is None else "no place of a VideoLoader in its checkpoint"
        raise ConfigError(f"{folder} has {what} {tag or ''}".rstrip(), fix="name one that save_checkpoint() from here wrote")
    loader.load_state_dict(client_state[_KEY])
    return dict(client_state)
