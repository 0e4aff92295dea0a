"""Lightning's own Trainer and Fabric on the CPU: epochs, accumulation, validation, and going on from their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpupipe import VideoLoader

pytest.importorskip("lightning")

from lightning import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import SETTINGS, VALIDATION, Classifier, Seen, fact, run_ranks, run_sample, weights

from gpupipe.errors import ConfigError
from gpupipe.integrations.lightning import VideoDataModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()
        self.seen: list[Seen] = []
        self.validated: list[Seen] = []
        self.predicted: list[Seen] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(fact(batch))
        return F.cross_entropy(self.net(batch["video"]), batch["label"])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(fact(batch))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        self.predicted.append(fact(batch))
        return self.net(batch["video"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Bare(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        assert (batch["video"].dtype, batch.clips) == (torch.float64, ())
        self.sums.append(batch["video"].sum().item())
        return F.cross_entropy(self.net(batch["video"]), batch["label"])


def fit(
    data: VideoDataModule,
    folder: Path,
    checkpoint: str | None = None,
    *,
    save: int = 0,
    model: Any = None,
    **options: Any,
) -> Any:
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=save, save_top_k=-1)] if save else []
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=bool(save),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 2, **options},
    )
    model = model or Lit()
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return model


def module(rows: list[dict[str, Any]], **changes: Any) -> VideoDataModule:
    val = {"videos": rows[:3], **VALIDATION}
    return VideoDataModule(train={"videos": rows, **SETTINGS, **changes}, val=val)


def plain(rows: list[dict[str, Any]], batches: int) -> list[Seen]:
    """What a loop of the loader's own gives."""
    found: list[Seen] = []
    with VideoLoader(rows, **SETTINGS, device="cpu") as loader:
        while len(found) < batches:
            found += [fact(batch) for batch in loader]
    return found[:batches]


def test_epochs_are_the_loader_s_own_and_validation_is_the_same_each_time(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    model = fit(module(rows), tmp_path)
    assert model.seen == plain(rows, 10)
    sanity, first, second = model.validated[:2], model.validated[2:4], model.validated[4:]
    assert sanity == first == second
    assert [samples for _, samples, _ in first] == [(0, 1), (2,)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_goes_on_from_any_checkpoint_of_the_trainer(rows: list[dict[str, Any]], tmp_path: Path, accumulate: int) -> None:
    """Amid an epoch, at its end and in the next one: the same batches, the same weights."""
    options = {"accumulate_grad_batches": accumulate, "val_check_interval": 2}
    whole = fit(module(rows), tmp_path, save=1, **options)
    for path in sorted(tmp_path.glob("*.ckpt")):
        steps = int(path.stem.partition("=")[2])
        epoch, within = divmod(steps, -(-5 // accumulate))
        used = 5 * epoch + within * accumulate
        rest = fit(module(rows), tmp_path, str(path), **options)
        assert rest.seen == whole.seen[used:], path
        assert weights(rest) == weights(whole), path


def test_batches_that_were_fetched_ahead_are_not_lost(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Without a length Lightning asks for one batch more than it uses."""
    options = {"max_epochs": -1, "max_steps": 8, "limit_val_batches": 0}
    whole = fit(module(rows, repeat=True), tmp_path, save=3, **options)
    assert whole.seen == plain(rows, 8)
    for steps in (3, 6):
        rest = fit(module(rows, repeat=True), tmp_path, str(tmp_path / f"step={steps}.ckpt"), **options)
        assert rest.seen == whole.seen[steps:]
        assert weights(rest) == weights(whole)


def test_a_part_of_each_epoch(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """limit_train_batches leaves an epoch early, also as a share, which needs the length; the next begins at its start."""
    model = fit(module(rows), tmp_path, limit_train_batches=0.6)
    whole = plain(rows, 10)
    assert model.seen == whole[:3] + whole[5:8]


def test_overfitting_has_the_same_batches_each_epoch(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    model = fit(module(rows), tmp_path, overfit_batches=2, max_epochs=3)
    assert model.seen == plain(rows, 2) * 3


def test_precisions_that_make_batches_anew_keep_the_state(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Lightning then hands out copies without our attributes; the place is known all the same."""
    options = {"precision": "64-true", "max_epochs": -1, "max_steps": 5, "limit_val_batches": 0}
    whole = fit(module(rows), tmp_path, save=3, model=Bare(), **options)
    rest = fit(module(rows), tmp_path, str(tmp_path / "step=3.ckpt"), model=Bare(), **options)
    assert rest.sums == whole.sums[3:]


def test_predictions_come_in_list_order(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    data = VideoDataModule(predict={"videos": rows[:3], **VALIDATION})
    model = Lit()
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    made = trainer.predict(model, datamodule=data)
    assert made is not None
    assert [samples for _, samples, _ in model.predicted] == [(0, 1), (2,)]
    with pytest.raises(ConfigError, match="train=None is nothing to train on"):
        fit(data, tmp_path)


TWO_RANKS = """
import json, sys
import torch
import torch.distributed as dist
from runs import weights
from test_lightning import fit, module

rows, folder = json.loads(sys.argv[1]), sys.argv[2]
options = {"devices": 2, "strategy": "ddp", "limit_val_batches": 0}
whole = fit(module(rows, batch=1), folder, save=1, **options)
rest = fit(module(rows, batch=1), folder, folder + "/step=7.ckpt", **options)
seen = [None, None]
dist.all_gather_object(seen, whole.seen)
if dist.get_rank() == 0:
    print(json.dumps([seen, rest.seen == whole.seen[7:], weights(rest) == weights(whole)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_share_each_epoch_and_go_on_together(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (told,) = run_ranks(TWO_RANKS, tmp_path, rows, launcher=False)
    seen, same_batches, same_weights = told
    for epoch in range(2):
        samples = [sample for rank in seen for number, batch, _ in rank if number == epoch for sample in batch]
        assert sorted(samples) == list(range(10))
    assert (same_batches, same_weights) == (True, True)


def test_fabric_takes_the_view_and_saves_the_loader(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    runs = []
    for taken_up in (False, True):
        net = Classifier()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        seen: list[Seen] = []
        with VideoLoader(rows, **SETTINGS, device=str(fabric.device)) as loader:
            state = {"model": model, "optimizer": optimizer, "loader": loader}
            if taken_up:
                fabric.load(tmp_path / "one.ckpt", state)
            view = fabric.setup_dataloaders(loader.as_dataloader(), use_distributed_sampler=False, move_to_device=False)
            for _ in range(1 if taken_up else 2):
                for batch in view:
                    seen.append(fact(batch))
                    fabric.backward(F.cross_entropy(model(batch["video"]), batch["label"]))
                    optimizer.step()
                    optimizer.zero_grad()
                    if len(seen) == 7 and not taken_up:
                        fabric.save(tmp_path / "one.ckpt", state)
        runs.append((seen, weights(net)))
    assert runs[0][0] == plain(rows, 10)
    assert runs[1] == (runs[0][0][7:], runs[0][1])


def test_the_sample_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_lightning.py", small_data, "--epochs", 1, monkeypatch=monkeypatch, folder=tmp_path)
    assert "after 3 steps" in said
    more = ["--epochs", 2, "--resume", "lightning_out/last.ckpt"]
    said = run_sample("train_lightning.py", small_data, *more, monkeypatch=monkeypatch, folder=tmp_path)
    assert "after 6 steps" in said
