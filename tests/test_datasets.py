"""Datasets of torch and of Hugging Face as sources: paths, rows and bytes, without decoding anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.config import SourceConfig
from gpupipe.data.source import collect
from gpupipe.data.source.spill import Spill
from gpupipe.errors import SourceError

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu", "shuffle": False}
CONFIG = SourceConfig()


class Items(torch.utils.data.Dataset[Any]):
    """A map-style dataset of given items, which are counted as they are asked for."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        self.asked.append(number)
        return self.items[number]


@pytest.fixture
def paths(clips: dict[str, Path]) -> list[str]:
    return [str(clips[name]) for name in ("h264", "vp9", "mpeg4", "h264_odd")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


# torch


def test_a_torch_dataset_may_give_paths_rows_and_pairs(paths: list[str]) -> None:
    items = Items(Path(paths[0]), {"path": paths[1], "label": 1}, (paths[2], 2))
    entries = collect(items, CONFIG)
    assert [(entry.path, dict(entry.columns)) for entry in entries] == [
        (paths[0], {}), (paths[1], {"label": 1}), (paths[2], {"label": 2})
    ]  # fmt: skip
    assert entries[1].named == f"{paths[1]} (Items[1])"
    assert items.asked == [0, 1, 2], "each item is asked for once, and none past the end"


def test_a_loader_of_a_torch_dataset(paths: list[str]) -> None:
    rows = Items(*({"path": path, "label": k, "vector": np.full(3, k, np.float32)} for k, path in enumerate(paths)))
    subset = torch.utils.data.Subset(rows, [3, 1])
    with VideoLoader(subset, **SMALL, columns="vector") as loader:
        (batch,) = loader
    assert batch.paths == [paths[3], paths[1]]
    assert batch["label"].tolist() == [3, 1]
    assert batch["vector"].tolist() == [[3.0] * 3, [1.0] * 3]


def test_a_dataset_in_a_list_is_an_item_of_a_mixture(paths: list[str]) -> None:
    videos = [Items(paths[0], paths[1]), paths[2]]
    with VideoLoader(videos, **SMALL, source={"weights": [1, 3], "epoch_length": 8}) as loader:
        drawn = [path for batch in loader for path in batch.paths]
    assert sorted(drawn) == sorted([paths[0], paths[1], *[paths[2]] * 6])


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (torch.zeros(3), "Items[0] is a Tensor, which names no video"),
        ((torch.zeros(3), 1), "Items[0] is a tuple, which names no video"),
        ({"file": "a.mp4"}, "Items[0] has no 'path'; its columns are file"),
        ({"path": torch.zeros(1)}, "Items[0] has no 'path', but a Tensor in its place"),
        ("", "Items[0] has no 'path'"),
    ],
)
def test_an_item_that_names_no_video_is_named(item: Any, says: str) -> None:
    with pytest.raises(SourceError) as caught:
        collect(Items(item), CONFIG)
    assert says in str(caught.value)


def test_an_item_that_cannot_be_had_is_named() -> None:
    class Short(Items):
        def __len__(self) -> int:
            return 2

    with pytest.raises(SourceError, match=r"Short\[1\] raised IndexError"):
        collect(Short("a.mp4"), CONFIG)


def test_a_data_frame_gives_its_rows(paths: list[str]) -> None:
    """Its iterator gives the names of its columns, which would be taken for paths."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": paths[:2], "label": [4, 5], "score": [0.5, 1.0]}, index=[7, 3])
    with VideoLoader(frame, **SMALL, columns="score") as loader:
        (batch,) = loader
    assert (batch.paths, batch["label"].tolist(), batch["score"].tolist()) == (paths[:2], [4, 5], [0.5, 1.0])
    with pytest.raises(SourceError, match=r"DataFrame row 0 has no 'path'.*; its columns are file"):
        collect(pandas.DataFrame({"file": ["a.mp4"]}), CONFIG)


# bytes


def test_videos_in_memory_are_files_until_the_loader_is_closed(paths: list[str], temporary: Path) -> None:
    items = Items(*({"path": Path(path).read_bytes(), "label": k} for k, path in enumerate(paths)))
    with VideoLoader(items, **SMALL) as loader, VideoLoader(paths, **SMALL) as plain:
        files = [path for path in temporary.rglob("*") if path.is_file()]
        assert len(files) == 4
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch.video, expected.video)
            assert torch.equal(loader.replay(batch.clips[1]), batch.video[1])
        assert loader.dataset[2]["video"].shape == (3, 2, 16, 16)
        assert loader.dataset.paths == [f"Items[{k}]" for k in range(4)], "names that are the same in each run"
    assert list(temporary.iterdir()) == []


def test_a_dropped_loader_and_one_that_cannot_be_made_leave_no_files(paths: list[str], temporary: Path) -> None:
    data = Path(paths[0]).read_bytes()
    loader = VideoLoader(Items(data, data), **SMALL)
    assert list(temporary.iterdir()) != []
    del loader
    assert list(temporary.iterdir()) == []
    with pytest.raises(SourceError, match=r"Items\[1\] has no 'path'"):
        VideoLoader(Items(data, {}), **SMALL)
    assert list(temporary.iterdir()) == []


def test_a_process_that_ends_leaves_no_files(paths: list[str], tmp_path: Path) -> None:
    """Neither by falling off its end, nor does a forked child of it take them away."""
    code = f"""
import os, sys, torch
from pathlib import Path
from gpupipe import VideoLoader
class Items(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, n): return Path({paths[0]!r}).read_bytes()
loader = VideoLoader(Items(), clip={{"frames": 2}}, transform={{"size": 16}}, batch=2, device="cpu")
if (child := os.fork()) == 0:
    sys.exit(0)
os.waitpid(child, 0)
files = [p for p in Path({str(tmp_path)!r}).rglob("*") if p.is_file()]
print(len(files), next(iter(loader)).video.shape[0])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert run.stdout == "2 2\n", run.stderr
    assert [path for path in tmp_path.iterdir() if path.name.startswith("gpupipe-videos-")] == []


def test_what_is_written_is_bounded(temporary: Path) -> None:
    with pytest.raises(SourceError, match=r"up to Items\[1\] the bytes of videos come to 1600 bytes, source\.spill_gib allows"):
        VideoLoader(Items(b"x" * 800, b"x" * 800), **SMALL, source={"spill_gib": 1e-6})
    assert list(temporary.iterdir()) == []
    with pytest.raises(SourceError, match=r"Items\[0\] holds its video's bytes"):
        collect(Items(b"x"), CONFIG)


def test_no_room_for_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SourceError, match=r"the bytes of row 3 cannot be written to a file: .*none"):
        Spill(100).keep(b"x", "a.mp4", "row 3")


def test_names_of_bytes_lead_nowhere(temporary: Path) -> None:
    """They are the dataset's own words: only an ending is used of them."""
    spill = Spill(100)
    kept = [spill.keep(b"x", name, "row") for name in ("../../up.mp4", "/etc/x.webm", "a.b/../c", "odd.m p", "")]
    assert [Path(path).parent.parent for path in kept] == [temporary] * 5
    assert [Path(path).name for path in kept] == ["0.mp4", "1.webm", "2", "3", "4"]
    spill.close()


# Hugging Face


@pytest.fixture(scope="module")
def hf() -> Any:
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    return pytest.importorskip("datasets")


def test_a_video_column_gives_its_paths(hf: Any, paths: list[str]) -> None:
    columns = {"clip": paths, "label": [0, 1, 2, 3], "caption": list("abcd"), "vector": [[k / 2, 1.0] for k in range(4)]}
    data = hf.Dataset.from_dict(columns).cast_column("clip", hf.Video())
    with VideoLoader(data, **SMALL, columns=["caption", "vector"]) as loader:
        one, two = loader
    assert one.paths + two.paths == paths
    assert two["label"].tolist() == [2, 3]
    assert (one.text["caption"], two["vector"].tolist()) == (["a", "b"], [[1.0, 1.0], [1.5, 1.0]])


def test_rows_come_in_the_order_that_the_dataset_was_given(hf: Any, paths: list[str]) -> None:
    data = hf.Dataset.from_dict({"path": paths, "label": [0, 1, 2, 3], "other": [{}] * 4}).select([3, 0, 2]).shuffle(seed=1)
    entries = collect(data, CONFIG)
    assert [entry.path for entry in entries] == data["path"][:]
    assert [entry.columns for entry in entries] == [{"label": label} for label in data["label"]], "and only what is asked for"
    assert entries[2].named == f"{entries[2].path} (dataset row 2)"


def test_videos_within_the_dataset_are_written_to_files(hf: Any, paths: list[str], temporary: Path) -> None:
    held = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path in paths[:2]]
    data = hf.Dataset.from_dict({"video": [*held, {"path": paths[2], "bytes": None}]}).cast_column("video", hf.Video())
    with VideoLoader(data, **(SMALL | {"batch": 3})) as loader, VideoLoader(paths[:3], **(SMALL | {"batch": 3})) as plain:
        assert loader.dataset.paths == ["dataset row 0: h264.mp4", "dataset row 1: vp9.webm", paths[2]]
        assert torch.equal(next(iter(loader)).video, next(iter(plain)).video)


def test_a_parquet_table_of_such_a_dataset_too(hf: Any, paths: list[str], temporary: Path) -> None:
    held = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path in paths[:2]]
    hf.Dataset.from_dict({"video": held, "label": [4, 5]}).cast_column("video", hf.Video()).to_parquet(temporary / "t.parquet")
    with VideoLoader(temporary / "t.parquet", **SMALL, source={"path_column": "video"}) as loader:
        (batch,) = loader
        assert batch.paths == [f"{temporary}/t.parquet row 0: h264.mp4", f"{temporary}/t.parquet row 1: vp9.webm"]
        assert batch["label"].tolist() == [4, 5]


def test_what_names_no_video_in_it_is_told(hf: Any) -> None:
    data = hf.Dataset.from_dict({"file": ["a.mp4"], "n": [1]})
    cases = [
        (data, "the dataset names no column 'path'; its columns are file, n"),
        (hf.DatasetDict({"train": data, "test": data}), "videos is a DatasetDict of the splits train, test"),
        (data.to_iterable_dataset(), "a streamed dataset has neither length nor order"),
        (hf.Dataset.from_dict({"path": ["a.mp4", None]}), "dataset row 1 has no 'path'"),
    ]
    for videos, says in cases:
        with pytest.raises(SourceError) as caught:
            collect(videos, CONFIG)
        assert says in str(caught.value)
