"""Decoded clips kept for later epochs: the same pixels as without, never a stale one, never more memory than was allowed."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import write_clip

from gpupipe import Batch, VideoLoader
from gpupipe.config import CacheConfig, LoaderConfig
from gpupipe.data import index as indices
from gpupipe.data.cache import ClipCache
from gpupipe.data.decode import cpu
from gpupipe.data.plan import make_plan
from gpupipe.device import memory
from gpupipe.errors import ConfigError
from gpupipe.telemetry import Telemetry
from gpupipe.types import PlaneFormat, Planes

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "clip": {"frames": 4, "sampling": "uniform"},
    "transform": {"size": (24, 32), "dtype": "float32"},
    "device": "cpu",
    "batch": {"size": 4, "last": "partial"},
    "decode": {"threads": 3},
}
KEPT = {"cache": {"clips": "pinned", "clips_gib": 0.5}}


@pytest.fixture
def paths(clips: dict[str, Path]) -> list[Path]:
    return [clips[name] for name in ("h264", "vp9_odd", "hevc", "mpeg4", "h264_odd")]


def epochs(loader: VideoLoader, numbers: list[int]) -> list[list[Batch]]:
    made = []
    for number in numbers:
        loader.set_epoch(number)
        made.append(list(loader))
    return made


def assert_equal(ours: list[list[Batch]], theirs: list[list[Batch]]) -> None:
    assert [len(epoch) for epoch in ours] == [len(epoch) for epoch in theirs]
    for a, b in zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True):
        assert a.clips == b.clips
        assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize(
    "clip",
    [
        {"frames": 4, "sampling": "uniform"},
        {"frames": 4, "sampling": "regular", "clips_per_video": 2},
        {"frames": 80, "sampling": "uniform"},  # repeats frames: the video has 60
        {"frames": 70},  # padding, and one start for all
        {"frames": 4, "sampling": "keyframe"},
        {"frames": 4, "clips_per_video": 2, "stride": 3},
    ],
)
@pytest.mark.parametrize("where", ["device", "pinned"])
def test_every_epoch_equals_one_without_a_cache(paths: list[Path], clip: dict[str, Any], where: str) -> None:
    numbers = [0, 1, 0, 2, 1]
    with VideoLoader(paths, **{**OPTIONS, "clip": clip}) as loader:
        expected = epochs(loader, numbers)
        assert "cache_misses" not in loader.stats()
    with VideoLoader(paths, **{**OPTIONS, "clip": clip}, cache={"clips": where}) as loader:
        assert_equal(epochs(loader, numbers), expected)
        stats = loader.stats()
    assert stats["cache_hits"] + stats["cache_misses"] == stats["clips"]
    per_epoch = stats["clips"] // len(numbers)
    assert stats["cache_hits"] >= 2 * per_epoch, "epochs 0 and 1 were had before"
    if clip.get("sampling") in ("uniform", "regular") or clip["frames"] == 70:
        assert stats["cache_misses"] == stats["cpu_clips"] == per_epoch, "all but the first epoch come from the cache"


def test_a_hit_decodes_nothing(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with VideoLoader(paths, **OPTIONS, **KEPT) as loader:
        first = list(loader)
        decoded = loader.stats()["packets_decoded"]
        monkeypatch.setattr(cpu, "decode_arrays", None)
        again = list(loader)
        assert loader.stats()["packets_decoded"] == decoded
    pixels = [
        {clip.path: row for batch in epoch for clip, row in zip(batch.clips, batch.video, strict=True)}
        for epoch in (first, again)
    ]
    assert pixels[0].keys() == pixels[1].keys()


def test_16_bit_planes_keep_their_samples(tmp_path: Path) -> None:
    deep = write_clip(tmp_path / "deep.mp4", "libx265", pix_fmt="yuv420p10le", width=178, height=146)
    with VideoLoader([deep] * 4, **OPTIONS) as loader:
        expected = epochs(loader, [0, 1])
    with VideoLoader([deep] * 4, **OPTIONS, **KEPT) as loader:
        assert_equal(epochs(loader, [0, 1]), expected)
        assert loader.stats()["cache_bytes"] == 4 * (178 * 146 + 2 * 89 * 73) * 2, "one clip, its samples and nothing else"


def test_what_came_first_stays_and_the_bound_holds(
    clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that threw out old clips would have no hit at all when it is smaller than the set."""
    monkeypatch.setattr(memory, "SLAB_BYTES", 1 << 20)
    videos = [shutil.copy(clips["h264"], tmp_path / f"{number}.mp4") for number in range(10)]
    clip_bytes = 4 * 320 * 240 * 3 // 2
    limit = 4 * clip_bytes + 1000
    monkeypatch.setattr(memory, "SLAB_BYTES", limit)
    with VideoLoader(videos, **OPTIONS, cache={"clips": "device", "clips_gib": limit / 2**30}) as loader:
        hits = []
        for _ in range(4):
            before = loader.stats().get("cache_hits", 0)
            list(loader)
            hits.append(loader.stats().get("cache_hits", 0) - before)
            assert loader.stats()["cache_bytes"] == 4 * clip_bytes
            assert loader._job.clips is not None
            assert loader._job.clips._slabs.held_bytes <= limit
    assert hits == [0, 4, 4, 4]


def test_running_out_of_memory_stops_the_growth_and_nothing_else(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with VideoLoader(paths, **OPTIONS) as loader:
        expected = epochs(loader, [0, 1])
    monkeypatch.setattr(memory, "SLAB_BYTES", 600_000)
    original, taken = torch.empty, []

    def short(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:  # the slabs' own call
            if taken:
                raise RuntimeError(
                    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 600000 bytes"
                )
            taken.append(size)
        return original(*size, **options)

    monkeypatch.setattr(torch, "empty", short)
    with caplog.at_level(logging.WARNING, "gpupipe"), VideoLoader(paths, **OPTIONS, **KEPT) as loader:
        assert_equal(epochs(loader, [0, 1]), expected)
        assert 0 < loader.stats()["cache_bytes"] <= 600_000
        assert loader.stats()["cache_hits"] >= 1
        assert not loader.bad_files
    assert len([record for record in caplog.records if "cache of decoded clips stays at" in record.message]) == 1


def test_a_file_that_changed_is_not_served_from_the_cache(clips: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "one.mp4"
    shutil.copy(clips["h264"], path)
    other = write_clip(tmp_path / "other.mp4", gop=12, bframes=0, options={"crf": "30"})
    with VideoLoader([path] * 4, **OPTIONS, **KEPT) as loader:
        before = epochs(loader, [0])
        os.replace(other, path)
        after = epochs(loader, [0])
        assert loader.stats()["cache_hits"] < 8
    with VideoLoader([path] * 4, **OPTIONS) as loader:
        assert_equal(after, epochs(loader, [0]))
    assert not torch.equal(before[0][0].video, after[0][0].video)


def test_bad_files_and_their_substitutes_are_kept_apart(paths: list[Path], tmp_path: Path) -> None:
    """A cut file: its index was made when it was whole, so that its decode fails amid the work."""
    cut = tmp_path / "cut.mp4"
    shutil.copy(paths[0], cut)
    indices.load(str(cut))
    facts = os.stat(cut)
    with open(cut, "r+b") as file:  # the middle of its packets
        file.seek(facts.st_size // 3)
        file.write(os.urandom(facts.st_size // 3))
    os.utime(cut, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (tmp_path / "empty.mp4").touch()
    videos = [*paths, cut, tmp_path / "empty.mp4", tmp_path / "missing.mp4"]
    with VideoLoader(videos, **OPTIONS) as loader:
        expected = epochs(loader, [0, 1, 0])
        bad = set(loader.bad_files)
    assert str(tmp_path / "empty.mp4") in bad
    with VideoLoader(videos, **OPTIONS, **KEPT) as loader:
        assert_equal(epochs(loader, [0, 1, 0]), expected)
        assert set(loader.bad_files) == bad
        assert loader._job.clips is not None
        kept = {identity.path for identity, _, _ in loader._job.clips._clips}
        assert not kept & bad


def test_one_clip_is_kept_once_whoever_decodes_it(clips: dict[str, Path]) -> None:
    with VideoLoader([clips["h264"]] * 24, **OPTIONS, **KEPT) as loader:
        list(loader)
        assert loader.stats()["cache_bytes"] == 4 * 320 * 240 * 3 // 2


def test_processes_fill_the_cache_with_copies_of_their_own(paths: list[Path]) -> None:
    """Their planes lie in memory that the next decode overwrites."""
    with VideoLoader(paths, **OPTIONS) as loader:
        expected = epochs(loader, [0, 1])
    with VideoLoader(paths, **{**OPTIONS, "decode": {"cpu_workers": 1}}, **KEPT) as loader:
        assert_equal(epochs(loader, [0, 1]), expected)
        assert loader.stats()["cache_hits"] == 5


def test_closing_the_loader_frees_the_memory(paths: list[Path]) -> None:
    loader = VideoLoader(paths, **OPTIONS, **KEPT)
    list(loader)
    assert loader._job.clips is not None
    slabs = [weakref.ref(slab.memory) for slab in loader._job.clips._slabs._slabs]
    assert slabs
    loader.close()
    assert [slab() for slab in slabs] == [None] * len(slabs)
    assert loader.stats()["cache_bytes"] == 0


@pytest.mark.parametrize("hardware", ["nvdec", "dali"])
def test_planes_of_another_decoder_serve_only_where_bits_are_the_same(hardware: str, clips: dict[str, Path]) -> None:
    index = indices.load(str(clips["h264"]))
    plan = make_plan(index, [3, 9])
    planes = cpu.decode(index, plan)
    cache = ClipCache(CPU, "device", 1 << 24, Telemetry())
    cache.keep(index, plan, hardware, planes, None)
    assert cache.find(index, plan, hardware) is not None
    assert cache.find(index, plan, "cpu") is None, "a video that NVDEC gave up stays with software"
    assert cache.find(index, make_plan(index, [3, 10]), hardware) is None
    cache.keep(index, plan, "cpu", planes, None)
    assert cache.find(index, plan, "cpu") is not None
    other = ClipCache(CPU, "device", 1 << 24, Telemetry())
    other.keep(index, plan, "cpu", planes, None)
    found = other.find(index, plan, hardware)
    assert found is not None
    assert found.decoder == "cpu"


def test_kept_planes_do_not_change_with_their_source(clips: dict[str, Path]) -> None:
    index = indices.load(str(clips["h264_odd"]))
    plan = make_plan(index, [0, 30, 59])
    planes = cpu.decode(index, plan)
    before = [planes.y.clone(), planes.u.clone(), planes.v.clone()]
    cache = ClipCache(CPU, "pinned", 1 << 24, Telemetry())
    cache.keep(index, plan, "cpu", planes, None)
    planes.data.zero_()
    clip = cache.find(index, plan, "cpu")
    assert clip is not None
    assert clip.format == planes.format
    there = clip.on_host()
    assert all(torch.equal(a, b) for a, b in zip(before, (there.y, there.u, there.v), strict=True))


def test_a_failed_copy_leaves_no_trace(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    index = indices.load(str(clips["h264"]))
    plan = make_plan(index, [1])
    planes = cpu.decode(index, plan)
    cache = ClipCache(CPU, "device", 1 << 24, Telemetry())
    with monkeypatch.context() as patch:
        patch.setattr(ClipCache, "_copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.keep(index, plan, "cpu", planes, None)
    assert cache.find(index, plan, "cpu") is None
    cache.keep(index, plan, "cpu", planes, None)
    assert cache.find(index, plan, "cpu") is not None


def test_threads_that_keep_and_find_at_once(clips: dict[str, Path]) -> None:
    index = indices.load(str(clips["h264"]))
    plans = [make_plan(index, [number]) for number in range(20)]
    all_planes = [cpu.decode(index, plan) for plan in plans]
    cache = ClipCache(CPU, "device", 1 << 24, Telemetry())
    wrong: list[int] = []

    def work() -> None:
        for number, (plan, planes) in enumerate(zip(plans, all_planes, strict=True)):
            found = cache.find(index, plan, "cpu")
            if found is not None and not torch.equal(found.on_host().y, planes.y):
                wrong.append(number)
            cache.keep(index, plan, "cpu", planes, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache._slabs.held_bytes <= 1 << 24
    assert all(cache.find(index, plan, "cpu") is not None for plan in plans)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (PlaneFormat(6, 4, 3, 2), ((4, 6), (4, 3))),
        (PlaneFormat(6, 4, 3, 2, 8, 0, True), ((6, 6),)),  # NV12
        (PlaneFormat(5, 3, 3, 2, 10, 6, True), ((3, 5), (2, 6))),  # odd: a chroma row is wider
        (PlaneFormat(5, 3, 5, 3), ((9, 5),)),  # 4:4:4
    ],
)
def test_parts_hold_every_sample_once(layout: PlaneFormat, parts: tuple[tuple[int, int], ...]) -> None:
    dtype = torch.uint8 if layout.sample_bytes == 1 else torch.uint16
    assert layout.parts == parts
    samples = layout.width * layout.height + 2 * layout.chroma_width * layout.chroma_height
    assert layout.used_bytes == samples * layout.sample_bytes
    data = torch.arange(2 * layout.rows * 8, dtype=torch.int32).to(dtype).view(2, layout.rows, 8)
    planes = Planes(data, layout)
    copy = Planes(torch.zeros((2, layout.rows, layout.row_samples), dtype=dtype), layout)
    copy.fill(planes.parts)
    assert all(torch.equal(a, b) for a, b in ((copy.y, planes.y), (copy.u, planes.u), (copy.v, planes.v)))


def test_the_configuration_of_caches(tmp_path: Path) -> None:
    assert CacheConfig() == CacheConfig(clips="off", open_files=0, read_ahead="auto"), "nothing unless asked for"
    for wrong in ({"clips": "gpu"}, {"clips_gib": 0}, {"open_files": -1}, {"read_ahead": 5000}, {"clip": "off"}):
        with pytest.raises(ConfigError):
            CacheConfig(**wrong)
    by_hand = tmp_path / "by_hand.yaml"
    by_hand.write_text("cache: {clips: off, read_ahead: 8}\n")  # which YAML takes for a false
    config = LoaderConfig.from_yaml(by_hand)
    assert (config.cache.clips, config.cache.read_ahead) == ("off", 8)
    config.to_yaml(tmp_path / "whole.yaml")
    assert LoaderConfig.from_yaml(tmp_path / "whole.yaml") == config
