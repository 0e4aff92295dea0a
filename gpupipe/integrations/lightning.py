"""Lightning: a data module whose loaders know the trainer's rank, device and epoch, and whose state is its checkpoint's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gpupipe.data.loader import VideoLoader
from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError
from gpupipe.types import Batch

load("lightning")  # its absence is told in one line, with what to install

from lightning.pytorch import LightningDataModule

EVALUATION: dict[str, Any] = {"shuffle": False, "batch": {"last": "partial"}}
Loaders = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class LightningFeed:
    """A loader as Lightning's loops iterate it: ``iter()``, called once too often and before ``set_epoch``, begins nothing."""

    def __init__(self, loader: VideoLoader, *, fixed: bool = False) -> None:
        """``fixed``: each pass is epoch 0, the same frames every time."""
        self.loader, self.sampler, self.batch_sampler = loader, self, None
        self._fixed = fixed
        self._fetched: deque[dict[str, Any]] = deque(maxlen=8)  # states after batches not yet used: two where len() is unknown
        self._used: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`; nothing where passes are fixed, or where the loader has no epochs."""
        if not (self._fixed or self.loader.config.repeat or (self._fetched and self._fetched[0]["epoch"] == epoch)):
            self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self._fetched.clear()
        if self._fixed:
            self.loader.set_epoch(0)
        for batch in self.loader:
            self._fetched.append(batch.state)
            yield batch

    def use(self) -> None:
        """The oldest batch fetched is used now."""
        self._used = self._fetched.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch used, whatever was fetched ahead."""
        return self._used or self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._used = {}
        self.loader.load_state_dict(state)


class VideoDataModule(LightningDataModule):
    """Loaders for ``Trainer.fit``, ``validate``, ``test`` and ``predict``, made when the trainer knows its ranks and device.

    A checkpoint holds where the training loader stands: ``fit(…, ckpt_path=…)`` goes on there, bit for bit. Validation, test
    and prediction see the same frames in every pass.

    Args:
        train: arguments of :class:`gpupipe.VideoLoader`, as in ``{"videos": "train.csv", "batch": 8}``. Where they leave out
            ``device``, ``rank`` and ``world_size``, these are the trainer's.
        val, test, predict: the same, or several such; unless they say otherwise, in list order, with the last, smaller batch.
    """

    def __init__(self, train: Loaders = None, val: Loaders = None, test: Loaders = None, predict: Loaders = None) -> None:
        super().__init__()
        self._settings: dict[str, Loaders] = {"train": train, "val": val, "test": test, "predict": predict}
        self._made: list[VideoLoader] = []
        self._training: LightningFeed | None = None

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        if not isinstance(self._settings["train"], Mapping):
            raise ConfigError(f"train={self._settings['train']!r} is nothing to train on", fix="give train={'videos': …}")
        (self._training,) = self._feeds("train", fixed=self.trainer.overfit_batches > 0)
        return self._training

    def val_dataloader(self) -> Any:
        return self._feeds("val")

    def test_dataloader(self) -> Any:
        return self._feeds("test")

    def predict_dataloader(self) -> Any:
        return self._feeds("predict")

    def _feeds(self, name: str, *, fixed: bool = True) -> list[LightningFeed]:
        assert self.trainer is not None
        told = self._settings[name] or []
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        known = {"rank": ranks["rank"], "world_size": ranks["num_replicas"], "device": str(self.trainer.strategy.root_device)}
        base = {} if name == "train" else {"config": EVALUATION}
        loaders = [VideoLoader(**{**base, **known, **one}) for one in ([told] if isinstance(told, Mapping) else told)]
        self._made += loaders
        return [LightningFeed(loader, fixed=fixed) for loader in loaders]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Called right before a batch is used."""
        if self._training is not None and self.trainer is not None and self.trainer.training:
            self._training.use()
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str) -> None:
        while self._made:
            self._made.pop().close()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("")
