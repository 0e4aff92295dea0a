"""WebDataset shards: members read in place to the same pixels, their columns, and what is said of shards that cannot serve."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import VideoLoader, VideoReader
from gpupipe.cli.index import IndexConfig, index
from gpupipe.cli.probe import ProbeConfig, probe
from gpupipe.config import SourceConfig
from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, open_file
from gpupipe.data.bytes import shard as shards
from gpupipe.data.decode import DecodeProcess
from gpupipe.data.decode.cpu import decode
from gpupipe.data.plan import make_plan
from gpupipe.data.scan.worker import ScanProcess
from gpupipe.data.source import class_names, collect, column_kinds
from gpupipe.errors import OpenError, SourceError

CONFIG = SourceConfig()


def write_shard(path: Path, members: dict[str, Path | str | bytes]) -> Path:
    """A tar with files, and with text or bytes, under the names given."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            data = data.encode() if isinstance(data, str) else data
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            tar.addfile(facts, io.BytesIO(data))
    return path


@pytest.fixture
def shard(clips: dict[str, Path], tmp_path: Path) -> Path:
    """Three videos in two folders, with columns beside them."""
    members: dict[str, Path | str | bytes] = {}
    for number, (key, clip) in enumerate({"cat/a.0": "h264", "cat/b": "vp9", "dog/c": "mpeg4"}.items()):
        members[f"{key}{clips[clip].suffix}"] = clips[clip]
        members[f"{key.split('.')[0]}.json"] = json.dumps({"score": number / 2, "tags": ["x", None]})
        members[f"{key.split('.')[0]}.cls"] = f"{number}\n"
        members[f"{key.split('.')[0]}.txt"] = f"clip {number} – ä\n"
    return write_shard(tmp_path / "a,b: c[1].tar", {**members, "README.md": "no video"})


def put_into(clips: dict[str, Path], folder: Path, names: list[str]) -> list[Path]:
    return [write_shard(folder / f"{name}.tar", {f"{name}.mp4": clips["h264"], f"{name}.cls": name}) for name in names]


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc", "vp9", "mpeg4"])
def test_a_member_has_the_pixels_of_the_file_that_it_was(name: str, clips: dict[str, Path], tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", {"head": b"x" * 700, f"v{clips[name].suffix}": clips[name], "tail": b"y" * 9})
    with VideoReader(clips[name], device="cpu") as plain, VideoReader(f"{path}::v{clips[name].suffix}", device="cpu") as ours:
        assert ours.info.frames == plain.info.frames
        assert ours._index.mapped == plain._index.mapped
        assert torch.equal(ours.frames([0, 31, 59]), plain.frames([0, 31, 59]))


def test_a_member_that_needs_its_demuxer_is_read_in_place(tricky: Path, tmp_path: Path) -> None:
    """MPEG-TS is read through FFmpeg for each clip, which must stay within the member."""
    videos = sorted(tricky.glob("*.ts"))
    if not videos:
        pytest.skip("no MPEG-TS among the sample media")
    path = write_shard(tmp_path / "s.tar", {"0.mp4": b"", "1.ts": videos[0], "2.ts": videos[0]})
    with VideoReader(videos[0], device="cpu") as plain, VideoReader(f"{path}::1.ts", device="cpu") as ours:
        assert not plain._index.mapped
        assert len(ours) == len(plain)
        assert torch.equal(ours.frames([0, len(plain) - 1]), plain.frames([0, len(plain) - 1]))


def test_reads_end_where_the_member_does(shard: Path) -> None:
    path = f"{shard}::cat/b.webm"
    size = Identity.of(path).size_bytes
    with open_file(path) as file:
        memory = bytearray(100)
        assert file.read_into(size - 7, memoryview(memory)) == 7
        assert file.read(size - 7, 100) == bytes(memory[:7])
        assert file.read(size + 5, 10) == b""


def test_files_beside_a_video_become_columns(shard: Path) -> None:
    entries = collect(str(shard), CONFIG)
    assert [entry.path.rpartition("::")[2] for entry in entries] == ["cat/a.0.mp4", "cat/b.webm", "dog/c.avi"]
    assert entries[1].columns == {"score": 0.5, "tags": ["x", None], "label": 1, "txt": "clip 1 – ä"}
    assert column_kinds(entries, ["score", "txt"]) == {"label": "int", "score": "float", "txt": "text"}


def array_of(values: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, values)
    return data.getvalue()


def test_arrays_beside_a_video_are_columns_of_arrays(clips: dict[str, Path], tmp_path: Path) -> None:
    members: dict[str, Path | str | bytes] = {}
    for number in range(2):
        members[f"{number}.mp4"] = clips["h264"]
        members[f"{number}.npy"] = array_of(np.full((2, 3), number, np.float32))
        members[f"{number}.pose.NPY"] = array_of(np.array([number]))
        members[f"{number}.json"] = json.dumps({"score": number})
    path = write_shard(tmp_path / "s.tar", members)
    options: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu", "shuffle": False}
    for _ in range(2):  # as it is listed, and as the list was kept
        with VideoLoader(path, **options, columns=["npy", "pose", "score"]) as loader:
            (batch,) = loader
        assert batch["npy"].dtype == torch.float32
        assert batch["npy"][:, 1, 2].tolist() == [0, 1]
        assert batch["pose"].tolist() == [[0], [1]]
        shards._shards.clear()
    with VideoLoader(path, **options) as loader:
        assert "npy" not in next(iter(loader)), "only what is asked for"


def test_arrays_in_shards_that_cannot_be_used_are_named(clips: dict[str, Path], tmp_path: Path) -> None:
    pickled = io.BytesIO()
    np.save(pickled, np.array([object()]), allow_pickle=True)
    options: dict[str, Any] = {
        "clip": {"frames": 2},
        "transform": {"size": 16},
        "batch": 1,
        "device": "cpu",
        "columns": ["npy"],
    }
    one = write_shard(tmp_path / "one.tar", {"a.mp4": clips["h264"], "a.npy": pickled.getvalue()})
    with pytest.raises(SourceError, match=r"one\.tar::a\.npy: it holds object, not real numbers"):
        VideoLoader(one, **options)
    lacking = write_shard(tmp_path / "two.tar", {"a.mp4": clips["h264"], "a.npy": array_of(np.ones(2)), "b.mp4": clips["vp9"]})
    with pytest.raises(SourceError, match=r"two\.tar::b\.mp4 names no file in column 'npy'"):
        VideoLoader(lacking, **options)
    twice = write_shard(tmp_path / "three.tar", {"a.mp4": clips["h264"], "a.npy": array_of(np.ones(2)), "a.json": '{"npy": 1}'})
    with pytest.raises(SourceError, match=r"a\.npy gives 'npy', which another file"):
        VideoLoader(twice, **options)


def test_a_loader_takes_patterns_lists_and_folders_of_shards(clips: dict[str, Path], tmp_path: Path) -> None:
    put_into(clips, tmp_path, [f"{number:03}" for number in range(3)])
    every = [f"{tmp_path}/{number:03}.tar::{number:03}.mp4" for number in range(3)]
    named: list[Any] = [
        f"{tmp_path}/{{000..002}}.tar",
        f"{tmp_path}/*.tar",
        tmp_path,
        [tmp_path / f"00{n}.tar" for n in (0, 1, 2)],
    ]
    for videos in named:
        assert [entry.path for entry in collect(videos, CONFIG)] == every
    with VideoLoader(named[0], clip={"frames": 4}, transform={"size": 32}, batch=3, device="cpu", shuffle=False) as loader:
        (batch,) = loader
        assert batch["label"].tolist() == [0, 1, 2]
        assert [clip.path for clip in batch.clips] == every
    assert not loader.bad_files


def test_labels_may_come_from_the_folders_in_a_shard(shard: Path, clips: dict[str, Path], tmp_path: Path) -> None:
    assert class_names(collect(str(shard), CONFIG)) == ("cat", "dog")
    flat = write_shard(tmp_path / "flat.tar", {"a.mp4": clips["h264"]})
    with pytest.raises(SourceError, match="no folder that has a name"):
        class_names(collect(str(flat), CONFIG))


def test_processes_read_members_too(shard: Path, fresh_cache: Path) -> None:
    path = f"{shard}::cat/a.0.mp4"
    scanner = ScanProcess()
    try:
        video = indices.load(path, scanner.make)
    finally:
        scanner.close()
    plan = make_plan(video, [3, 40])
    process = DecodeProcess()
    try:
        ours, expected = process.decode(video, plan), decode(video, plan)
        assert all(torch.equal(a, b) for a, b in zip(ours.parts, expected.parts, strict=True))
    finally:
        process.close()


def test_commands_take_shards_and_members(shard: Path, fresh_cache: Path) -> None:
    assert probe(ProbeConfig(file=f"{shard}::cat/b.webm", device="cpu"))["codec"] == "vp9"
    with pytest.raises(OpenError, match=r"is a shard(.|\n)*SHARD\.tar::MEMBER"):
        probe(ProbeConfig(file=str(shard)))
    report = index(IndexConfig(videos=(str(shard),), processes=1))
    assert (report["videos"], report["bad_files"]) == (3, {})


def test_a_list_of_members_is_kept_until_the_shard_changes(
    shard: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, clips: dict[str, Path]
) -> None:
    scans: list[str] = []
    original = shards._scan
    monkeypatch.setattr(shards, "_scan", lambda whole: scans.append(whole.path) or original(whole))
    first = shards.load(str(shard))
    shards._shards.clear()  # as in another process
    assert shards.load(str(shard)) == first
    assert len(scans) == 1
    (kept,) = (fresh_cache / "shards").rglob("*.json")
    kept.write_text('{"version": 1, "identity": 7}')
    shards._shards.clear()
    assert shards.load(str(shard)) == first, "a damaged list is made again"
    write_shard(shard, {"new.mp4": clips["h264"]})
    assert list(shards.load(str(shard)).members) == ["new.mp4"]
    assert len(scans) == 3
    with pytest.raises(OpenError, match=r"has no member 'cat/b\.webm'"):
        Identity.of(f"{shard}::cat/b.webm")


def test_a_shard_that_changes_under_a_reader_is_noticed(shard: Path, clips: dict[str, Path]) -> None:
    with VideoReader(f"{shard}::cat/a.0.mp4", device="cpu") as reader:
        reader.frames([0])
        write_shard(shard, {"x": b"1234", "cat/a.0.mp4": clips["h264"]})
        with pytest.raises(OpenError, match=r"a,b: c\[1\]\.tar::cat/a\.0\.mp4 was replaced or changed"):
            reader.frames([0])


def test_names_that_lead_out_lead_nowhere(clips: dict[str, Path], tmp_path: Path) -> None:
    """A member is found in the shard's list, by its whole name: no path is made of it."""
    outside = tmp_path / "outside.mp4"
    shutil.copy(clips["vp9"], outside)
    (tmp_path / "in").mkdir()
    path = write_shard(tmp_path / "in/s.tar", {"../outside.mp4": clips["h264"], f"{outside}": clips["h264"]})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("link.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "../outside.mp4"
        tar.addfile(link)
    entries = collect(str(path), CONFIG)
    assert [entry.path.removeprefix(f"{path}::") for entry in entries] == ["../outside.mp4", str(outside)]
    for entry in entries:
        with VideoReader(entry.path, device="cpu") as reader:
            assert reader.info.codec == "h264", "the member, not the file that its name would lead to"
    with pytest.raises(OpenError, match="has no member"):
        VideoReader(f"{path}::link.mp4", device="cpu")


def test_a_shard_that_is_cut_gives_what_comes_before(
    shard: Path, tmp_path: Path, clips: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    whole = shard.read_bytes()
    begin, size = shards.place(f"{shard}::dog/c.avi")
    for number, cut in enumerate((begin + size // 2, begin - 100)):
        path = tmp_path / f"cut{number}.tar"
        path.write_bytes(whole[:cut])
        caplog.clear()
        assert [entry.path.rpartition("::")[2] for entry in collect(str(path), CONFIG)] == ["cat/a.0.mp4", "cat/b.webm"]
        assert f"{path} is cut or damaged" in caplog.text
        assert "the 2 videos before that are used" in caplog.text
    path = tmp_path / "header.tar"
    path.write_bytes(whole[: begin - 512] + b"\xff" * 512 + whole[begin:])
    caplog.clear()
    assert len(collect(str(path), CONFIG)) == 2
    assert f"no header at byte {begin - 512}" in caplog.text, "tarfile alone would end there without a word"
    path.write_bytes(whole[:300])
    with pytest.raises(SourceError, match=r"header\.tar is no tar file"):
        collect(str(path), CONFIG)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("s.tar.gz", b"", r"s\.tar\.gz is compressed"),
        ("s.tar", gzip.compress(b"tar", mtime=0), r"s\.tar is compressed \(gzip\)"),
        ("s.tar", b"", r"s\.tar is no tar file"),
        ("s.tar", b"no tar at all" * 100, r"s\.tar is no tar file"),
        ("s.tar", {"a.txt": "alone"}, r"no videos in the shard .*s\.tar \(looked for \.mp4"),
        ("s.tar", {"a.mp4": b"v", "a.json": "{"}, r"s\.tar::a\.json cannot be read"),
        ("s.tar", {"a.mp4": b"v", "a.txt": b"\xff"}, r"s\.tar::a\.txt cannot be read"),
        ("s.tar", {"a.mp4": b"v", "a.json": '{"label": 1}', "a.cls": "2"}, r"s\.tar::a\.cls gives 'label', which another"),
        ("s.tar", None, r"s\.tar"),
    ],
)
def test_what_is_no_shard_is_named(name: str, content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, dict):
        write_shard(path, content)
    elif content is not None:
        path.write_bytes(content)
    for videos in (str(path), [str(path)], [str(path), str(path)]):
        with pytest.raises(SourceError, match=says):
            collect(videos, CONFIG)


def test_a_bad_member_is_a_bad_file_by_its_full_name(clips: dict[str, Path], tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", {"good.mp4": clips["h264"], "bad.mp4": b"no video" * 100})
    with VideoLoader(path, clip={"frames": 2}, transform={"size": 16}, batch=2, device="cpu") as loader:
        assert len(list(loader)) == 1
        assert list(loader.bad_files) == [f"{path}::bad.mp4"]
        assert f"{path}::bad.mp4" in loader.bad_files[f"{path}::bad.mp4"]


def test_braces_stand_for_names_in_order(tmp_path: Path) -> None:
    for name in ("a1.mp4", "a2.mp4", "b1.mp4", "b2.mp4"):
        (tmp_path / name).touch()
    found = collect(f"{tmp_path}/{{b,a}}{{2..1}}.mp4", CONFIG)
    assert [os.path.basename(entry.path) for entry in found] == ["b2.mp4", "b1.mp4", "a2.mp4", "a1.mp4"]
    with pytest.raises(SourceError, match="more than 1000000 files"):
        collect(f"{tmp_path}/{{0..99999999}}.tar", CONFIG)
    (tmp_path / "{1..2}.mp4").touch()
    assert len(collect(f"{tmp_path}/{{1..2}}.mp4", CONFIG)) == 1, "a file of that very name is that file"
