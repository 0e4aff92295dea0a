"""torchtitan: its ``BaseDataLoader`` on a VideoLoader, made from a ``Config`` with the ranks that share the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpupipe.data.loader import VideoLoader
from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError

load("torchtitan.components.dataloader")  # its absence is told in one line, with what to install

from torchtitan.components.dataloader import BaseDataLoader


class VideoDataLoader(BaseDataLoader):
    """Yields ``(inputs, labels)`` for ever, or for one epoch at a time, with which every rank ends at the same batch.

    Its part of a checkpoint is one for all ranks, so that another number of data-parallel ranks goes on with it too; unless
    batches come as they are completed, when each rank has its own.

    Args:
        config: see :class:`VideoDataLoader.Config`.
        dp_world_size, dp_rank: ranks that share the data, and this one. Tensor-, context- and pipeline-parallel peers are the
            same one, and get the same batches.
        local_batch_size: clips in a batch.
        others: what torchtitan tells loaders of text (``tokenizer``, ``seq_len``, …).

    Raises:
        ConfigError: when ``config.loader`` asks for batches of another size.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc, name-defined]
        loader: dict[str, Any] = field(default_factory=dict)
        """Arguments of :class:`gpupipe.VideoLoader` by name, among them ``videos``."""

        inputs: dict[str, str] = field(default_factory=lambda: {"input": "video"})
        """The model's arguments and the columns of a batch that they are; ``input`` is the one without a name."""

        labels: str = "label"
        """The column that the loss is given: ``video`` where there are no labels."""

        infinite: bool = True
        """Whether epoch follows epoch; torchtitan's validation sets it."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int | None = None, **others: Any
    ) -> None:
        self.config = config
        size = {"config": {"batch": local_batch_size}} if local_batch_size is not None else {}
        given = {**size, **config.loader, "rank": dp_rank, "world_size": dp_world_size, "repeat": config.infinite}
        self.loader = VideoLoader(**given)
        if local_batch_size not in (None, self.loader.batch_size):
            self.loader.close()
            raise ConfigError(
                f"training.local_batch_size={local_batch_size}, but the loader's batch={self.loader.batch_size}",
                fix="leave batch= out of the loader's arguments",
            )
        self._key = "place" if self.loader.config.jitter.in_order else f"dp_rank_{dp_rank}"

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        if not self.config.infinite:
            self.loader.set_epoch(0)  # the same frames in every validation
        for batch in self.loader:
            yield {name: batch[column] for name, column in self.config.inputs.items()}, batch[self.config.labels]

    def state_dict(self) -> dict[str, Any]:
        """One string, whose length may change: what DCP saves and loads in place has a fixed form."""
        return {self._key: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """An empty one does nothing.

        Raises:
            ConfigError: for the state of another loader, or of another rank.
        """
        if not state_dict:
            return
        if self._key not in state_dict:
            raise ConfigError(
                f"this checkpoint has no {self._key} of a VideoLoader, but {', '.join(state_dict)}",
                fix="go on with the loader that it was saved with, or give checkpoint.exclude_from_loading=['dataloader']",
            )
        self.loader.load_state_dict(json.loads(state_dict[self._key]))

    def close(self) -> None:
        """Ends the loader."""
        self.loader.close()
