"""Decoded clips kept on the device and in pinned memory: the same bits on every stream, and memory that comes back."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.device import memory

pytestmark = pytest.mark.gpu

NAMES = ("h264", "hevc", "vp9", "h264_odd", "mpeg4", "vp9_odd")
MODES = pytest.mark.parametrize("where", ["device", "pinned"])


def make(clips: dict[str, Path], **settings: Any) -> VideoLoader:
    options: dict[str, Any] = {
        "clip": {"frames": 8, "sampling": "uniform"},
        "transform": {"size": 96, "dtype": "float32"},
        "batch": 4,
        "device": "cuda",
        "seed": 3,
    }
    return VideoLoader([clips[name] for name in NAMES] * 4, **{**options, **settings})


def pixels(loader: VideoLoader, epoch: int) -> list[torch.Tensor]:
    loader.set_epoch(epoch)
    return [batch.video.cpu() for batch in loader]


@MODES
@pytest.mark.parametrize("clip", [{"frames": 8, "sampling": "uniform"}, {"frames": 4, "clips_per_video": 2, "stride": 3}])
def test_every_epoch_equals_one_without_a_cache(clips: dict[str, Path], where: str, clip: dict[str, Any]) -> None:
    epochs = [0, 1, 0, 1]
    with make(clips, clip=clip) as loader:
        expected = [pixels(loader, epoch) for epoch in epochs]
        decoders = [clip.decoder for batch in loader for clip in batch.clips]
    assert set(decoders) == {"nvdec", "cpu"}, "planes of both kinds are kept"
    with make(clips, clip=clip, cache={"clips": where, "clips_gib": 0.5}) as loader:
        for number, epoch in enumerate(epochs):
            ours = pixels(loader, epoch)
            assert all(torch.equal(a, b) for a, b in zip(ours, expected[number], strict=True)), number
        stats = loader.stats()
    assert stats["cache_hits"] >= stats["clips"] // 2
    assert stats["cache_hits"] + stats["cache_misses"] == stats["clips"]
    assert stats["nvdec_clips"] + stats["cpu_clips"] == stats["cache_misses"]


@MODES
def test_the_bound_holds_and_what_came_first_stays(clips: dict[str, Path], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 1 << 20)
    limit = 3 << 20
    with make(clips) as loader:
        expected = pixels(loader, 0)
    with make(clips, cache={"clips": where, "clips_gib": limit / 2**30}) as loader:
        held = []
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(pixels(loader, 0), expected, strict=True))
            assert loader._job.clips is not None
            slabs = loader._job.clips._slabs
            assert sum(slab.memory.numel() for slab in slabs._slabs) == slabs.held_bytes <= limit
            assert {slab.memory.is_pinned() for slab in slabs._slabs} == {where == "pinned"}
            held.append(loader.stats()["cache_bytes"])
        assert 0 < held[0] <= limit
        assert held == [held[0]] * 3
        assert 0 < loader.stats()["cache_hits"] < loader.stats()["clips"]


@MODES
def test_closing_gives_the_memory_back(clips: dict[str, Path], where: str) -> None:
    with make(clips) as loader:  # what stays for good: kernels, the allocator's own
        pixels(loader, 0)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loader = make(clips, cache={"clips": where, "clips_gib": 0.25})
    pixels(loader, 0)
    pixels(loader, 0)
    assert loader._job.clips is not None
    slabs = [weakref.ref(slab.memory) for slab in loader._job.clips._slabs._slabs]
    if where == "device":
        assert torch.cuda.memory_allocated() - before >= 200 << 20
    loader.close()
    gc.collect()
    torch.cuda.synchronize()
    assert [slab() for slab in slabs] == [None] * len(slabs)
    assert torch.cuda.memory_allocated() - before < 32 << 20


@MODES
def test_kept_clips_are_complete_on_any_stream(clips: dict[str, Path], where: str) -> None:
    """Each epoch other threads, hence other streams, read what one thread's stream wrote, and the consumer has its own."""
    with make(clips) as loader:
        expected = [pixels(loader, epoch) for epoch in range(3)]
    side = torch.cuda.Stream()
    for _ in range(4):
        with make(clips, cache={"clips": where}, jitter={"depth": 3}) as loader:
            for round_number in range(6):
                epoch = round_number % 3
                loader.set_epoch(epoch)
                with torch.cuda.stream(side if round_number % 2 else torch.cuda.current_stream()):
                    made = []
                    for batch in loader:
                        torch.cuda._sleep(200_000)  # the consumer lags behind: nothing may be written again too early
                        made.append(batch.video.clone())
                        del batch
                    torch.cuda.current_stream().synchronize()
                assert all(torch.equal(a.cpu(), b) for a, b in zip(made, expected[epoch], strict=True)), round_number


@MODES
def test_closing_amid_an_epoch_of_kept_clips(clips: dict[str, Path], where: str) -> None:
    """Kernels still read the memory that is let go: batches that were handed out are whole."""
    with make(clips) as loader:
        expected = pixels(loader, 0)
    for _ in range(10):
        loader = make(clips, cache={"clips": where})
        pixels(loader, 0)
        loader.set_epoch(0)
        iterator = iter(loader)
        taken = [next(iterator).video for _ in range(2)]
        loader.close()
        junk = [torch.full((32 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(taken, expected, strict=False))
        del junk


def test_without_memory_the_loader_goes_on(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make(clips) as loader:
        expected = pixels(loader, 0)
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(memory, "SLAB_BYTES", 2 * total)
    with (
        caplog.at_level(logging.WARNING, "gpupipe"),
        make(clips, cache={"clips": "device", "clips_gib": 3 * total / 2**30}) as loader,
    ):
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(pixels(loader, 0), expected, strict=True))
        assert not loader.stats().get("cache_hits")
    told = [record.message for record in caplog.records if "cache of decoded clips" in record.message]
    assert len(told) == 1
    assert "0.00 GiB" in told[0]
