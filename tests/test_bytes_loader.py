"""What a loader does with files it does with members of shards, URLs and bytes too: each feature once over all of them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import Store, served
from test_bytes_shard import write_shard

from gpupipe import VideoLoader
from gpupipe.cli.bench import _long_enough
from gpupipe.cli.index import IndexConfig, index
from gpupipe.config import LoaderConfig, SourceConfig
from gpupipe.data.bytes import remote, settings
from gpupipe.data.bytes import store as far
from gpupipe.data.source import collect
from gpupipe.errors import SourceError, StarvedError

pytest.importorskip("aiohttp", reason="URLs over HTTP are read through aiohttp: pip install 'fsspec[http]'")
OPTIONS: dict[str, Any] = {"clip": {"frames": 4}, "transform": {"size": 32}, "batch": 2, "device": "cpu", "seed": 3}
NAMES = ("h264", "vp9", "mpeg4", "h264_odd")


@pytest.fixture(autouse=True)
def fresh(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any store."""
    monkeypatch.setattr(settings, "_current", settings.Remote(attempts=2, timeout_seconds=60))
    for room in (far, remote):
        monkeypatch.setattr(room, "_shared", room._Shared())


@pytest.fixture
def web(clips: dict[str, Path], tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / "web"
    folder.mkdir()
    for clip in clips.values():
        shutil.copy(clip, folder)
    with served(folder) as store:
        yield store


@pytest.fixture
def mixed(web: Store, clips: dict[str, Path], tmp_path: Path) -> list[Any]:
    """A file, a member of a shard, a URL and bytes, of unlike sizes."""
    shard = write_shard(tmp_path / "s.tar", {"cat/v.webm": clips["vp9"]})
    return [clips["h264"], f"{shard}::cat/v.webm", f"{web.url}/mpeg4.avi", clips["h264_odd"].read_bytes()]


def run(videos: Any, **options: Any) -> list[torch.Tensor]:
    with VideoLoader(videos, **(OPTIONS | options)) as loader:
        videos_of = [batch.video.clone() for batch in loader]
        assert loader.bad_files == {}
    return videos_of


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_shuffled_epoch_has_the_pixels_of_files(mixed: list[Any], clips: dict[str, Path]) -> None:
    assert same(run(mixed), run([clips[name] for name in NAMES]))


def test_planned_batches_too(mixed: list[Any], clips: dict[str, Path]) -> None:
    options = {"batch": {"size": 2, "last": "partial", "buckets": {"sizes": [[32, 48], [48, 32]]}}}
    assert same(run(mixed, **options), run([clips[name] for name in NAMES], **options))


def test_a_mixture_of_shards_urls_and_bytes(mixed: list[Any], clips: dict[str, Path], tmp_path: Path) -> None:
    """Shards are listed several at a time; each is an item all the same."""
    shards = [write_shard(tmp_path / f"{name}.tar", {f"{name}{clips[name].suffix}": clips[name]}) for name in NAMES[:2]]
    entries = collect([*shards, *mixed[2:], shards[0]], SourceConfig())
    assert [entry.part for entry in entries] == [0, 1, 2, 3, 4]
    weights = {"weights": [1, 2, 3, 2], "epoch_length": 8}
    files = run([clips[name] for name in NAMES], source=weights)
    assert same(run([*shards, *mixed[2:]], source=weights), files)


def test_a_filter_looks_at_all_of_them(mixed: list[Any], clips: dict[str, Path]) -> None:
    with VideoLoader(mixed, **OPTIONS | {"batch": 1}, source={"filter": {"min_frames": 60}}) as loader:
        assert len(loader.dataset.paths) == 4
    with pytest.raises(SourceError, match="leaves none of 4 videos"):
        VideoLoader(mixed, **OPTIONS, source={"filter": {"min_frames": 61}})
    with VideoLoader(mixed, **OPTIONS | {"batch": 1}, source={"filter": {"max_size": 239}}) as loader:
        left = loader.left_out
    with VideoLoader([clips[n] for n in NAMES], **OPTIONS | {"batch": 1}, source={"filter": {"max_size": 239}}) as loader:
        assert list(left.values()) == list(loader.left_out.values())
        assert left


def test_a_run_is_taken_up_within_an_epoch(mixed: list[Any]) -> None:
    whole = run(mixed)
    with VideoLoader(mixed, **OPTIONS) as loader:
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        with VideoLoader(mixed, **OPTIONS) as other:  # the first one still holds the bytes
            other.load_state_dict(state)
            assert same([batch.video.clone() for batch in other], whole[1:])


def test_clips_are_made_by_themselves_and_again(mixed: list[Any], clips: dict[str, Path]) -> None:
    with VideoLoader(mixed, **OPTIONS) as loader, VideoLoader([clips[n] for n in NAMES], **OPTIONS) as plain:
        copy = pickle.loads(pickle.dumps(loader.dataset))
        for k in range(4):
            expected = plain.dataset[k]["video"]
            assert torch.equal(loader.dataset[k]["video"], expected)
            assert torch.equal(copy[k]["video"], expected)
        for batch in loader:
            for k, record in enumerate(batch.clips):
                assert torch.equal(loader.replay(record), batch.video[k])


def test_a_dataset_in_another_process_asks_stores_as_its_loader_does(mixed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with VideoLoader(mixed, **OPTIONS, remote={"attempts": 7}) as loader:
        data = pickle.dumps(loader.dataset)
    monkeypatch.setattr(settings, "_current", None)
    pickle.loads(data)
    assert settings.current().attempts == 7


def test_reads_from_stores_are_counted(web: Store) -> None:
    with VideoLoader([f"{web.url}/h264.mp4", f"{web.url}/vp9.webm"], **OPTIONS) as loader:
        list(loader)
        read = loader.stats()["stages"]["read"]
    assert read["items"] >= 2
    assert read["bytes"] > 0
    assert read["busy_seconds"] > 0


def test_a_store_that_hangs_is_named(web: Store) -> None:
    url = f"{web.url}/h264.mp4"
    web.always = "stall"
    try:
        with (
            pytest.raises(StarvedError, match=r"waiting for bytes of \d visits?, .*in http://.*/h264\.mp4") as caught,
            VideoLoader([url, url], **OPTIONS, timeout_seconds=0.5, decode={"threads": 2}) as loader,
        ):
            next(iter(loader))
        assert caught.value.path == url
    finally:
        web.go_on.set()


def test_tables_and_arrays_in_a_store(web: Store, clips: dict[str, Path]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(2):
        np.save(web.folder / f"{number}.npy", np.full(3, number, np.float32))
    columns = {"path": ["h264.mp4", "vp9.webm"], "label": [1, 2], "vector": ["0.npy", "1.npy"]}
    parquet.write_table(arrow.table(columns), web.folder / "t.parquet")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (web.folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held = {"path": [clips["h264"].read_bytes(), clips["vp9"].read_bytes()]}
    parquet.write_table(arrow.table(held), web.folder / "held.parquet", row_group_size=1)
    expected = run([clips["h264"], clips["vp9"]])
    for table in ("t.parquet", "t.jsonl"):
        source = {"npy_columns": ("vector",), "root": web.url}
        with VideoLoader(f"{web.url}/{table}", **OPTIONS | {"shuffle": False}, source=source) as loader:
            (batch,) = loader
        assert batch["vector"].tolist() == [[0.0] * 3, [1.0] * 3]
        assert batch["label"].tolist() == [1, 2]
    assert same(run(f"{web.url}/held.parquet"), expected)
    (web.folder / "broken.parquet").write_bytes(b"x" * 100)
    for table, says in (("broken", "cannot read the table"), ("none", "none.parquet does not exist")):
        with pytest.raises(SourceError, match=says):
            collect(f"{web.url}/{table}.parquet", SourceConfig())


def test_bench_and_index_take_bytes(clips: dict[str, Path], tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "held.parquet"
    parquet.write_table(arrow.table({"path": [clips["h264"].read_bytes(), clips["vp9"].read_bytes()]}), path)
    report = index(IndexConfig(videos=[str(path)], processes=1))
    assert (report["videos"], report["bad_files"]) == (2, {})
    rows = _long_enough((str(path),), LoaderConfig())
    assert same(run(rows[:2]), run([clips["h264"], clips["vp9"]]))


def test_bytes_have_no_folder_to_be_labelled_by(clips: dict[str, Path]) -> None:
    with pytest.raises(SourceError, match="is bytes and lies in no folder"):
        collect([io.BytesIO(clips["h264"].read_bytes())], SourceConfig(label_from="folder"))
