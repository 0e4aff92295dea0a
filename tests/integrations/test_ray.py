"""Ray on this machine: two workers of Ray Train that go on from its checkpoint, and clips made by a stage of Ray Data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("ray")

import ray
import ray.data
import ray.train
from ray.train.torch import TorchTrainer
from runs import HERE, SETTINGS, VALIDATION, Classifier, Seen, fact, run_sample, weights

from gpupipe.integrations.ray import ClipMaker, report, worker_loader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CLIPS = {name: value for name, value in VALIDATION.items() if name not in ("batch", "shuffle", "seed")}


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small, without what it would tell or keep of its own, and without its trainer's answer to Ctrl-C, which outlives it."""
    interrupted = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        told = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        for name, value in {**told, "PYTHONPATH": os.pathsep.join(paths)}.items():
            patch.setenv(name, value)
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        yield
        ray.shutdown()
    signal.signal(signal.SIGINT, interrupted)


def work(config: dict[str, Any]) -> None:
    """Batches of one clip, up to ``steps`` of them; a run that goes on has the rest. What was seen goes to a file."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "rest.pt"))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = ray.train.torch.prepare_model(model)
    seen: list[Seen] = []
    done = 0 if checkpoint is None else config["first"]
    with worker_loader(config["rows"], **{**SETTINGS, "batch": 1}, repeat=True) as loader:
        for batch in loader:
            seen.append(fact(batch))
            optimizer.zero_grad()
            F.cross_entropy(parallel(batch["video"]), batch["label"]).backward()
            optimizer.step()
            done += 1
            if done == config["first"]:
                rest = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                report({"done": done}, loader, lambda folder, rest=rest: torch.save(rest, folder / "rest.pt"))
            if done == config["steps"]:
                break
    rank = ray.train.get_context().get_world_rank()
    torch.save({"seen": seen, "weights": weights(model)}, f"{config['out']}-{rank}.pt")


def test_workers_share_the_videos_and_a_run_goes_on_from_its_checkpoint(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The second run has the name of the first: Ray goes on from the last checkpoint that it finds there."""
    found = []
    for out in ("whole", "rest"):
        settings = {"rows": rows, "first": 6, "steps": 9, "out": str(tmp_path / out)}
        scaling = ray.train.ScalingConfig(num_workers=2)
        run = ray.train.RunConfig(name="run", storage_path=str(tmp_path / "results"))
        result = TorchTrainer(work, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
        assert result.error is None
        found.append([torch.load(tmp_path / f"{out}-{rank}.pt") for rank in range(2)])
    whole, rest = found
    samples = [sample for one in whole for epoch, batch, _ in one["seen"] if epoch == 0 for sample in batch]
    assert sorted(samples) == list(range(10))
    for all_of_it, taken_up in zip(whole, rest, strict=True):
        assert taken_up["seen"] == all_of_it["seen"][6:]
        assert taken_up["weights"] == all_of_it["weights"]


def test_a_stage_of_ray_data_makes_the_clips_of_its_rows(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    bad = {"path": str(tmp_path / "bad.mp4"), "label": 9}
    items = [*rows[:3], bad, bad, bad, *rows[3:5]]
    made = ray.data.from_items(items, override_num_blocks=1).map_batches(
        ClipMaker, fn_constructor_kwargs={**CLIPS, "after": brighten}, batch_size=2, concurrency=1
    )
    got = sorted(made.take_all(), key=lambda row: (row["path"], row["label"]))
    assert [(row["path"], row["label"]) for row in got] == sorted((row["path"], row["label"]) for row in rows[:5])
    assert all(row["video"].shape == (3, 4, 24, 24) and row["mask"].all() for row in got)
    alone = ClipMaker(**CLIPS, after=brighten)({"path": np.array([row["path"] for row in rows[:2]]), "label": np.array([0, 1])})
    for path, video in zip(alone["path"], alone["video"], strict=True):
        (same,) = [row["video"] for row in got if row["path"] == path]
        assert np.array_equal(same, video), "what a task makes does not depend on where it runs"


def brighten(clip: Any) -> torch.Tensor:
    return clip.video + 0.25


def test_several_clips_of_a_video_and_types_that_numpy_has_not(rows: list[dict[str, Any]]) -> None:
    maker = ClipMaker(clip={"frames": 2, "clips_per_video": 2}, transform={"size": 24}, device="cpu")
    made = maker({"path": np.array([row["path"] for row in rows[:2]])})
    assert made["video"].shape == (4, 3, 2, 24, 24)
    assert made["video"].dtype == np.float32
    assert list(made["path"]) == [rows[0]["path"]] * 2 + [rows[1]["path"]] * 2
    other = ClipMaker(clip={"frames": 2, "clips_per_video": 2}, transform={"size": 24}, device="cpu", seed=1)
    assert not np.array_equal(other({"path": made["path"][::2]})["video"], made["video"])


def test_rows_without_one_good_video_leave_no_rows_of_the_same_form(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    for layout in ("NCTHW", "NTCHW"):
        maker = ClipMaker(clip={"frames": 4}, transform={"size": 24, "layout": layout}, device="cpu")
        none = maker({"path": np.array([str(tmp_path / "bad.mp4")]), "label": np.array([1])})
        some = maker({"path": np.array([rows[0]["path"]]), "label": np.array([1])})
        assert {name: (values.shape[1:], values.dtype) for name, values in none.items() if name != "path"} == {
            name: (values.shape[1:], values.dtype) for name, values in some.items() if name != "path"
        }
        assert len(none["video"]) == len(none["path"]) == 0


def test_the_sample_makes_clips_and_trains(monkeypatch: pytest.MonkeyPatch, small_data: Path, tmp_path: Path) -> None:
    said = run_sample("train_ray.py", small_data, "--epochs", 1, monkeypatch=monkeypatch, folder=tmp_path)
    assert "12 clips, the first one (3, 8, 56, 56)" in said
    assert "'epoch': 0" in said
