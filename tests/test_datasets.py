"""Datasets of torch and of Hugging Face as sources: paths, rows and bytes, without decoding anything."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import VideoLoader, VideoReader
from gpupipe.config import LoaderConfig, SourceConfig
from gpupipe.data.bytes import held, open_file
from gpupipe.data.source import collect
from gpupipe.data.source.columns import text_of
from gpupipe.data.source.listing import list_videos
from gpupipe.errors import OpenError, SourceError

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


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have asked for."""
    monkeypatch.setattr(held, "_fetched", OrderedDict())


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


def test_what_a_data_frame_lacks_is_missing_whatever_its_mark() -> None:
    pandas = pytest.importorskip("pandas")
    for mark, kind in ((None, "object"), (float("nan"), "object"), (pandas.NA, "string"), (None, "str")):
        text = pandas.Series(["cat", mark], dtype=kind)
        frame = pandas.DataFrame({"path": ["a.mp4", "b.mp4"], "note": text, "start_frame": pandas.array([1, None], "Int64")})
        listing = list_videos(frame, LoaderConfig(columns="note"))
        assert (listing.kinds, [text_of(entry.columns["note"]) for entry in listing.entries]) == ({"note": "text"}, ["cat", ""])
        with pytest.raises(SourceError, match=r"b\.mp4 \(DataFrame row 1\) has (None|nan)\n"):
            list_videos(frame.rename(columns={"note": "label"}), LoaderConfig())
        with pytest.raises(SourceError, match=r"b\.mp4 \(DataFrame row 1\) has no value in column 'start_frame'"):
            list_videos(frame, LoaderConfig(columns="start_frame"))


# bytes


def test_videos_in_memory_are_asked_for_again(paths: list[str], temporary: Path) -> None:
    items = Items(*({"path": Path(path).read_bytes(), "label": k} for k, path in enumerate(paths)))
    with VideoLoader(items, **SMALL) as loader, VideoLoader(paths, **SMALL) as plain:
        assert items.asked == [0, 1, 2, 3]
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch.video, expected.video)
            assert torch.equal(loader.replay(batch.clips[1]), batch.video[1])
        assert loader.dataset[2]["video"].shape == (3, 2, 16, 16)
        assert sorted(items.asked[4:8]) == [0, 1, 2, 3]
        assert loader.dataset.paths == [f"Items[{k}]" for k in range(4)], "names that are the same in each run"
        with VideoLoader(items, **SMALL) as other:
            other.load_state_dict(loader.state_dict())  # and while another loader has them too
    assert list(temporary.iterdir()) == [], "nothing of it is written"


def test_no_more_of_them_is_kept_than_the_bound(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by what was fetched, nor by files that are kept open."""
    monkeypatch.setattr(held, "_MOST_BYTES", 0)
    items = Items(*(Path(path).read_bytes() for path in paths))
    with VideoLoader(items, **SMALL, cache={"open_files": 64}) as loader:
        assert len(list(loader)) == 2
        assert len(held._fetched) == 1
        assert len(loader._job.files) == 0
    with VideoLoader(paths, **SMALL, cache={"open_files": 64}) as loader:
        assert len(list(loader)) == 2
        assert len(loader._job.files) == 4, "as those of files are"


def test_threads_ask_a_dataset_one_at_a_time(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold one open archive, whose place in the file they would move under each other."""
    monkeypatch.setattr(held, "_MOST_BYTES", 0)

    class Alone(Items):
        inside = most = 0

        def __getitem__(self, number: int) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            data = Path(paths[number % 4]).read_bytes()
            self.inside -= 1
            return data

    items = Alone(*range(40))
    with VideoLoader(items, **SMALL, decode={"threads": 4}) as loader:
        assert sum(len(batch.paths) for batch in loader) == 40
    assert items.most == 1


def test_an_item_that_changes_is_a_bad_file(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clips would depend on who asks when."""
    monkeypatch.setattr(held, "_MOST_BYTES", 0)
    items = Items(*(Path(path).read_bytes() for path in paths[:2]))
    with VideoLoader(items, **(SMALL | {"batch": 1}), on_bad_file="skip") as loader:
        items.items = (b"other", items.items[1])
        assert [batch.paths for batch in loader] == [["Items[1]"]]
        assert "held://Items[0] gives other bytes than before" in loader.bad_files["Items[0]"]


def test_two_datasets_of_one_class_are_told_apart(paths: list[str], fresh_cache: Path) -> None:
    """A filter would take the one for the other."""
    short, long = Items(Path(paths[0]).read_bytes()), Items(Path(paths[3]).read_bytes())
    with VideoReader(paths[0], device="cpu") as one, VideoReader(paths[3], device="cpu") as two:
        sizes = [min(reader.info.display_size) for reader in (one, two)]
    assert sizes[0] != sizes[1]
    with VideoLoader([short, long], **(SMALL | {"batch": 1}), source={"filter": {"min_size": max(sizes)}}) as loader:
        expected = "Items[0]" if sizes[0] > sizes[1] else "Items[0] of item 1"
        assert loader.dataset.paths == [expected]


def test_a_dataset_of_clips_goes_to_worker_processes(paths: list[str]) -> None:
    items = Items(*(Path(path).read_bytes() for path in paths))
    with VideoLoader(items, **SMALL) as loader:
        there = pickle.dumps(loader.dataset)
        code = "import pickle, sys; data = pickle.load(sys.stdin.buffer); print(float(data[1]['video'].float().sum()))"
        run = subprocess.run(
            [sys.executable, "-c", code], input=there, capture_output=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr.decode()
        assert float(run.stdout) == pytest.approx(float(loader.dataset[1]["video"].float().sum()))


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


def test_classes_of_a_dataset_keep_their_names_and_numbers(hf: Any, paths: list[str]) -> None:
    """Sorted by name, or unnamed, predictions would be read as other classes."""
    names = hf.ClassLabel(names=["walk", "jump"])
    data = hf.Dataset.from_dict({"path": paths, "label": [0, 1, 1, 0]}).cast_column("label", names)
    with VideoLoader(data, **SMALL) as loader:
        assert loader.classes == ("walk", "jump")
        assert [batch["label"].tolist() for batch in loader] == [[0, 1], [1, 0]]
    with VideoLoader(data, **SMALL, source={"classes": ["jump", "sit", "walk"]}) as loader:
        assert loader.classes == ("jump", "sit", "walk")
        assert [batch["label"].tolist() for batch in loader] == [[2, 0], [0, 2]]
    named = data.rename_column("label", "action")
    with VideoLoader([named, named], **SMALL, source={"label_column": "action"}) as loader:
        assert loader.classes == ("walk", "jump")
    other = data.cast_column("label", hf.ClassLabel(names=["jump", "walk"]))
    with pytest.raises(SourceError, match="number their classes differently: walk, jump, and jump, walk"):
        VideoLoader([data, other], **SMALL)
    with pytest.raises(SourceError, match=r"'walk', which source\.classes does not name"):
        VideoLoader(data, **SMALL, source={"classes": ["jump"]})


def test_rows_come_in_the_order_that_the_dataset_was_given(hf: Any, paths: list[str]) -> None:
    data = hf.Dataset.from_dict({"path": paths, "label": [0, 1, 2, 3], "other": [{}] * 4}).select([3, 0, 2]).shuffle(seed=1)
    entries = collect(data, CONFIG)
    assert [entry.path for entry in entries] == data["path"][:]
    assert [entry.columns for entry in entries] == [{"label": label} for label in data["label"]], "and only what is asked for"
    assert entries[2].named == f"{entries[2].path} (dataset row 2)"


def test_videos_within_the_dataset_are_read_as_they_are_stored(hf: Any, paths: list[str], temporary: Path) -> None:
    held = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path in paths[:2]]
    data = hf.Dataset.from_dict({"video": [*held, {"path": paths[2], "bytes": None}]}).cast_column("video", hf.Video())
    with VideoLoader(data, **(SMALL | {"batch": 3})) as loader, VideoLoader(paths[:3], **(SMALL | {"batch": 3})) as plain:
        assert loader.dataset.paths == ["dataset row 0: h264.mp4", "dataset row 1: vp9.webm", paths[2]]
        assert torch.equal(next(iter(loader)).video, next(iter(plain)).video)


def test_a_parquet_table_of_such_a_dataset_too(
    hf: Any, paths: list[str], temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held, "_MOST_BYTES", 0)
    monkeypatch.setattr("gpupipe.data.source.arrow._LARGE_BYTES", 1000)
    videos = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path in paths]
    data = hf.Dataset.from_dict({"video": videos, "label": [4, 5, 6, 7]}).cast_column("video", hf.Video())
    data.to_parquet(temporary / "t.parquet", batch_size=3)
    with VideoLoader(temporary / "t.parquet", **SMALL, source={"path_column": "video"}) as loader:
        one, two = loader
        with VideoLoader(paths, **SMALL) as plain:
            assert all(torch.equal(a.video, b.video) for a, b in zip((one, two), plain, strict=True))
        assert one.paths == [f"{temporary}/t.parquet row 0: h264.mp4", f"{temporary}/t.parquet row 1: vp9.webm"]
        assert two["label"].tolist() == [6, 7]
    assert "t.parquet has 3 videos in a row group" in caplog.text
    data.select([0]).to_parquet(temporary / "t.parquet")
    with pytest.raises(OpenError, match=r"t\.parquet row 1: vp9.webm cannot be had: .*t\.parquet has no such row any more"):
        open_file(loader._job.file_of(loader._job.entries[1]))


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
