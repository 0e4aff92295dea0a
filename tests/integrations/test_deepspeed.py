"""DeepSpeed's engines on the CPU: accumulation over the ends of epochs, ZeRO, a pipeline, and going on from checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpupipe import VideoLoader

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed.pipe import PipelineModule
from runs import SETTINGS, Classifier, Seen, fact, run_ranks, run_sample, weights

from gpupipe.errors import ConfigError
from gpupipe.integrations.deepspeed import engine_loader, load_checkpoint, micro_batches, pairs, save_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""A faster way among the processes of one machine, which DeepSpeed would compile first, for most of a minute."""
CLIPS = {name: value for name, value in SETTINGS.items() if name != "batch"}


def engine_of(net: Any, micro: int = 2, **more: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        **more,
    }
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    return engine


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(rows: Any, folder: Path, steps: int, resume: str | None = None, *, save: bool = False, micro: int = 2) -> Any:
    """Batches, and the weights at the end."""
    engine = engine_of(Classifier(), micro)
    seen: list[Seen] = []
    with engine_loader(engine, rows, **CLIPS) as loader:
        if resume is not None:
            assert load_checkpoint(engine, loader, str(folder), resume)["more"] == 7
        for batch in micro_batches(engine, loader, steps):
            seen.append(fact(batch))
            engine.backward(F.cross_entropy(engine(batch["video"]), batch["label"]))
            engine.step()
            if save and engine.micro_steps % 2 == 0:
                save_checkpoint(engine, loader, str(folder), f"step{engine.global_steps}", {"more": 7})
        assert engine.global_steps == steps
        assert list(micro_batches(engine, loader, steps)) == []
    return seen, weights(engine.module)


@pytest.mark.usefixtures("one_rank")
def test_windows_go_over_the_ends_of_epochs_and_runs_go_on_from_any_checkpoint(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    seen, end = train(rows, tmp_path, 7, save=True)
    with VideoLoader(rows, **SETTINGS, device="cpu", repeat=True) as loader:
        iterator = iter(loader)
        assert seen == [fact(next(iterator)) for _ in range(14)]
    for step in (1, 2, 3, 5):
        rest, same = train(rows, tmp_path, 7, f"step{step}")
        assert rest == seen[2 * step :], step
        assert same == end, step


@pytest.mark.usefixtures("one_rank")
def test_what_a_checkpoint_cannot_hold_or_does_not_have_is_named(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    engine = engine_of(Classifier())
    with engine_loader(engine, rows, **CLIPS) as loader:
        batch = next(iter(loader))
        engine.backward(F.cross_entropy(engine(batch["video"]), batch["label"]))
        engine.step()
        with pytest.raises(ConfigError, match="lose the gradients of 1 micro-batches"):
            save_checkpoint(engine, loader, str(tmp_path))
        with pytest.raises(ConfigError, match="has no checkpoint"):
            load_checkpoint(engine, loader, str(tmp_path))
        engine.save_checkpoint(str(tmp_path), tag="theirs")
        with pytest.raises(ConfigError, match="no place of a VideoLoader in its checkpoint theirs"):
            load_checkpoint(engine, loader, str(tmp_path), "theirs")
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu=2, but batch=3"):
        engine_loader(engine, rows, **CLIPS, batch=3)


@pytest.mark.usefixtures("one_rank")
def test_the_pipeline_engine_pulls_its_micro_batches(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    def run(steps: int, resume: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        layers = [torch.nn.AdaptiveAvgPool3d((1, 4, 4)), torch.nn.Flatten(), torch.nn.Linear(48, 3)]
        if not dist.is_initialized():
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        engine = engine_of(PipelineModule(layers, num_stages=1, loss_fn=F.cross_entropy))
        with engine_loader(engine, rows, **CLIPS) as loader:
            if resume:
                load_checkpoint(engine, loader, str(tmp_path))
            source = pairs(loader)
            losses = []
            while engine.global_steps < steps:
                losses.append(float(engine.train_batch(source)))
                if engine.global_steps == 3 and not resume:
                    save_checkpoint(engine, loader, str(tmp_path))
        return losses, weights(engine.module)

    losses, end = run(6, resume=False)
    rest, same = run(6, resume=True)
    assert (rest, same) == (losses[3:], end)


TWO_RANKS = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from test_deepspeed import train

rows, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
whole = train(rows, folder, 6, save=True, micro=1)
rest = train(rows, folder, 6, "step4", micro=1)
seen = [None, None]
dist.all_gather_object(seen, whole[0])
if dist.get_rank() == 0:
    print(json.dumps([seen, rest[0] == whole[0][8:], rest[1] == whole[1]]), flush=True)
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_share_each_epoch_and_go_on_together(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    ((seen, same_batches, same_weights),) = run_ranks(TWO_RANKS, tmp_path, rows)
    for epoch in range(2):
        samples = [sample for rank in seen for number, batch, _ in rank if number == epoch for sample in batch]
        assert sorted(samples) == list(range(10))
    assert (same_batches, same_weights) == (True, True)


@pytest.mark.usefixtures("one_rank")
def test_the_sample_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_deepspeed.py", small_data, "--steps", 5, monkeypatch=monkeypatch, folder=tmp_path)
    assert "epoch 1, step 5: loss " in said
    more = ["--steps", 10, "--resume"]
    said = run_sample("train_deepspeed.py", small_data, *more, monkeypatch=monkeypatch, folder=tmp_path)
    assert "step 10: loss " in said
    assert "step 5: loss" not in said
