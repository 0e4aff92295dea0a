"""Batches on CUDA beyond the plain ones: layouts, parts that follow memory, replay, resume, what a loader counts."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import write_clip
from test_buckets import LENGTHS, OPTIONS, SIZES, clips_of
from test_buckets import made as made_on_cpu

from gpupipe import Batch, VideoLoader
from gpupipe.types import ClipRecord

pytestmark = pytest.mark.gpu
BOUND = 2 / 255
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine videos of three lengths and three aspect ratios."""
    root = tmp_path_factory.mktemp("mixed")
    for name, (width, height) in SIZES.items():
        for length in LENGTHS:
            write_clip(root / f"{name}_{length}_0.mp4", width=width, height=height, frames=length, gop=12)
    return root


def made(folder: Path, **settings: Any) -> VideoLoader:
    transform = {**OPTIONS["transform"], "mean": (0, 0, 0), "std": (1, 1, 1)}
    return made_on_cpu(folder, **{"device": "cuda", "transform": transform, **settings})


def same(one: Batch, other: Batch) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one) and one.clips == other.clips


def drawn(clip: ClipRecord) -> ClipRecord:
    """A clip's record without what the device has a say in."""
    return replace(clip, decoder="cpu")


@pytest.mark.parametrize("layout", ["stack", "pad", "pack"])
def test_every_layout_holds_the_cpus_clips(folder: Path, layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "max_tokens": 64, "patch": (1, 16, 16)}
    with made(folder, **options) as ours, made(folder, **options, device="cpu") as theirs:
        batches = list(zip(ours, theirs, strict=True))
    for one, other in batches:
        assert [drawn(clip) for clip in one.clips] == [drawn(clip) for clip in other.clips]
        assert list(one) == list(other)
        for name in one:
            assert one[name].is_cuda
            if name not in ("video", "tokens"):
                assert torch.equal(one[name].cpu(), other[name]), name
        for key, clip in clips_of(one).items():
            assert (clip.cpu() - clips_of(other)[key]).abs().max() <= BOUND
        if layout == "pad":
            frames = one["mask"].sum(1).tolist()
            assert not any(one.video[row, :, count:].any() for row, count in enumerate(frames))


@pytest.mark.parametrize("layout", ["stack", "pack"])
def test_a_run_goes_on_bit_for_bit_where_it_was_left(folder: Path, layout: str) -> None:
    options: dict[str, Any] = {"layout": layout, "patch": (1, 16, 16)}
    with made(folder, **options) as loader:
        whole = list(loader)
    with made(folder, **options) as loader:
        left = [batch.state for batch in islice(loader, 2)][-1]
    with made(folder, **options) as loader:
        loader.load_state_dict(left)
        rest = list(loader)
    assert len(rest) == len(whole) - 2
    assert all(same(one, other) for one, other in zip(rest, whole[2:], strict=True))


def test_a_step_that_runs_out_of_memory_comes_again_in_smaller_parts(folder: Path) -> None:
    """The bound is torch's own, which a step meets as it would the end of the device's memory. Parts heed it by what the steps
    before took, so memory runs out where the next ones need more."""
    first, later, room = 64 * MIB, 256 * MIB, 1200 * MIB
    options: dict[str, Any] = {"size": 8, "last": "drop", "micro_size": "auto", "buckets": None, "clip": {"frames": 4}}
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    with made(folder, **options, repeat=True) as loader:
        gradient = torch.zeros((), device=loader.device)
        sums: list[float] = []
        failed = 0
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            for batch in loader:
                with loader.step_guard(gradient.zero_) as step:
                    a_clip = later if sums else first
                    work = torch.empty(len(batch.clips) * a_clip, dtype=torch.uint8, device=loader.device)
                    gradient += batch.video.mean(dtype=torch.float64).float() * batch.share
                    del work
                failed += step.failed
                if step.done:
                    sums.append(float(gradient))
                    gradient.zero_()
                    if len(sums) == 4:
                        break
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed, "eight clips at once need 2 GiB, and there are 1.2"
    with made(folder, **{**options, "micro_size": None}, repeat=True) as loader:
        expected = [float(batch.video.mean(dtype=torch.float64)) for batch in islice(loader, 4)]
    assert sums == pytest.approx(expected, abs=1e-5)


def test_batches_on_the_device_come_again_with_nothing_at_work_beside_them(folder: Path) -> None:
    with made(folder) as loader:
        with loader.cached(3, steps=7) as cached:
            first = [dict(batch) for batch in islice(iter(cached), 3)]
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for number, batch in enumerate(cached):
                    assert batch.video.is_cuda
                    assert all(torch.equal(batch[name], tensor) for name, tensor in first[number % 3].items())
            stream.synchronize()
        for batch, expected in zip(loader, first, strict=False):
            assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items()), "the loader's own"


def test_what_crosses_the_bus_is_counted(folder: Path) -> None:
    with made(folder) as loader:
        batches = list(loader)
        stats = loader.stats()
    written = sum(batch.video.nbytes for batch in batches)
    packets = sum(path.stat().st_size for path in folder.iterdir())
    assert 0 < stats["to_device_bytes"] < 20 * packets
    assert stats["device_written_bytes"] >= written
    assert stats["stages"]["decode"]["items"] >= sum(len(batch.clips) for batch in batches)


def test_ranges_for_a_profiler_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(folder) as loader:
        plain = list(loader)
    monkeypatch.setenv("GPUPIPE_NVTX", "1")
    with made(folder) as loader:
        assert all(same(one, other) for one, other in zip(loader, plain, strict=True))
