"""transformers: a Trainer whose datasets are VideoLoaders, and whose checkpoints hold where the training one stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gpupipe.data.loader import VideoLoader
from gpupipe.device.inventory import load
from gpupipe.errors import ConfigError
from gpupipe.integrations.checks import accelerator_ranks, one_state_serves_all, ranks_fit

load("transformers.trainer")  # that it, or accelerate, is not there is told in one line, with what to install

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

STATE = "gpupipe_state.json"  # in a checkpoint: where the training loader stood


class _Inputs(IterableDataset[dict[str, Any]]):
    """A loader's batches as a model's arguments, behind as many empty ones as a Trainer that goes on will throw away."""

    def __init__(self, loader: VideoLoader, names: Mapping[str, str], *, fixed: bool = False) -> None:
        self.loader, self.names, self.fixed, self.empty, self.given = loader, names, fixed, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.fixed:
            self.loader.set_epoch(0)
        self.given, self.empty = self.empty, 0
        yield from ({} for _ in range(self.given))
        for batch in self.loader:
            self.given += 1
            yield {name: batch[column] for name, column in self.names.items() if column in batch}

    def __len__(self) -> int:
        return len(self.loader.dataset)


class _View(DataLoader[Any]):
    """The DataLoader that the Trainer wants in order to skip batches, with the length and the epochs of the loader."""

    dataset: _Inputs

    def __len__(self) -> int:
        return len(self.dataset.loader)

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of an epoch, but not of one in which batches are skipped."""
        self.dataset.empty = 0
        if not self.dataset.loader.config.repeat:
            self.dataset.loader.set_epoch(epoch)


class _Keeper(TrainerCallback):
    """Puts the loader's place into each checkpoint."""

    trainer: Any

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save and self.trainer.fed is not None:
            Path(args.output_dir, f"checkpoint-{state.global_step}", STATE).write_text(json.dumps(self.trainer.place()))


class VideoTrainer(Trainer):
    """A Trainer whose ``train_dataset`` and ``eval_dataset``, or each of several, may be VideoLoaders, made behind the
    TrainingArguments, which bring the ranks. Resumed, it goes on bit for bit; leave ``ignore_data_skip`` off, for skipping
    takes no time. Evaluation sees the same frames in every pass.
    """

    names: Mapping[str, str] = {"pixel_values": "video", "labels": "label"}  # the model's arguments, and a batch's columns
    fed: Any = None
    _resume: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(keeper := _Keeper())
        keeper.trainer = self

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        given = resume_from_checkpoint
        self._resume = get_last_checkpoint(self.args.output_dir) if given is True else given
        return super().train(given, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        loader, size = self.train_dataset, self.args.per_device_train_batch_size
        if not isinstance(loader, VideoLoader):
            return super().get_train_dataloader()
        ranks_fit(loader, accelerator_ranks(self.accelerator), "the Trainer")
        one_state_serves_all(loader)
        if loader.batch_size != size:  # of which DeepSpeed's settings are made
            raise ConfigError(f"per_device_train_batch_size={size}, but batch={loader.batch_size}", fix="give the same twice")
        self.fed = _Inputs(loader, self.names)
        if self._resume:
            self._go_on(Path(self._resume, STATE), self.fed)
        return _View(self.fed, batch_size=None, collate_fn=dict)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset or self.eval_dataset
        if not isinstance(loader, VideoLoader):
            return super().get_eval_dataloader(eval_dataset)
        return _View(_Inputs(loader, self.names, fixed=True), batch_size=None, collate_fn=dict)

    def place(self) -> dict[str, Any]:
        """Where the training loader stands, and how many batches of the Trainer's epoch came before."""
        return {"loader": self.fed.loader.state_dict(), "given": self.fed.given, "every": self.args.gradient_accumulation_steps}

    def _go_on(self, file: Path, fed: _Inputs) -> None:
        if not file.is_file():
            raise ConfigError(f"{file.parent} has no {STATE}: no VideoLoader was trained on there", fix="name another one")
        there, here = json.loads(file.read_text()), self.place()
        told = [f"{place['loader']['step']} samples a batch, {place['every']} batches a step" for place in (there, here)]
        if told[0] != told[1]:  # the Trainer counts in batches, and would be in another epoch
            raise ConfigError(f"{file.parent}: {told[0]}; here: {told[1]}", fix="keep ranks, batch size and accumulation")
        fed.loader.load_state_dict(there["loader"])
        fed.empty = 0 if self.args.ignore_data_skip else there["given"]
