"""accelerate's own loop on the CPU: accumulation to the last batch, checkpoints, and a share of the data that is taken once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpupipe import VideoLoader

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from runs import SETTINGS, Classifier, Seen, fact, run_ranks, run_sample, weights

from gpupipe.errors import ConfigError
from gpupipe.integrations.accelerate import prepare


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate keeps its state for the whole process, and refuses another accumulation later on."""
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def train(
    rows: list[dict[str, Any]], folder: Path, resume: str | None = None, *, accumulate: int = 2, epochs: int = 2, **more: Any
) -> tuple[list[Seen], list[int], Any]:
    """Batches, those of them at which gradients were applied, and the weights; a checkpoint behind every batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    seen: list[Seen] = []
    applied: list[int] = []
    with VideoLoader(rows, **{**SETTINGS, **more}, device="cpu") as plain:
        loader = prepare(accelerator, plain)
        net = Classifier()
        model, optimizer, same = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), loader)
        assert same is loader, "prepare() leaves it alone"
        if resume is not None:
            accelerator.load_state(resume)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                seen.append(fact(batch))
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(batch["video"]), batch["label"]))
                    if accelerator.sync_gradients:
                        applied.append(len(seen))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and resume is None:
                    accelerator.save_state(str(folder / f"after{len(seen)}"))
    return seen, applied, weights(net)


def test_an_epoch_s_last_window_is_applied_and_runs_go_on_from_any_checkpoint(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    seen, applied, end = train(rows, tmp_path)
    assert [(epoch, len(samples)) for epoch, samples, _ in seen] == [(0, 2)] * 5 + [(1, 2)] * 5
    assert applied == [2, 4, 5, 7, 9, 10], "the fifth batch is alone in its window"
    for batches in applied:
        rest, _, same = train(rows, tmp_path, str(tmp_path / f"after{batches}"))
        assert rest == seen[batches:], batches
        assert same == end, batches


def test_a_state_between_epochs_goes_on_with_the_next_one(rows: list[dict[str, Any]]) -> None:
    accelerator = Accelerator(cpu=True)
    with VideoLoader(rows, **SETTINGS, device="cpu") as plain:
        loader = prepare(accelerator, plain)
        batches = list(loader)
        assert (loader.epoch, loader.state_dict()["samples"]) == (1, 0)
        loader.load_state_dict(batches[2].state)
        assert [fact(batch) for batch in loader] == [fact(batch) for batch in batches[3:]]
        loader.set_epoch(0)
        assert fact(next(iter(loader))) == fact(batches[0])
        assert len(loader) == 5
    assert GradientState().active_dataloader is None


def test_loaders_that_are_iterated_within_each_other_keep_their_ends(rows: list[dict[str, Any]]) -> None:
    """Validation amid an epoch must not end a window of the training's."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with VideoLoader(rows, **SETTINGS, device="cpu") as one, VideoLoader(rows[:4], **SETTINGS, device="cpu") as other:
        train_loader, val = prepare(accelerator, one), prepare(accelerator, other, checkpoint=False)
        state = accelerator.gradient_state
        ends = [(state.end_of_dataloader, [state.end_of_dataloader for _ in val]) for _ in train_loader]
    assert ends == [(False, [False, True])] * 4 + [(True, [False, True])]


def test_a_loader_of_other_ranks_is_refused(rows: list[dict[str, Any]]) -> None:
    accelerator = Accelerator(cpu=True)
    two = VideoLoader(rows, **SETTINGS, device="cpu", rank=0, world_size=2)
    with two, pytest.raises(ConfigError, match=r"made for 2 rank\(s\), accelerate has 1"):
        prepare(accelerator, two)


TWO_RANKS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from accelerate import Accelerator
from gpupipe import VideoLoader
from gpupipe.errors import ConfigError
from gpupipe.integrations.accelerate import prepare
from runs import SETTINGS, fact
from test_accelerate import train

rows, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
early = VideoLoader(rows, **SETTINGS, device="cpu", rank=0, world_size=1)
seen, applied, end = train(rows, folder, batch=1)
rest, _, same = train(rows, folder, str(folder / "after7"), batch=1)
accelerator = Accelerator(cpu=True)
refused = []
out_of_order = VideoLoader(rows, **SETTINGS, device="cpu", jitter={"in_order": False})
for loader in (early, out_of_order):
    try:
        prepare(accelerator, loader)
    except ConfigError as error:
        refused.append(str(error))
    loader.close()
with VideoLoader(rows, **SETTINGS, device="cpu") as loader:
    view = loader.as_dataloader()
    prepared = accelerator.prepare(view)
    shares = [None, None]
    dist.all_gather_object(shares, [fact(batch) for batch in prepared])
every = [None, None]
dist.all_gather_object(every, seen)
if accelerator.is_main_process:
    print(json.dumps([every, applied, rest == seen[7:], same == end, refused, prepared is view, shares]))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_share_each_epoch_once(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (told,) = run_ranks(TWO_RANKS, tmp_path, rows)
    every, applied, same_batches, same_weights, refused, untouched, shares = told
    for epoch in range(2):
        samples = [sample for rank in every for number, batch, _ in rank if number == epoch for sample in batch]
        assert sorted(samples) == list(range(10))
    assert applied == [2, 4, 5, 7, 9, 10]
    assert (same_batches, same_weights) == (True, True)
    assert "made for 1 rank(s), accelerate has 2" in refused[0]
    assert "need a state for each rank" in refused[1]
    assert untouched, "nor is the view that is a DataLoader divided again"
    assert sorted(sample for rank in shares for _, batch, _ in rank for sample in batch) == list(range(8))


def test_the_sample_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_accelerate.py", small_data, "--epochs", 1, monkeypatch=monkeypatch, folder=tmp_path)
    assert said.startswith("epoch 0: validation accuracy ")
    more = ["--epochs", 2, "--resume", "accelerate_out"]
    said = run_sample("train_accelerate.py", small_data, *more, monkeypatch=monkeypatch, folder=tmp_path)
    assert [line.split(":")[0] for line in said.splitlines()] == ["epoch 0", "epoch 1"]
