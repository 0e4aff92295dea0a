"""accelerate: a loader that its checkpoints hold, and at whose last batch accumulated gradients are applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpupipe.data.loader import VideoLoader
from gpupipe.device.inventory import load
from gpupipe.integrations.checks import accelerator_ranks, one_state_serves_all, ranks_fit
from gpupipe.types import Batch

load("accelerate")  # its absence is told in one line, with what to install

from accelerate import Accelerator
from accelerate.state import GradientState


class AcceleratedLoader:
    """A loader that tells accelerate when its last batch comes, which ends a window of accumulated gradients early.

    To know it, it asks for a batch ahead of use. ``Accelerator.prepare`` leaves it as it is. Made by :func:`prepare`.
    """

    remainder = 0
    """Samples that ``gather_for_metrics`` leaves out of the last batch: none, for accelerate has not filled it up."""

    def __init__(self, loader: VideoLoader) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self._used: dict[str, Any] = {}

    @property
    def epoch(self) -> int:
        """The epoch in which the next ``iter()`` goes on."""
        return int(self.state_dict()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`."""
        self.loader.set_epoch(epoch)
        self._used = {}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        gradients = GradientState()
        self.end_of_dataloader = False
        gradients._add_dataloader(self)
        try:
            batches = iter(self.loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                self.end_of_dataloader = following is None
                self._used = batch.state
                yield batch
                batch = following
            self._used = {}
        finally:
            gradients._remove_dataloader(self)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch used, whatever was fetched ahead."""
        return self._used or self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gpupipe.VideoLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
        self._used = {}


def prepare(accelerator: Accelerator, loader: VideoLoader, *, checkpoint: bool = True) -> AcceleratedLoader:
    """The loader for a loop under ``accelerator``; not to be made before it, for it brings the ranks.

    Args:
        checkpoint: whether ``accelerator.save_state`` keeps where it stands, and ``load_state`` goes on there. One loader's
            state is one file of the main process, which serves all.

    Raises:
        ConfigError: when the loader's ranks are not the accelerator's data-parallel ones, or batches come out of order, so that
            each rank would need a file of its own.
    """
    ranks_fit(loader, accelerator_ranks(accelerator), "accelerate")
    if checkpoint:
        one_state_serves_all(loader)
    prepared = AcceleratedLoader(loader)
    if checkpoint:
        accelerator.register_for_checkpointing(prepared)
    return prepared
