"""What trainers ask of a loader that stands in the place of a DataLoader."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from gpupipe import Batch, VideoLoader
from gpupipe.errors import ClosedError, ConfigError, GpupipeError, OpenError, SampleError
from gpupipe.types import Clip

OPTIONS: dict[str, Any] = {
    "clip": {"frames": 4},
    "transform": {"size": 24, "dtype": "float32"},
    "device": "cpu",
    "batch": 2,
    "decode": {"threads": 2},
    "seed": 5,
}


@pytest.fixture(scope="module")
def rows(clips: dict[str, Path]) -> list[dict[str, Any]]:
    names = ("h264", "vp9_odd", "mpeg4", "h264_odd", "hevc")
    return [
        {"path": str(clips[names[k % 5]]), "label": k % 3, "caption": f"clip {k}", "score": k / 4, "embedding": np.full(3, k)}
        for k in range(10)
    ]


@pytest.fixture
def loader(rows: list[dict[str, Any]]) -> Iterator[VideoLoader]:
    with VideoLoader(rows, **OPTIONS, columns=["caption", "score", "embedding"]) as made:
        yield made


def test_what_trainers_read_of_a_dataloader_is_there(loader: VideoLoader) -> None:
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.pin_memory) == (2, True, 0, False)
    assert loader.batch_sampler is loader.collate_fn is loader.generator is None
    assert (len(loader), len(loader.dataset), len(loader.sampler)) == (5, 10, 10)
    assert isinstance(loader.dataset, Dataset)


def test_set_epoch_reaches_the_loader_through_its_sampler(loader: VideoLoader) -> None:
    """Lightning and others look for it there alone."""
    loader.sampler.set_epoch(3)
    upcoming = list(loader.sampler)
    assert upcoming == list(loader.sampler), "to look is not to consume"
    batches = list(loader)
    assert {batch.epoch for batch in batches} == {3}
    assert [clip.request.entry for batch in batches for clip in batch.clips] == upcoming
    assert list(loader.sampler) != upcoming, "the next epoch has an order of its own"


def test_an_iterator_that_has_ended_stays_ended(loader: VideoLoader) -> None:
    iterator = iter(loader)
    assert len(list(iterator)) == 5
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_batch_is_a_mapping_of_tensors_with_one_leading_dimension(loader: VideoLoader) -> None:
    batch = next(iter(loader))
    assert isinstance(batch, Mapping)
    assert {tensor.shape[0] for tensor in batch.values()} == {2}
    moved = type(batch)({name: tensor.to("cpu") for name, tensor in batch.items()})
    assert isinstance(moved, Batch)
    assert list(moved) == list(batch)


# The views


def test_the_dataset_makes_single_clips_of_which_torch_makes_batches(loader: VideoLoader, rows: list[dict[str, Any]]) -> None:
    dataset = loader.dataset
    assert dataset.paths == [row["path"] for row in rows]
    item = dataset[7]
    assert item["video"].shape == (3, 4, 24, 24)
    assert (item["label"], item["caption"], item["score"]) == (1, "clip 7", 1.75)
    assert item["embedding"].tolist() == [7, 7, 7]
    assert item["mask"].all()
    assert item["pts_seconds"].shape == (4,)
    batch = next(iter(DataLoader(dataset, batch_size=5, sampler=RandomSampler(dataset))))
    assert batch["video"].shape == (5, 3, 4, 24, 24)
    assert batch["label"].dtype == torch.int64
    assert len(batch["caption"]) == 5


def test_an_item_of_the_dataset_depends_on_seed_epoch_and_number_alone(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS) as one, VideoLoader(rows, **OPTIONS) as other:
        assert torch.equal(one.dataset[3]["video"], other.dataset[3]["video"])
        assert torch.equal(one.dataset[-7]["video"], other.dataset[3]["video"])
        other.dataset.set_epoch(1)
        assert not torch.equal(one.dataset[3]["video"], other.dataset[3]["video"])


def test_an_item_of_the_dataset_is_the_loader_s_own_clip(rows: list[dict[str, Any]]) -> None:
    """In list order sample k is video k, so both name the same request."""
    options = {**OPTIONS, "batch": 6, "clip": {"frames": 4, "clips_per_video": 3}}
    with VideoLoader(rows, **options, shuffle=False, after=brighten) as loader:
        batches = [batch.video for batch in loader]
        assert len(loader.dataset) == 30
        for number, clip in enumerate(torch.cat(batches)):
            assert torch.equal(loader.dataset[number]["video"], clip)


def brighten(clip: Clip) -> torch.Tensor:
    return clip.video + 0.25


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_on_the_cpu_worker_processes_may_make_clips(rows: list[dict[str, Any]], start: str) -> None:
    with VideoLoader(rows[:4], **OPTIONS, after=brighten) as loader:
        assert len(list(loader)) == 2  # a fork amid an epoch may find the locks of native libraries taken
        workers = DataLoader(loader.dataset, batch_size=2, num_workers=1, multiprocessing_context=start, timeout=60)
        made = torch.cat([batch["video"] for batch in workers])
        assert torch.equal(made, torch.stack([loader.dataset[k]["video"] for k in range(4)]))


def test_what_the_dataset_cannot_give_is_named(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    with VideoLoader([*rows, {**rows[0], "path": str(tmp_path / "bad.mp4")}], **OPTIONS) as loader:
        with pytest.raises(IndexError, match="clip 11 of 11"):
            loader.dataset[11]
        with pytest.raises(SampleError, match="no number of a clip"):
            loader.dataset[1:3]  # type: ignore[index]
        with pytest.raises(OpenError, match=r"bad\.mp4"):
            loader.dataset[10]
        assert len(pickle.loads(pickle.dumps(loader.dataset))) == 11


def test_as_a_dataloader_it_gives_the_same_batches_and_keeps_them_as_they_are(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS) as plain, VideoLoader(rows, **OPTIONS) as loader:
        view = loader.as_dataloader()
        assert isinstance(view, DataLoader)
        assert isinstance(view.dataset, IterableDataset)
        assert len(view) == 5
        assert (view.batch_size, view.num_workers, view.pin_memory) == (None, 0, False)
        for one, other in zip(plain, view, strict=True):
            assert isinstance(other, Batch)
            assert torch.equal(one.video, other.video)
            assert (one.clips, one.state) == (other.clips, other.state)
        view.set_epoch(4)
        next(iter(view))
        state = view.state_dict()
        assert (state["epoch"], state["samples"]) == (4, 2)
        view.load_state_dict(state)
        assert len(list(view)) == 4


def test_a_dataloader_with_workers_around_it_is_refused(loader: VideoLoader) -> None:
    around = DataLoader(loader.as_dataloader().dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ClosedError, match="threads of its own"):
        next(iter(around))


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"batch_size": 2}, {"batch_size": 2, "num_workers": 1}])
def test_a_dataloader_of_the_loader_itself_says_what_to_take_instead(loader: VideoLoader, options: dict[str, Any]) -> None:
    """Torch takes it for a map-style dataset, and would say that it is not subscriptable."""
    with pytest.raises(ConfigError, match=r"loader\.as_dataloader\(\)"):
        next(iter(DataLoader(loader, **options)))
    assert len(list(loader)) == len(loader)


# Several loaders, and ranks


def test_several_loaders_at_once_do_not_disturb_each_other(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **OPTIONS) as one, VideoLoader(rows, **{**OPTIONS, "seed": 6}) as other:
        alone = [[batch.video for batch in loader] for loader in (one, other)]
        one.set_epoch(0)
        other.set_epoch(0)
        together = list(zip(one, other, strict=True))
        for number, side in enumerate(alone):
            assert all(torch.equal(pair[number].video, video) for pair, video in zip(together, side, strict=True))


RANK = """
import json, sys
import torch.distributed as dist
from gpupipe import VideoLoader
rows, options, state = (json.loads(argument) for argument in sys.argv[1:4])
dist.init_process_group("gloo")
with VideoLoader(rows, **options) as loader:
    loader.load_state_dict(state)
    received, states = [], []
    for batch in loader:
        sums = [clip.sum().item() for clip in batch.video]
        received.append([[clip.request.sample, clip.path, sums[row]] for row, clip in enumerate(batch.clips)])
        states.append(batch.state)
        dist.barrier()  # ranks with unequal numbers of batches would wait here for ever
    print(json.dumps([dist.get_rank(), len(loader), received, states]))
dist.destroy_process_group()
"""


def ranks_of(world: int, given: list[dict[str, Any]], options: dict[str, Any], state: dict[str, Any]) -> list[Any]:
    """What each of so many processes with torch.distributed received, by rank."""
    rows = [{name: row[name] for name in ("path", "label")} for row in given]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, *map(json.dumps, (rows, options, state))]
    processes = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        told = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return sorted(told)


def test_ranks_have_disjoint_complete_equally_long_epochs_and_another_number_of_them_takes_up_the_rest(
    rows: list[dict[str, Any]],
) -> None:
    two = ranks_of(2, rows, {**OPTIONS, "batch": 1, "decode": {"threads": 1}}, {})
    assert [(rank, length, len(received)) for rank, length, received, _ in two] == [(0, 5, 5), (1, 5, 5)]
    samples = {sample: rest for _, _, received, _ in two for batch in received for sample, *rest in batch}
    assert sorted(samples) == list(range(10))
    states = [states for *_, states in two]
    assert states[0] == states[1]
    four = ranks_of(4, rows, {**OPTIONS, "batch": 1, "decode": {"threads": 1}}, states[0][0])
    assert [len(received) for _, _, received, _ in four] == [2, 2, 2, 2]
    rest = {sample: rest for _, _, received, _ in four for batch in received for sample, *rest in batch}
    assert rest == {sample: rest for sample, rest in samples.items() if sample >= 2}


def test_ranks_that_share_a_model_get_the_same_batches(rows: list[dict[str, Any]]) -> None:
    """Tensor- and context-parallel peers are given the same data-parallel rank."""
    batches = []
    for _ in range(2):
        with VideoLoader(rows, **OPTIONS, rank=1, world_size=2) as loader:
            batches.append([batch.video for batch in loader])
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_an_error_of_a_thread_comes_out_of_next_with_the_path_of_its_clip(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    bad = tmp_path / "cut.mp4"
    bad.write_bytes(Path(rows[0]["path"]).read_bytes()[:300])
    with VideoLoader([*rows, {**rows[0], "path": str(bad)}], **OPTIONS, on_bad_file="raise") as loader:
        with pytest.raises(GpupipeError, match=r"cut\.mp4") as caught:
            list(loader)
        assert caught.value.path == str(bad)
        assert caught.traceback[-1].path.name != "iterator.py", "the traceback leads to where it happened"
