"""torchtitan's loader protocol, checkpoints and validation on the CPU. Its Trainer needs GPUs: what it does with a loader is
done here with its own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpupipe import VideoLoader

pytest.importorskip("torchtitan")

from runs import SETTINGS, Seen, fact, run_ranks, run_sample
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.trainer import Trainer

from gpupipe.errors import ConfigError
from gpupipe.integrations.torchtitan import VideoDataLoader

TOLD_TO_TEXT = {"tokenizer": None, "seq_len": 128, "snapshot_every_n_steps": 5}
"""What the Trainer gives to every loader's build()."""


def config(rows: list[dict[str, Any]], **changes: Any) -> VideoDataLoader.Config:
    settings = {name: value for name, value in SETTINGS.items() if name != "batch"}
    return VideoDataLoader.Config(loader={"videos": rows, "device": "cpu", **settings, **changes})


def build(made: VideoDataLoader.Config, rank: int = 0, ranks: int = 1, size: int = 2) -> VideoDataLoader:
    loader = made.build(dp_rank=rank, dp_world_size=ranks, local_batch_size=size, **TOLD_TO_TEXT)
    assert isinstance(loader, BaseDataLoader)
    return loader


def sums(batches: list[Any]) -> list[float]:
    return [inputs["input"].double().sum().item() for inputs, _ in batches]


def plain(rows: list[dict[str, Any]], batches: int) -> list[Seen]:
    with VideoLoader(rows, **SETTINGS, device="cpu", repeat=True) as loader:
        iterator = iter(loader)
        return [fact(next(iterator)) for _ in range(batches)]


def test_the_trainer_s_generator_has_epoch_after_epoch(rows: list[dict[str, Any]]) -> None:
    """With its own function, which counts labels as tokens."""
    loader = build(config(rows))
    metrics = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    generator = Trainer.batch_generator(SimpleNamespace(metrics_processor=metrics), loader)
    batches = [next(generator) for _ in range(12)]
    assert sums(batches) == [total for _, _, total in plain(rows, 12)]
    assert metrics.ntokens_since_last_log == 24
    assert batches[0][1].shape == (2,)
    loader.close()


def test_validation_s_copy_of_the_configuration_ends_and_has_the_same_frames_each_time(rows: list[dict[str, Any]]) -> None:
    """The Validator sets ``infinite`` by dataclasses.replace, and moves tensors within the dict that it is given."""
    loader = build(replace(config(rows), infinite=False))
    first = list(loader)
    assert len(first) == 5
    for inputs, _ in first:
        inputs["input"] = inputs["input"].to("cpu")
    assert sums(list(loader)) == sums(first)
    metrics = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    generator = Trainer.batch_generator(SimpleNamespace(metrics_processor=metrics), loader)
    assert sums([next(generator) for _ in range(5)]) == sums(first)
    with pytest.raises(DataloaderExhaustedError):
        next(generator)
    loader.close()


def test_peers_that_share_a_rank_get_the_same_batches_and_ranks_share_the_data(rows: list[dict[str, Any]]) -> None:
    taken = []
    for rank in (0, 0, 1):
        loader = build(replace(config(rows), infinite=False), rank, 2, 1)
        taken.append(sums(list(loader)))
        loader.close()
    assert taken[0] == taken[1]
    assert len(taken[0]) == len(taken[2]) == 5
    assert not set(taken[0]) & set(taken[2])


def test_other_arguments_and_columns_may_be_named(rows: list[dict[str, Any]]) -> None:
    made = replace(config(rows), inputs={"input": "video", "times": "pts_seconds"}, labels="video")
    loader = build(made)
    inputs, labels = next(iter(loader))
    assert set(inputs) == {"input", "times"}
    assert labels.shape == inputs["input"].shape
    loader.close()


def test_states_are_one_for_all_ranks_unless_batches_come_out_of_order(rows: list[dict[str, Any]]) -> None:
    loader = build(config(rows))
    iterator = iter(loader)
    first = [next(iterator) for _ in range(7)]
    state = loader.state_dict()
    rest = [next(iterator) for _ in range(4)]
    loader.load_state_dict({})
    loader.load_state_dict(state)
    iterator = iter(loader)
    assert sums([next(iterator) for _ in range(4)]) == sums(rest)
    assert len(first) == 7
    loader.close()
    other = build(config(rows, jitter={"in_order": False}), 1, 2, 1)
    assert list(other.state_dict()) == ["dp_rank_1"]
    with pytest.raises(ConfigError, match="this checkpoint has no dp_rank_1 of a VideoLoader, but place"):
        other.load_state_dict(state)
    other.close()


def test_batches_of_another_size_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="local_batch_size=2, but the loader's batch=3"):
        build(config(rows, batch=3))


RANKS = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from runs import Classifier, weights
from test_torchtitan import build, config

rows, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")


def train(steps, load):
    loader = build(config(rows), dist.get_rank(), dist.get_world_size(), 1)
    model = Classifier()
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=steps)
    progress = {"step": torch.tensor(0)}
    checkpoints = CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False, load_only=load > 0).build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedules, states={"progress": progress},
        sd_adapter=None, base_folder=str(folder),
    )
    if load:
        checkpoints.load(load)
    parallel, seen = DistributedDataParallel(model), []
    batches = iter(loader)
    for step in range(int(progress["step"]) + 1, steps + 1):
        total = 0
        optimizers.zero_grad()
        for _ in range(2):
            inputs, labels = next(batches)
            seen.append(inputs["input"].double().sum().item())
            F.cross_entropy(parallel(inputs["input"]), labels).backward()
        optimizers.step()
        schedules.step()
        progress["step"].fill_(step)
        checkpoints.save(step)
    loader.close()
    return seen, weights(model)


whole = train(7, 0)
told = []
for load in (3, 6):
    rest = train(7, load)
    told.append([load, rest[0] == whole[0][2 * load:], rest[1] == whole[1]])
seen = [None, None]
dist.all_gather_object(seen, whole[0])
if dist.get_rank() == 0:
    print(json.dumps([seen, told]))
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_go_on_from_torchtitan_s_checkpoints(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    ((seen, told),) = run_ranks(RANKS, tmp_path, rows)
    assert told == [[3, True, True], [6, True, True]]
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.usefixtures("one_rank")
def test_the_sample_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_torchtitan.py", small_data, "--steps", 6, monkeypatch=monkeypatch, folder=tmp_path)
    assert said.splitlines()[-1].startswith("rank 0, step 6: loss ")
    said = run_sample("train_torchtitan.py", small_data, "--steps", 8, monkeypatch=monkeypatch, folder=tmp_path)
    assert [line.split(":")[0] for line in said.splitlines()] == ["rank 0, step 7", "rank 0, step 8"]
