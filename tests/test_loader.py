"""VideoLoader: what a batch holds, that runs repeat, that bad files do no harm, and that every way out leaves no thread."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import spoilt

from gpupipe import Batch, TransformParams, VideoLoader, VideoReader
from gpupipe.config import LoaderConfig, TransformConfig
from gpupipe.data import index as indices
from gpupipe.data import pipeline, prepare, tasks
from gpupipe.data.decode import cpu, fleet
from gpupipe.data.group import Fixed
from gpupipe.data.plan import make_plan
from gpupipe.data.transform import ClipTransform, affine
from gpupipe.device.inventory import DecoderCaps
from gpupipe.errors import ClosedError, ConfigError, DecodeError, DeviceError, GpupipeError, OpenError, SampleError, SourceError
from gpupipe.telemetry import Telemetry
from gpupipe.types import ClipRecord, FramePick

SMALL: dict[str, Any] = {
    "clip": {"frames": 4, "stride": 2},
    "transform": {"size": (24, 32), "dtype": "float32"},
    "device": "cpu",
    "batch": 2,
}


@pytest.fixture(scope="module")
def folder(clips: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight videos of three codecs in two folders."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(8):
        name = ("h264", "vp9_odd", "mpeg4", "h264_odd")[number % 4]
        target = root / ("even" if number % 2 == 0 else "odd") / f"{number}{clips[name].suffix}"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(clips[name], target)
    return root


@pytest.fixture
def with_bad(folder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Rows of the eight videos, two of which cannot be used."""
    rows = [{"path": str(path), "label": k} for k, path in enumerate(sorted(folder.rglob("*.*")))]
    (tmp_path / "empty.mp4").touch()
    rows[2] = {"path": str(tmp_path / "empty.mp4"), "label": 2}
    rows[5] = {"path": str(tmp_path / "missing.mp4"), "label": 5}
    return rows


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]


def soon_no_threads(seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and a.clips == b.clips
        for a, b in zip(one, other, strict=True)
    )


# What a batch holds


def test_a_batch_of_a_folder(folder: Path) -> None:
    with VideoLoader(folder, **SMALL, source={"label_from": "folder"}) as loader:
        batches = list(loader)
    assert len(batches) == len(loader) == 4
    assert loader.batch_size == 2
    assert sorted(path for batch in batches for path in batch.paths) == loader.dataset.paths
    for number, batch in enumerate(batches):
        assert list(batch) == ["video", "pts_seconds", "mask", "label"]
        assert batch["video"] is batch.video
        assert (batch.video.shape, batch.video.dtype) == ((2, 3, 4, 24, 32), torch.float32)
        assert (batch["pts_seconds"].shape, batch["pts_seconds"].dtype) == ((2, 4), torch.float64)
        assert (batch["mask"].shape, batch["mask"].dtype) == ((2, 4), torch.bool)
        assert (batch["label"].shape, batch["label"].dtype) == ((2,), torch.int64)
        assert batch["mask"].all()
        assert (batch.epoch, batch.index) == (0, number)
        assert batch.substituted == ()
        assert {tensor.device.type for tensor in batch.values()} == {"cpu"}
        for row, record in enumerate(batch.clips):
            assert batch["label"][row] == int(Path(record.path).parent.name == "odd")
            index = indices.load(record.path)
            assert batch["pts_seconds"][row].tolist() == [index.seconds[i] for i in record.pick.indices]
            assert np.diff(record.pick.indices).tolist() == [2, 2, 2]
            assert record.decoder == "cpu"


@pytest.mark.parametrize(
    ("transform", "shape", "dtype"),
    [
        ({"layout": "NTCHW", "dtype": "uint8"}, (2, 4, 3, 16, 16), torch.uint8),
        ({"dtype": "float16", "crop": "center"}, (2, 3, 4, 16, 16), torch.float16),
        ({}, (2, 3, 4, 16, 16), torch.bfloat16),
    ],
)
def test_layouts_and_dtypes(folder: Path, transform: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with VideoLoader(folder, clip={"frames": 4}, transform={"size": 16, **transform}, batch=2, device="cpu") as loader:
        video = next(iter(loader)).video
    assert (video.shape, video.dtype) == (shape, dtype)
    assert video.is_contiguous()


def remade(record: ClipRecord, transform: ClipTransform) -> torch.Tensor:
    """The clip of a record, decoded and transformed outside the loader."""
    index = indices.load(record.path)
    plan = make_plan(index, record.pick.indices)
    out = torch.empty(transform.clip_shape, dtype=transform.dtype)
    transform.apply(cpu.decode(index, plan), index.info, record.params, plan.frame_map, out)
    return out


def test_a_record_is_enough_to_make_its_clip_again(folder: Path) -> None:
    config = TransformConfig(size=(24, 32), dtype="float32")
    with VideoLoader(folder, **{**SMALL, "transform": config}) as loader:
        for batch in loader:
            for row, record in enumerate(batch.clips):
                assert torch.equal(batch.video[row], remade(record, ClipTransform(config, 4)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform": {"size": 24, "layout": "NTCHW", "dtype": "uint8", "color_jitter": {"contrast": 0.4}}},
        {"transform": {"size": 24, "draws": "frame", "affine": {"degrees": 20}, "erasing": {"p": 1.0, "value": "random"}}},
        {"transform": {"size": 24, "crop": "three", "memory_format": "channels_last_3d"}, "batch": 3, "clips_per_video": 3},
        {"clip": {"frames": 4, "fps": 12.5, "blend": True, "reverse": 0.5}, "decode": {"cpu_workers": 1}},
        {
            "before": lambda clip: clip.video[..., ::2, ::3],
            "after": lambda clip: clip.video.mul_(float(clip.rng.uniform(1, 2))),
        },
    ],
)
def test_a_record_is_replayed_bit_for_bit(options: dict[str, Any], folder: Path) -> None:
    settings = SMALL | options
    if clips := settings.pop("clips_per_video", 0):
        settings["clip"] = {**settings["clip"], "clips_per_video": clips}
    with VideoLoader(folder, **settings, seed=5) as loader:
        for number, batch in enumerate(loader):
            for row, record in enumerate(batch.clips):
                found = loader.replay(record)
                assert torch.equal(found, batch.video[row])
                assert (found.dtype, found.stride()) == (batch.video.dtype, batch.video[row].stride())
            if number == 2:  # the epoch is under way
                break
    other = VideoLoader(str(folder / "even/0.mp4"), **settings | {"batch": settings["batch"] if clips else 1})
    assert torch.equal(other.replay(record), batch.video[-1]), "another loader of that kind does as well"


def test_a_record_with_other_parameters_gives_the_clip_with_these(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        record = next(iter(loader)).clips[0]
        flipped = dataclasses.replace(record, params=dataclasses.replace(record.params, hflip=not record.params.hflip))
        assert torch.allclose(loader.replay(flipped), loader.replay(record).flip(-1), atol=1e-5)


def test_what_cannot_be_replayed_says_why(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        batch = next(iter(loader))
        record = batch.clips[0]
        with pytest.raises(ConfigError, match=r"not from a Batch\n.*batch\.clips\[k\]"):
            loader.replay(batch)  # type: ignore[arg-type]
        far = dataclasses.replace(record, pick=FramePick((0, 1, 2, 99), (True,) * 4))
        with pytest.raises(SampleError, match="frames 0 to 99"):
            loader.replay(far)
        short = dataclasses.replace(record, pick=FramePick((0, 1), (True,) * 2))
        with pytest.raises(ConfigError, match="2 frames, this loader's have 4"):
            loader.replay(short)
        large = dataclasses.replace(record, params=TransformParams((0.0, 0.0, 999.0, 999.0), (0, 0, 999, 999)))
        with pytest.raises(GpupipeError, match="does not fit"):
            loader.replay(large)
        with pytest.raises(OpenError, match="nowhere"):
            loader.replay(dataclasses.replace(record, path="nowhere.mp4"))


def test_uncropped_clips_are_the_frames_of_the_reader(folder: Path) -> None:
    transform = {"size": (240, 320), "crop": "none", "hflip": 0, "dtype": "uint8", "layout": "NTCHW"}
    with VideoLoader(str(folder / "even/0.mp4"), clip={"frames": 3}, transform=transform, batch=1, device="cpu") as loader:
        batch = next(iter(loader))
    frames = VideoReader(batch.paths[0], device="cpu").frames(batch.clips[0].pick.indices)
    assert torch.equal(batch.video[0], frames)


def test_columns_travel_with_their_clip(folder: Path, tmp_path: Path) -> None:
    paths = sorted(folder.rglob("*.*"))
    lines = [json.dumps({"path": str(p), "label": k, "score": k / 8, "name": p.name, "take": k}) for k, p in enumerate(paths)]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    with VideoLoader(tmp_path / "list.jsonl", **SMALL, columns=("score", "name")) as loader:
        batches = list(loader)
    for batch in batches:
        assert set(batch) == {"video", "pts_seconds", "mask", "label", "score"}
        assert (batch["score"].dtype, batch["label"].dtype) == (torch.float64, torch.int64)
        assert batch["score"].tolist() == [label / 8 for label in batch["label"].tolist()]
        assert batch.text == {"name": [Path(path).name for path in batch.paths]}
        assert [paths[label] for label in batch["label"].tolist()] == [Path(path) for path in batch.paths]


def test_labels_may_be_names(folder: Path) -> None:
    rows = [{"path": str(path), "label": path.parent.name} for path in sorted(folder.rglob("*.*"))]
    with VideoLoader(rows, **SMALL) as loader:
        assert loader.classes == ("even", "odd")
        for batch in loader:
            assert [loader.classes[number] for number in batch["label"]] == [Path(path).parent.name for path in batch.paths]
    with VideoLoader(rows[:2], **SMALL, source={"classes": ("odd", "even")}) as loader:
        assert next(iter(loader))["label"].tolist() == [1, 1]


def test_several_functions_are_told_to_be_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="write one function that calls them"):
        VideoLoader(folder, **SMALL, after=[torch.abs, torch.neg])  # type: ignore[arg-type]


def test_a_model_takes_a_batch_by_name(folder: Path) -> None:
    def model(video: torch.Tensor, mask: torch.Tensor, pts_seconds: torch.Tensor) -> torch.Tensor:
        return video.mean() + mask.sum() + pts_seconds.sum()

    with VideoLoader(folder, **SMALL) as loader:
        for batch in loader:
            assert torch.isfinite(model(**batch))
    assert {k: v.shape[0] for k, v in batch.items()} == {"video": 2, "pts_seconds": 2, "mask": 2}


def test_short_videos_are_padded_with_a_mask(tricky: Path) -> None:
    with VideoLoader(tricky / "t15_1frame.mp4", **{**SMALL, "batch": 1}) as loader:
        batch = next(iter(loader))
    assert batch["mask"].tolist() == [[True, False, False, False]]
    assert torch.equal(batch.video[0, :, :1].expand_as(batch.video[0]), batch.video[0])


def test_a_row_fixes_where_its_clip_starts(folder: Path) -> None:
    rows = [{"path": str(folder / "even/0.mp4"), "start_frame": start} for start in (5, 50, None, 17)]
    with VideoLoader(rows, **SMALL, shuffle=False) as loader:
        picks = [record.pick.indices for batch in loader for record in batch.clips]
    assert picks[0] == (5, 7, 9, 11)
    assert picks[1] == (50, 52, 54, 56)
    assert picks[3] == (17, 19, 21, 23)


# Repeatability


@pytest.mark.parametrize(("count", "depth"), [(1, 1), (4, 1), (4, 3), (3, 64)])
def test_threads_and_depth_change_no_bit(folder: Path, count: int, depth: int) -> None:
    with VideoLoader(folder, **SMALL, seed=5, decode={"threads": 2}) as reference:
        expected = list(reference)
    with VideoLoader(folder, **SMALL, seed=5, decode={"threads": count}, jitter={"depth": depth}) as loader:
        assert equal(list(loader), expected)


def test_epochs_differ_and_can_be_asked_for(folder: Path) -> None:
    with VideoLoader(folder, **SMALL, seed=5) as loader:
        first, second = list(loader), list(loader)
        assert not equal(first, second)
        assert [batch.epoch for batch in second] == [1] * 4
        loader.set_epoch(0)
        assert equal(list(loader), first)
        assert equal(list(loader), second), "epochs count on from there"
    with VideoLoader(folder, **SMALL, seed=6) as other:
        assert not equal(list(other), first)


def test_ranks_are_found_in_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world_size, given, expected in (
        ("1", "2", {}, (1, 2)),
        ("1", "2", {"rank": 0, "world_size": 4}, (0, 4)),
        ("1", "2", {"world_size": 1}, (0, 1)),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with VideoLoader(folder, **{**SMALL, "batch": 1}, **given) as loader:
            assert (loader.config.rank, loader.config.world_size) == expected
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 and WORLD_SIZE=2"):
        VideoLoader(folder, **SMALL)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set and RANK is not"):
        VideoLoader(folder, **SMALL)
    VideoLoader(folder, **SMALL, world_size=1).close()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "3")
    with VideoLoader(folder, **{**SMALL, "batch": 1}, rank=1, world_size=2) as loader:
        assert (loader.config.rank, loader.config.world_size) == (1, 2)


def test_a_number_of_ranks_alone_does_not_say_which_one_this_is(folder: Path) -> None:
    """Every process would take the samples of rank 0, and nobody the others."""
    with pytest.raises(ConfigError, match=r"world_size=4 of 1 rank\(s\) that there are needs rank= too"):
        VideoLoader(folder, **SMALL, world_size=4)


def test_ranks_split_the_batches_of_one(folder: Path) -> None:
    with VideoLoader(folder, **{**SMALL, "batch": 1}, seed=5) as alone:
        whole = [batch.clips[0] for batch in alone]
    for rank in range(2):
        with VideoLoader(folder, **{**SMALL, "batch": 1}, seed=5, rank=rank, world_size=2) as loader:
            assert [batch.clips[0] for batch in loader] == whole[rank::2]


def test_batches_keep_their_bytes_while_later_ones_are_made(folder: Path) -> None:
    with VideoLoader(folder, **SMALL, jitter={"depth": 1}) as loader:
        kept = []
        copies = []
        for batch in loader:
            kept.append(batch.video)
            copies.append(batch.video.clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


# Lengths


def test_the_last_batch_is_dropped_or_smaller(folder: Path) -> None:
    with VideoLoader(folder, **{**SMALL, "batch": 3}) as loader:
        assert [len(batch.clips) for batch in loader] == [3] * len(loader) == [3, 3]
    with VideoLoader(folder, **{**SMALL, "batch": {"size": 3, "last": "partial"}}) as loader:
        assert [batch.video.shape[0] for batch in loader] == [3, 3, 2]
        assert len(loader) == 3


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"batch": 9}, ConfigError, "8 videos over 1 rank(s) make no full batch of 9"),
        ({"rank": 0, "world_size": 5, "batch": 2}, ConfigError, "8 videos over 5 rank(s)"),
        ({"bacth": 2}, ConfigError, "did you mean 'batch'"),
        ({"clip": {"frame": 2}}, ConfigError, "did you mean 'frames'"),
        ({"transform": {"size": 0}}, ConfigError, "TransformConfig.size"),
        ({"columns": ("label",)}, SourceError, "has no value in column 'label'"),
        ({"device": "cuda:7"}, DeviceError, "cuda:7"),
        ({"device": "cpu", "decode": {"decoder": "nvdec"}}, DeviceError, "nvdec"),
        ({"device": "cpu", "decode": {"decoder": "dali"}}, DeviceError, "decoder='dali' needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named_at_once(folder: Path, fields: dict[str, Any], error: type[GpupipeError], says: str) -> None:
    with pytest.raises(error) as caught:
        VideoLoader(folder, **{**SMALL, **fields})
    assert says in str(caught.value)
    assert not threads()


@pytest.mark.parametrize("listed", [["nothere/"], ["nothere"], ["nothere.mp4", "other.mp4"]])
def test_videos_that_do_not_exist_are_told_where_they_make_no_batch(listed: list[str]) -> None:
    """A list's files may come later; a folder's misspelt name was said to be one video, too few for a batch."""
    with pytest.raises(SourceError, match=f"^.*{listed[0]} does not exist"):
        VideoLoader(listed, **{**SMALL, "batch": 8})
    assert not threads()


def test_a_bad_start_frame_is_named_at_once(folder: Path) -> None:
    with pytest.raises(SourceError, match="start_frame='soon'"):
        VideoLoader([{"path": str(folder / "even/0.mp4"), "start_frame": "soon"}], **{**SMALL, "batch": 1})


def test_a_config_may_be_given_whole_and_overridden(folder: Path) -> None:
    with VideoLoader(folder, **SMALL, seed=9) as loader:
        config = loader.config
    with VideoLoader(folder, config=config, batch=4, shuffle=False) as other:
        assert other.config == config.model_copy(update={"batch": other.config.batch, "shuffle": False})
        assert (other.batch_size, other.config.seed, other.device.type) == (4, 9, "cpu")


# Ways in and out


def test_a_newer_iterator_ends_the_one_before(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(ClosedError, match="a newer iter"):
            next(old)
        assert len(list(new)) == 4
        with pytest.raises(ClosedError, match="a newer iter"):
            next(old)


def test_an_exhausted_iterator_stays_exhausted(folder: Path) -> None:
    loader = VideoLoader(folder, **SMALL)
    iterator = iter(loader)
    assert len(list(iterator)) == 4
    assert not threads(), "the end of an epoch ends its threads"
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    loader.close()
    with pytest.raises(StopIteration):
        next(iterator)


def test_break_ends_the_threads_and_the_next_epoch_is_whole(folder: Path) -> None:
    loader = VideoLoader(folder, **SMALL, decode={"threads": 3})
    for _ in loader:
        break
    assert soon_no_threads()
    assert len(list(loader)) == 4
    for _ in range(8):
        for _ in loader:
            break
    assert [batch.epoch for batch in loader] == [10] * 4
    loader.close()


def test_an_exception_in_the_loop_ends_the_threads(folder: Path) -> None:
    loader = VideoLoader(folder, **SMALL)

    def loop() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    gc.collect()  # the traceback held the iterator
    assert soon_no_threads()


def test_a_dropped_loader_is_collected(folder: Path) -> None:
    loader = VideoLoader(folder, **SMALL)
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    del loader
    assert len(list(iterator)) == 3, "the iterator goes on without it"
    gc.collect()
    assert gone() is None
    assert soon_no_threads()


def test_close_ends_a_waiting_iterator_and_may_be_repeated(folder: Path) -> None:
    loader = VideoLoader(folder, **SMALL)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert not threads()
    loader.close()
    with pytest.raises(ClosedError, match="its VideoLoader was closed"):
        next(iterator)
    with pytest.raises(ClosedError, match="this VideoLoader is closed"):
        iter(loader)


def test_closing_an_iterator_is_enough(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        iterator = iter(loader)
        iterator.close()
        assert not threads()
        with pytest.raises(ClosedError, match="it was closed"):
            next(iterator)


def test_without_order_a_slow_video_holds_up_no_other_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VideoLoader(folder, **{**SMALL, "batch": 1}, shuffle=False) as loader:
        ordered = {batch.paths[0]: batch.video for batch in loader}
    slow = min(ordered)
    original, others_taken = cpu.decode, threading.Event()

    def decode(index: Any, *rest: Any) -> Any:
        if index.info.path == os.path.abspath(slow):
            others_taken.wait(20)
        return original(index, *rest)

    monkeypatch.setattr(cpu, "decode", decode)
    settings = {**SMALL, "batch": 1, "decode": {"threads": 2}, "jitter": {"depth": 3, "in_order": False}}
    found = {}
    with VideoLoader(folder, **settings, shuffle=False) as loader:
        for batch in loader:
            found[batch.paths[0]] = batch.video
            if len(found) == len(ordered) - 1:
                assert slow not in found
                others_taken.set()
    assert list(found)[-1] == slow
    assert found.keys() == ordered.keys()
    assert all(torch.equal(found[path], ordered[path]) for path in ordered)


def test_closing_amid_iter_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first: no epoch goes on after close()."""
    entered, original = threading.Event(), Fixed.groups

    def slow(*arguments: Any) -> Any:
        entered.set()
        time.sleep(0.2)
        return original(*arguments)

    monkeypatch.setattr(Fixed, "groups", slow)
    loader = VideoLoader(folder, **SMALL)
    closer = threading.Thread(target=lambda: entered.wait(5) and loader.close())
    closer.start()

    def to_the_end() -> None:
        for _ in loader:
            closer.join(0.5)

    with pytest.raises(ClosedError):
        to_the_end()
    closer.join(10)
    assert not threads()
    with pytest.raises(ClosedError, match="make a new one"):
        iter(loader)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_says_that_it_cannot_be_copied(folder: Path, duplicate: Any) -> None:
    with VideoLoader(folder, **SMALL) as loader, pytest.raises(TypeError, match="Make another one"):
        duplicate(loader)


def test_close_from_another_thread_wakes_a_waiting_consumer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    original = prepare.pick_frames

    def slow(*args: Any) -> Any:
        released.wait(10)
        return original(*args)

    monkeypatch.setattr(prepare, "pick_frames", slow)
    loader = VideoLoader(folder, **SMALL, decode={"threads": 1})
    iterator = iter(loader)
    caught: list[BaseException] = []

    def consume() -> None:
        try:
            next(iterator)
        except BaseException as error:
            caught.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=loader.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive()
    assert isinstance(caught[0], ClosedError)
    released.set()
    closer.join(5)
    assert not threads()


@pytest.mark.parametrize("where", ["tasks.Assembly", "prepare.make_plan"])
def test_collection_inside_a_worker_does_not_lock_up(folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator in a cycle is collected wherever the collector happens to run, be it in a worker that holds a lock."""
    room, name = where.split(".")
    patched = {"tasks": tasks, "prepare": prepare}[room]
    original = getattr(patched, name)
    dropped = threading.Event()

    def collecting(*args: Any, **kwargs: Any) -> Any:
        dropped.wait(5)
        gc.collect()
        return original(*args, **kwargs)

    monkeypatch.setattr(patched, name, collecting)
    loader = VideoLoader(folder, **SMALL, decode={"threads": 3})
    gc.disable()
    try:
        cycle: list[Any] = [iter(loader)]
        cycle.append(cycle)
        gone = weakref.ref(cycle[0])
        del cycle
        dropped.set()
        assert soon_no_threads(), f"locked up: {threads()}"
        assert gone() is None
    finally:
        gc.enable()
    monkeypatch.undo()
    assert len(list(loader)) == 4, "the engines are free again"
    loader.close()


def test_a_new_epoch_waits_for_the_threads_of_a_dropped_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are shared by all epochs: two threads on one engine would mix up frames."""
    users: dict[int, int] = {}
    clashes = []
    original = pipeline.DecodeEngine.decode

    def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
        users[id(engine)] = users.get(id(engine), 0) + 1
        if users[id(engine)] > 1:
            clashes.append(engine)
        try:
            time.sleep(0.01)
            return original(engine, *args, **kwargs)
        finally:
            users[id(engine)] -= 1

    monkeypatch.setattr(pipeline.DecodeEngine, "decode", watched)
    with VideoLoader(folder, **SMALL, decode={"threads": 2}) as loader:
        for _ in range(10):
            for _ in loader:
                break
        assert len(list(loader)) == 4
    assert not clashes


def test_no_file_stays_open_after_epochs(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        list(loader)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            list(loader)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_clip_that_takes_long_is_given_up_when_the_loop_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One output at a time: a clip takes many seconds, for which nobody is to wait."""
    monkeypatch.setattr(affine, "_WORK", 1)
    begun = threading.Event()
    original = affine.sample

    def watched(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return original(*args, **kwargs)

    monkeypatch.setattr(affine, "sample", watched)
    transform = {"size": 512, "affine": {"degrees": (10, 20)}}
    with VideoLoader(folder, **{**SMALL, "transform": transform}, decode={"threads": 1}) as loader:
        iterator = iter(loader)
        assert begun.wait(60)
        iterator.close()
        assert loader.stats()["clips"] == 0
    assert not threads()


SCRIPT = """
import faulthandler, os, sys, time
faulthandler.dump_traceback_later(HANGS, exit=True)
from gpupipe import VideoLoader
loader = VideoLoader(
    [sys.argv[1]] * 4000, clip={"frames": 8}, transform={"size": 64}, batch=2, device="cpu", decode={"threads": 3}
)
for number, batch in enumerate(loader):
    if number == 2:
        print("running", flush=True)
    BODY
"""


HANGS = 60
"""Seconds after which a script tells where each of its threads is, and ends."""


def script(body: str, folder: Path) -> subprocess.Popen[str]:
    text = SCRIPT.replace("HANGS", str(HANGS)).replace("BODY", textwrap.dedent(body).strip().replace("\n", "\n    "))
    command = [sys.executable, "-c", text, str(folder / "even/0.mp4")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=HANGS + 30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"still running after {HANGS + 30} s")
    return process.returncode, errors


@pytest.mark.parametrize("body", ["pass", "time.sleep(0.3)"])
def test_ctrl_c_ends_the_loop_at_once(folder: Path, body: str) -> None:
    process = script(body, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    code, errors = ends(process)
    assert time.monotonic() - begin < 6  # on a busy machine too
    assert code == -signal.SIGINT, errors
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("if number == 2: sys.exit(3)", 3, ""),
        ("if number == 2: break", 0, ""),
        ("if number == 2: kept = iter(loader); next(kept); sys.exit(4)", 4, ""),
        ("if number == 2: raise ValueError('mine')", 1, "ValueError: mine"),
    ],
)
def test_the_interpreter_may_exit_amid_an_epoch(folder: Path, body: str, code: int, says: str) -> None:
    process = script(body, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n", ends(process)
    begin = time.monotonic()  # only now: what the imports before it take is the machine's affair
    returned, errors = ends(process)
    assert returned == code, errors
    assert errors.strip().endswith(says)
    assert errors.count("Traceback") == bool(says)
    assert time.monotonic() - begin < 15


class InWorker(torch.utils.data.IterableDataset[Any]):
    """Iterates a loader where torch's DataLoader puts it."""

    def __init__(self, loader: VideoLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def test_a_worker_of_torchs_dataloader_is_refused(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        outer = torch.utils.data.DataLoader(InWorker(loader), batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ClosedError, match="cannot be iterated in a forked or worker process"):
            next(iter(outer))


# Bad files


def test_a_bad_file_is_replaced_counted_and_named(with_bad: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    bad = {with_bad[2]["path"], with_bad[5]["path"]}
    with VideoLoader(with_bad, **SMALL, seed=1) as loader:
        batches = list(loader)
        stats = loader.stats()
        loader.set_epoch(0)
        again = list(loader)
    assert [batch.video.shape[0] for batch in batches] == [2] * 4
    substituted = [path for batch in batches for path in batch.substituted]
    assert set(substituted) == bad == set(loader.bad_files)
    assert len(substituted) == stats["substituted"] == stats["bad_clips"] >= 2
    assert not bad & {path for batch in batches for path in batch.paths}
    assert equal(batches, again), "substitutes are the same in every run"
    assert all("cannot" in reason for reason in loader.bad_files.values())
    for path in bad:
        told = [record for record in caplog.records if f"{path} cannot be used" in record.getMessage()]
        assert len(told) == 1, "told once a file"
    assert "2 files could not be used" in caplog.text
    labels = {row["path"]: row["label"] for row in with_bad}
    for batch in batches:
        assert batch["label"].tolist() == [labels[path] for path in batch.paths], "the substitute brings its own columns"


def test_a_bad_file_does_not_touch_its_neighbours(with_bad: list[dict[str, Any]], folder: Path) -> None:
    good = [{"path": str(path), "label": k} for k, path in enumerate(sorted(folder.rglob("*.*")))]
    with VideoLoader(good, **SMALL, seed=1) as loader:
        clips = [(record, clip) for batch in loader for record, clip in zip(batch.clips, batch.video, strict=True)]
        expected = {record.request.sample: (record, clip) for record, clip in clips}
    with VideoLoader(with_bad, **SMALL, seed=1) as loader:
        same = 0
        for batch in loader:
            for row, record in enumerate(batch.clips):
                if record.request.attempt == 0:
                    wanted, clip = expected[record.request.sample]
                    assert record == wanted
                    assert torch.equal(batch.video[row], clip)
                    same += 1
    assert same == 6


def test_a_bad_file_may_be_skipped(with_bad: list[dict[str, Any]]) -> None:
    with VideoLoader(with_bad, **SMALL, seed=1, on_bad_file="skip") as loader:
        batches = list(loader)
    assert sum(batch.video.shape[0] for batch in batches) == 6
    for batch in batches:
        assert {len(tensor) for tensor in batch.values()} == {len(batch.clips)}
        for row, record in enumerate(batch.clips):
            assert torch.equal(batch.video[row], remade(record, ClipTransform(loader.config.transform, 4)))
    assert len(loader.bad_files) == 2


def test_a_batch_of_nothing_but_skipped_clips_is_left_out(folder: Path, tmp_path: Path) -> None:
    paths = [str(folder / "even/0.mp4"), str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4"), str(folder / "even/2.avi")]
    with VideoLoader(paths, **{**SMALL, "batch": 1}, shuffle=False, on_bad_file="skip", jitter={"depth": 1}) as loader:
        assert [batch.index for batch in loader] == [0, 3]


@pytest.mark.parametrize("count", [1, 3])
def test_a_bad_file_may_be_an_error(with_bad: list[dict[str, Any]], count: int) -> None:
    loader = VideoLoader(with_bad, **SMALL, shuffle=False, on_bad_file="raise", decode={"threads": count})
    iterator = iter(loader)
    with pytest.raises(OpenError) as caught:
        list(iterator)
    assert caught.value.path in {with_bad[2]["path"], with_bad[5]["path"]}
    assert not threads()
    with pytest.raises(ClosedError, match="OpenError"):
        next(iterator)
    loader.close()


def test_a_clip_that_is_too_short_is_a_bad_sample(tricky: Path, folder: Path) -> None:
    short = str(tricky / "t15_1frame.mp4")
    clip = {"frames": 4, "pad": "error"}
    rows = [short, str(folder / "even/0.mp4")]
    with VideoLoader(rows, **{**SMALL, "clip": clip, "batch": 1}) as loader:
        assert {batch.paths[0] for batch in loader} == {rows[1]}
        assert "too short: 1 frames" in loader.bad_files[short]
    with VideoLoader([short], **{**SMALL, "clip": clip, "batch": 1}, on_bad_file="raise") as loader, pytest.raises(SampleError):
        next(iter(loader))


def told_of_padding(rows: Any, caplog: pytest.LogCaptureFixture, **fields: Any) -> tuple[int, list[str]]:
    """Clips counted as padded in two epochs, each of which has padding where ``mask`` is False; and what was logged of them."""
    caplog.clear()
    with VideoLoader(rows, **{**SMALL, "shuffle": False, "decode": {"threads": 1}, **fields}) as loader:
        masks = [mask for _ in range(2) for batch in loader for mask in batch.get("mask", ())]
        count = loader.stats()["clips_padded"]
    if masks:
        assert count == sum(not bool(mask.all()) for mask in masks)
    return count, [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]


def test_short_videos_are_counted_and_told_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = sorted(map(str, (folder / "even").iterdir()))
    frames = VideoReader(rows[0]).info.frames
    count, told = told_of_padding(rows, caplog, clip={"frames": 4, "stride": frames})
    assert count == 2 * len(rows)
    (line,) = told
    span = 3 * frames + 1
    assert line.startswith(f"{rows[0]} has {frames} frames, and a clip of 4 with stride {frames} spans {span}: the rest")
    assert f"source={{'filter': {{'min_frames': {span}}}}}" in line
    assert "a smaller stride or fewer frames" in line
    just = {"clip": {"frames": frames}, "source": {"filter": {"min_frames": frames}}}
    assert told_of_padding(rows, caplog, **just) == (0, [])


def test_what_is_told_of_a_short_video_fits_the_clip(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(folder / "even/0.mp4")
    info = VideoReader(path).info
    rate = 4 / (info.duration_seconds * 2)
    count, (line,) = told_of_padding([path], caplog, clip={"frames": 4, "fps": rate}, batch=1)
    assert count == 2
    assert f"at {rate:g} fps lasts {info.duration_seconds * 2:.4g} s: the rest" in line
    assert f"{{'min_seconds': {info.duration_seconds * 2:.4g}}}" in line
    count, (line,) = told_of_padding([{"path": path, "start_frame": info.frames - 1}], caplog, batch=1)
    assert count == 2
    assert f"has {info.frames} frames, 1 of them from the clip's start on, and" in line
    assert "let it start earlier" in line
    assert "min_frames" not in line


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": {"frames": 200, "pad": "repeat-last"}},
        {"clip": {"frames": 200, "pad": "loop"}},
        {"clip": {"frames": 200, "sampling": "uniform"}},
        {"clip": {"frames": 200}, "batch": {"size": 2, "layout": "pad"}},
        {"batch": {"size": 2, "buckets": {"frames": [150, 200]}}},
        {"batch": {"size": 2, "layout": "pack", "patch": (2, 8, 8), "buckets": {"frames": [150, 200]}}},
        {"config": {"clip": {"pad": "repeat-last"}}, "clip": {"frames": 200}},
    ],
)
def test_padding_that_is_asked_for_is_counted_and_not_told_of(
    fields: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sorted(map(str, (folder / "even").iterdir()))
    count, told = told_of_padding(rows, caplog, **fields)
    assert count > 0
    assert told == []


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_inside_a_file_is_counted_and_told(
    workers: int, folder: Path, clips: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotten = str(spoilt(clips["h264"], tmp_path / "rot.mp4", 0))
    rows = [{"path": rotten, "start_frame": 4}, str(folder / "even/0.mp4"), str(folder / "even/2.avi"), rotten]
    with VideoLoader(rows, **SMALL, decode={"cpu_workers": workers}) as loader:
        for _ in range(2):
            assert sum(len(batch.clips) for batch in loader) == 4
        stats = loader.stats()
        assert not loader.bad_files
    assert stats["damaged_frames"] >= 8
    told = [record for record in caplog.records if f"{rotten} is damaged" in record.getMessage()]
    assert len(told) == 1
    assert "'damaged': 'bad'" in told[0].getMessage()


def test_damaged_clips_may_count_as_bad(folder: Path, clips: dict[str, Path], tmp_path: Path) -> None:
    rotten = str(spoilt(clips["h264"], tmp_path / "rot.mp4", 0))
    rows = [{"path": rotten, "start_frame": start} for start in (4, 40)] + [{"path": str(folder / "even/2.avi")}]
    with VideoLoader(rows, **SMALL | {"batch": 1}, decode={"damaged": "bad"}, on_bad_file="skip", shuffle=False) as loader:
        found = [batch.clips[0] for batch in loader]
        stats = loader.stats()
    assert [(clip.path, clip.pick.indices[0]) for clip in found[:1]] == [(rotten, 40)], "its whole part is used"
    assert len(found) == 2
    assert "frames from frame 4 on only in part" in loader.bad_files[rotten]
    assert stats["bad_clips"] == 1
    assert stats["damaged_frames"] == 0


def test_all_files_bad_is_one_clear_error(tmp_path: Path) -> None:
    rows = [str(tmp_path / f"{k}.mp4") for k in range(4)]
    with VideoLoader(rows, **SMALL) as loader:
        with pytest.raises(DecodeError, match="32 samples in a row could not be used") as caught:
            next(iter(loader))
        assert "bad_files" in str(caught.value)
        assert set(loader.bad_files) <= set(rows)
        assert loader.bad_files


@pytest.mark.parametrize("on_bad_file", ["substitute", "skip"])
@pytest.mark.parametrize(
    ("clip", "columns", "fix"),
    [
        ({"frames": 4000, "pad": "error"}, {}, "use pad='repeat-last' or 'loop'"),
        ({"frames": 4}, {"start_frame": 9999}, "correct the row"),
    ],
)
def test_where_every_row_fails_alike_the_error_has_the_way_out_once(
    on_bad_file: str, clip: dict[str, Any], columns: dict[str, Any], fix: str, folder: Path
) -> None:
    rows = [{"path": str(folder / f"even/{k}.mp4"), **columns} for k in (0, 0)]
    loader = VideoLoader(rows, **SMALL | {"clip": clip}, on_bad_file=on_bad_file)
    with loader, pytest.raises(DecodeError) as caught:
        list(loader)
    assert fix in (caught.value.fix or "")
    assert "VideoLoader.bad_files" in (caught.value.fix or "")
    assert str(caught.value).count("What to do:") == 1


@pytest.mark.parametrize("on_bad_file", ["substitute", "skip"])
def test_where_a_filter_leaves_only_files_that_fail_the_error_tells_of_it(
    on_bad_file: str, folder: Path, tmp_path: Path
) -> None:
    rows = [str(folder / "even/0.mp4"), *(str(tmp_path / f"none{k}.mp4") for k in range(2))]
    filtered = {"filter": {"min_frames": 100_000}}
    with VideoLoader(rows, **SMALL, source=filtered, on_bad_file=on_bad_file) as loader:
        assert len(loader.left_out) == 1
        with pytest.raises(DecodeError, match=r"source\.filter leaves: 1 it leaves out \(see VideoLoader\.left_out"):
            list(loader)


@pytest.mark.parametrize("size", [1, 3])
def test_an_epoch_of_nothing_but_skipped_clips_is_one_clear_error(size: int, folder: Path, tmp_path: Path) -> None:
    """A loop that ends at once, with no batch, looks like one that has trained."""
    rows = [str(tmp_path / f"{k}.mp4") for k in range(7)]
    batch = {"size": size, "last": "partial"}
    with VideoLoader(rows, **{**SMALL, "batch": batch}, on_bad_file="skip", shuffle=False) as loader:
        for _ in range(2):  # each epoch says so
            with pytest.raises(DecodeError, match=r"all 7 clips of the epoch were skipped, of 7 files: ") as caught:
                list(loader)
            assert ", ".join(rows[:5]) + ", …" in caught.value.message
            assert f"cannot open {rows[0]}" in caught.value.message
        assert set(loader.bad_files) == set(rows)
    with VideoLoader([*rows, str(folder / "even/0.mp4")], **{**SMALL, "batch": batch}, on_bad_file="skip") as loader:
        assert sum(len(batch.clips) for batch in loader) == 1, "one good file is enough"


def test_damaged_and_odd_files_amid_good_ones(tricky: Path) -> None:
    with VideoLoader(sorted(map(str, tricky.glob("t*.*"))), **SMALL, seed=2) as loader:
        batches = list(loader)
    assert len(batches) == len(loader)
    assert {Path(path).name for path in loader.bad_files} >= {"t13_empty.mp4", "t15_audio_only.mp4"}
    assert all(torch.isfinite(batch.video).all() for batch in batches)


def test_an_unforeseen_error_in_a_worker_reaches_the_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ArithmeticError("unforeseen")

    monkeypatch.setattr(prepare, "make_plan", broken)
    with VideoLoader(folder, **SMALL, decode={"threads": 3}) as loader, pytest.raises(ArithmeticError, match="unforeseen"):
        next(iter(loader))
    assert not threads()


def test_stats_add_up(folder: Path) -> None:
    with VideoLoader(folder, **SMALL) as loader:
        iterator = iter(loader)
        first = next(iterator)
        deadline = time.monotonic() + 5
        while loader.stats()["occupancy"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loader.stats()["occupancy"] == 3, "three of four batches wait"
        batches = [first, *iterator]
        stats = loader.stats()
    assert (stats["clips"], stats["batches"], stats["cpu_clips"], stats["frames_used"]) == (8, 4, 8, 32)
    assert stats["frames_decoded"] == 32
    costs = [make_plan(indices.load(r.path), r.pick.indices).packets for batch in batches for r in batch.clips]
    assert stats["packets_decoded"] == sum(costs)
    assert stats["wait_seconds"] >= stats["wait_p99_seconds"] >= stats["wait_p50_seconds"] > 0
    assert stats["decode_seconds"] > 0
    assert stats["occupancy"] == 0


@pytest.mark.parametrize(("engines", "threads"), [(7, 10), (2, 3), (1, 2), (0, 5)])
def test_threads_follow_the_decode_engines(engines: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caps = DecoderCaps(engines > 0, engines, 0, 0, 0, 0, None if engines else "there is none")
    for name, stand_in in {
        "nvdec_caps": lambda *_: caps,
        "cpu_quota": lambda: 5,
        "load": lambda _: None,
        "DecodeEngine": lambda *_, **settings: settings["mode"],
    }.items():
        monkeypatch.setattr(fleet, name, stand_in)
    device = torch.device("cuda", 0)

    def counts(**decode: Any) -> tuple[int, int]:
        own, helpers = fleet.engines_of(LoaderConfig(decode=decode), device, Telemetry())
        return len(own), len(helpers)

    assert counts() == (threads, 1 if engines else 0)
    assert counts(decoder="cpu") == (5, 0)
    assert counts(threads=3) == (3, 1 if engines else 0)
    assert counts(cpu_workers=2) == ((threads, 2) if engines else (2, 0))
    beside = {7: 1, 2: 1, 1: 2}  # three of five cores, less half a core for each thread
    assert counts(cpu_workers="auto") == ((threads, beside[engines]) if engines else (3, 0))
    if engines:
        assert counts(decoder="nvdec") == (threads, 0)


@pytest.mark.parametrize(
    ("told", "group", "gpus", "device", "processes"),
    [
        (None, None, 8, "cuda", 24 - 5),
        ("1", 64, 8, "cuda", 24 - 5),
        ("2", None, 8, "cuda", 12 - 5),
        ("4", 64, 1, "cuda", 6 - 5),
        ("100", None, 8, "cuda", 1),
        (None, 16, 2, "cuda", 12 - 5),
        (None, 3, 8, "cuda", 8 - 5),
        ("4", 2, 0, "cpu", 6),
        (None, 2, 0, "cpu", 12),
        (None, None, 0, "cpu", 24),
    ],
)
def test_ranks_share_the_cores_of_their_machine(
    told: str | None, group: int | None, gpus: int, device: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks with three of four cores each would hold up one another, and the training loops."""
    for name, stand_in in {
        "nvdec_caps": lambda *_: DecoderCaps(True, 7, 0, 0, 0, 0, None),
        "cpu_quota": lambda: 32,
        "load": lambda _: None,
        "DecodeEngine": lambda *_, **settings: settings["mode"],
    }.items():
        monkeypatch.setattr(fleet, name, stand_in)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: group is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: group)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    config = LoaderConfig(decode={"cpu_workers": "auto"})
    own, helpers = fleet.engines_of(config, torch.device(device), Telemetry())
    assert len(helpers if device == "cuda" else own) == processes
    own, helpers = fleet.engines_of(LoaderConfig(decode={"cpu_workers": 9}), torch.device(device), Telemetry())
    assert len(helpers if device == "cuda" else own) == 9, "a number is a number"


@pytest.mark.parametrize("told", ["", "0", "-1", "many"])
def test_a_number_of_local_ranks_that_is_none_is_named(told: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    VideoLoader(folder, **SMALL).close()  # nothing depends on it there
    with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE={told} is no number of ranks"):
        VideoLoader(folder, **SMALL, decode={"cpu_workers": "auto"})


def test_several_clips_of_a_video_are_decoded_in_one_pass(clips: dict[str, Path]) -> None:
    options: dict[str, Any] = {"transform": {"size": 64, "dtype": "float32"}, "device": "cpu", "seed": 5}
    paths = [clips[name] for name in ("h264", "hevc", "vp9", "mpeg4")]
    with VideoLoader(paths, clip={"frames": 8, "clips_per_video": 3}, batch=6, **options) as loader:
        assert len(loader) == 2
        batches = list(loader)
        stats = loader.stats()
    assert stats["clips"] == stats["cpu_clips"] == 12
    records = [record for batch in batches for record in batch.clips]
    assert [record.clip for record in records] == [0, 1, 2] * 4
    for first in range(0, 12, 3):
        visit = records[first : first + 3]
        assert len({record.path for record in visit}) == 1
        assert len({record.pick.indices for record in visit}) == 3, "each clip has frames of its own"
        assert len({record.params for record in visit}) == 3, "and a crop of its own"
    plans = [
        make_plan(indices.load(records[k].path), [i for record in records[k : k + 3] for i in record.pick.indices])
        for k in range(0, 12, 3)
    ]
    assert stats["packets_decoded"] == sum(plan.packets for plan in plans)
    video = torch.cat([batch.video for batch in batches])
    for slot, record in enumerate(records):  # each clip is that of its own frames: the first one is what a single clip would be
        index = indices.load(record.path)
        planes = cpu.decode(index, make_plan(index, record.pick.indices))
        expected = torch.empty(3, 8, 64, 64)
        ClipTransform(TransformConfig(size=64, dtype="float32"), 8).apply(planes, index.info, record.params, range(8), expected)
        assert torch.equal(video[slot], expected)


def test_a_visit_of_several_clips_fails_as_a_whole(clips: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    paths = [tmp_path / "bad.mp4", clips["h264"], clips["vp9"]]
    options: dict[str, Any] = {"clip": {"frames": 4, "clips_per_video": 2}, "batch": 6, "device": "cpu", "shuffle": False}
    with VideoLoader(paths, transform={"size": 32}, on_bad_file="skip", **options) as loader:
        assert [record.path for record in next(iter(loader)).clips] == [str(clips["h264"])] * 2 + [str(clips["vp9"])] * 2
    with VideoLoader(paths, transform={"size": 32}, **options) as loader:
        batch = next(iter(loader))
        assert len(batch.clips) == 6
        assert batch.substituted[0] == str(tmp_path / "bad.mp4")
        assert batch.clips[0].path == batch.clips[1].path != str(tmp_path / "bad.mp4")
