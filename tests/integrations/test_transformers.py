"""transformers' own Trainer on the CPU: epochs, accumulation, evaluation, and going on from its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpupipe import VideoLoader

pytest.importorskip("transformers")

from runs import SETTINGS, VALIDATION, Classifier, run_ranks, run_sample, weights
from transformers import TrainingArguments

from gpupipe.errors import ConfigError
from gpupipe.integrations.hf import STATE, VideoTrainer

Sums = list[float]
Rows = list[dict[str, Any]]


class Model(Classifier):
    """As models of transformers are: arguments by name, loss and logits in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Sums = []
        self.evaluated: Sums = []

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        (self.seen if self.training else self.evaluated).append(pixel_values.double().sum().item())
        logits = super().forward(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def fit(rows: Rows, folder: Path, resume: str | bool | None = None, *, loader: Any = None, **more: Any) -> Model:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, learning_rate=0.1, **{"num_train_epochs": 2, "save_strategy": "no", **more},
    )  # fmt: skip
    model = Model()
    train = VideoLoader(rows, **{**SETTINGS, **(loader or {})}, device="cpu")
    val = VideoLoader(rows[:3], **VALIDATION, device="cpu")
    with train, val:
        trainer = VideoTrainer(model, args, train_dataset=train, eval_dataset=val)
        trainer.train(resume_from_checkpoint=resume)
    return model


def plain(rows: list[dict[str, Any]], batches: int) -> Sums:
    found: Sums = []
    with VideoLoader(rows, **SETTINGS, device="cpu") as loader:
        while len(found) < batches:
            found += [batch.video.double().sum().item() for batch in loader]
    return found[:batches]


def test_epochs_are_the_loader_s_own_and_evaluation_is_the_same_each_time(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    model = fit(rows, tmp_path, eval_strategy="epoch")
    assert model.seen == plain(rows, 10)
    assert len(model.evaluated) == 4
    assert model.evaluated[:2] == model.evaluated[2:]


@pytest.mark.parametrize(("accumulate", "used"), [(1, [*range(1, 10)]), (2, [2, 4, 5, 7, 9])])
def test_a_run_goes_on_from_any_checkpoint_of_the_trainer(
    rows: list[dict[str, Any]], tmp_path: Path, accumulate: int, used: list[int]
) -> None:
    """Also where an epoch's last window has one batch of two: it must be known to be the last."""
    options = {"gradient_accumulation_steps": accumulate, "save_strategy": "steps", "save_steps": 1}
    whole = fit(rows, tmp_path, **options)
    for step, batches in enumerate(used, start=1):
        rest = fit(rows, tmp_path, str(tmp_path / f"checkpoint-{step}"), **{**options, "save_strategy": "no"})
        assert rest.seen == whole.seen[batches:], step
        assert weights(rest) == weights(whole), step


def test_the_last_checkpoint_is_found_and_data_skip_may_be_ignored(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = fit(rows, tmp_path, save_strategy="steps", save_steps=3)
    shutil.rmtree(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-9")
    for more in ({}, {"ignore_data_skip": True}):
        rest = fit(rows, tmp_path, True, **more)
        assert rest.seen == whole.seen[6:]
        assert weights(rest) == weights(whole)


def test_a_loader_without_an_end_goes_on_too(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    options: dict[str, Any] = {"loader": {"repeat": True}, "max_steps": 8, "save_strategy": "steps", "save_steps": 6}
    whole = fit(rows, tmp_path, **options)
    assert whole.seen == plain(rows, 8)
    rest = fit(rows, tmp_path, str(tmp_path / "checkpoint-6"), **options)
    assert rest.seen == whole.seen[6:]
    assert weights(rest) == weights(whole)


def test_what_cannot_go_on_is_named(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    fit(rows, tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    checkpoint = tmp_path / "checkpoint-3"
    with pytest.raises(ConfigError, match=r"checkpoint-3: 2 samples a batch, 1 batches a step; here: 2 .*, 2 b"):
        fit(rows, tmp_path, str(checkpoint), gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="per_device_train_batch_size=2, but batch=1"):
        fit(rows, tmp_path, loader={"batch": 1})
    with pytest.raises(ConfigError, match=r"made for 2 rank\(s\), the Trainer has 1"):
        fit(rows, tmp_path, loader={"rank": 0, "world_size": 2})
    (checkpoint / STATE).unlink()
    with pytest.raises(ConfigError, match="no VideoLoader was trained on there"):
        fit(rows, tmp_path, str(checkpoint))


def test_several_sets_to_evaluate_on_and_datasets_of_other_kinds(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=2)
    with VideoLoader(rows[:3], **VALIDATION, device="cpu") as one, VideoLoader(rows[:5], **VALIDATION, device="cpu") as other:
        items = [{"pixel_values": torch.zeros(3, 4, 24, 24), "labels": 1}] * 3
        trainer = VideoTrainer(Model(), args, train_dataset=items, eval_dataset={"a": one, "b": other, "c": items})
        metrics = trainer.evaluate()
        assert {"eval_a_loss", "eval_b_loss", "eval_c_loss"} <= set(metrics)
        assert len(trainer.model.evaluated) == 2 + 3 + 2
        assert trainer.evaluate(one)["eval_loss"] == metrics["eval_a_loss"]
        trainer.train()
        assert len(trainer.model.seen) == 3, "a dataset that is no VideoLoader is the Trainer's own business"


TWO_RANKS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from test_transformers import fit
from runs import weights

rows, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
options = {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}
whole = fit(rows, folder, num_train_epochs=3, save_strategy="steps", save_steps=2, **options)
rest = fit(rows, folder, str(folder / "checkpoint-2"), num_train_epochs=3, **options)
both = [None, None]
same = rest.seen == whole.seen[len(whole.seen) - len(rest.seen):]
dist.all_gather_object(both, [whole.seen, same, weights(whole) == weights(rest)])
if dist.get_rank() == 0:
    print(json.dumps([both, len(rest.seen)]))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_share_each_epoch_and_go_on_together(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    ((both, left),) = run_ranks(TWO_RANKS, tmp_path, rows)
    assert len(both[0][0]) == len(both[1][0]) == 6, "8 of 10 samples, two batches a rank and epoch, three epochs"
    assert not set(both[0][0]) & set(both[1][0])
    assert [rest[1:] for rest in both] == [[True, True]] * 2
    assert left == 2


def test_the_sample_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_transformers.py", small_data, "--epochs", 2, monkeypatch=monkeypatch, folder=tmp_path)
    assert said.count("eval_accuracy") == 2
    assert (tmp_path / "transformers_out" / "checkpoint-5" / STATE).is_file()
    more = ["--epochs", 3, "--resume"]
    said = run_sample("train_transformers.py", small_data, *more, monkeypatch=monkeypatch, folder=tmp_path)
    assert said.count("eval_accuracy") == 1
