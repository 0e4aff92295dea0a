"""VideoLoader on CUDA: equal to the CPU within the stated bound, repeatable, and safe whatever the consumer does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_ops import counted_ops

from gpupipe import VideoLoader
from gpupipe.data.decode.nvdec import _Target
from gpupipe.data.pipeline import Pipeline

pytestmark = pytest.mark.gpu


def make(clips: dict[str, Path], **settings: Any) -> VideoLoader:
    paths = [clips[name] for name in ("h264", "hevc", "vp9", "h264_odd", "mpeg4", "vp9_odd")] * 4
    options: dict[str, Any] = {
        "clip": {"frames": 8},
        "transform": {"size": 96, "dtype": "float32", "mean": (0, 0, 0), "std": (1, 1, 1)},
        "batch": 4,
        "device": "cuda",
        "seed": 3,
    }
    return VideoLoader(paths, **{**options, **settings})


def pixels(loader: VideoLoader) -> list[torch.Tensor]:
    with loader:
        return [batch.video.cpu() for batch in loader]


def test_clips_equal_the_cpu_within_2_of_255(clips: dict[str, Path]) -> None:
    ours, theirs = pixels(make(clips)), pixels(make(clips, device="cpu"))
    assert len(ours) == len(theirs) == 6
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 2 / 255


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_two_runs_give_identical_bits(clips: dict[str, Path], dtype: str) -> None:
    transform = {"size": 112, "dtype": dtype}
    first = pixels(make(clips, transform=transform))
    again = pixels(make(clips, transform=transform, decode={"threads": 3}, jitter={"depth": 1}))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_clips_are_replayed_bit_for_bit_amid_an_epoch(clips: dict[str, Path]) -> None:
    with make(clips, transform={"size": 96, "color_jitter": {"contrast": 0.4}, "affine": {"degrees": 10}}) as loader:
        for number, batch in enumerate(loader):
            for row, record in enumerate(batch.clips):
                assert torch.equal(loader.replay(record), batch.video[row]), record
            if number == 2:
                break


def test_batches_lie_on_the_device_with_all_their_parts(clips: dict[str, Path]) -> None:
    with make(clips) as loader:
        batch = next(iter(loader))
        assert {name: tensor.device.type for name, tensor in batch.items()} == {
            "video": "cuda", "pts_seconds": "cuda", "mask": "cuda",
        }  # fmt: skip
        decoders = {clip.decoder for b in loader for clip in b.clips}
    assert decoders == {"nvdec", "cpu"}  # MPEG-4 goes to the CPU


def test_iterating_under_a_stream_of_ones_own_is_right(clips: dict[str, Path]) -> None:
    expected = pixels(make(clips))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), make(clips) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            torch.cuda._sleep(3_000_000)
            assert torch.equal(batch.video.cpu(), wanted)


def test_no_wrong_byte_whatever_the_consumer_does(clips: dict[str, Path]) -> None:
    """The lifetime rule under stress: consumers slower and faster than the producer, batches dropped early and kept long."""
    expected = pixels(make(clips))
    modes = ("fast", "slow", "kept", "dropped", "unread", "noisy")
    with make(clips, jitter={"depth": 2}) as loader:
        for round_number in range(18):
            mode = modes[round_number % len(modes)]
            loader.set_epoch(0)
            kept: list[tuple[int, torch.Tensor]] = []
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for number, batch in enumerate(loader):
                video = batch.video
                if mode == "unread":
                    del batch, video
                    continue
                if mode == "slow":
                    torch.cuda._sleep(20_000_000)  # the GPU is behind the host: memory freed now is still to be read
                if mode == "noisy":
                    for _ in range(3):  # other allocations of the same size on this stream
                        torch.empty_like(video).fill_(-7)
                reference = expected[number].pin_memory().to("cuda", non_blocking=True)
                if mode == "kept":
                    kept.append((number, video))
                else:
                    wrong += (video != reference).sum()
                if mode == "dropped":
                    del video, batch
            for number, video in kept:
                wrong += (video != expected[number].to("cuda")).sum()
            assert int(wrong) == 0, mode


def test_memory_on_the_device_does_not_grow(clips: dict[str, Path]) -> None:
    with make(clips) as loader:
        sizes = []
        for _ in range(8):
            for batch in loader:
                del batch
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[2] * 1.05, sizes


def test_leaving_early_leaves_no_thread(clips: dict[str, Path]) -> None:
    loader = make(clips)
    for _ in loader:
        break
    loader.close()
    gc.collect()
    deadline = time.monotonic() + 5
    while any(t.name.startswith("gpupipe") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gpupipe")]


def test_breaking_off_leaves_no_writer_behind(clips: dict[str, Path]) -> None:
    """Batches that are left half-made give their memory back: kernels still queued must not write into the next ones."""
    expected = pixels(make(clips))
    with make(clips, jitter={"depth": 3}) as loader:
        for round_number in range(60):
            loader.set_epoch(0)
            for number, batch in enumerate(loader):
                assert torch.equal(batch.video.cpu(), expected[number]), (round_number, number)
                if number == round_number % 3:
                    break


def test_leaving_amid_an_epoch_ends_the_process_cleanly(clips: dict[str, Path]) -> None:
    code = "import sys; from gpupipe import VideoLoader; loader = VideoLoader([sys.argv[1]] * 64, batch=4, device='cuda'); "
    code += "next(iter(loader)); kept = iter(loader); next(kept)"
    done = subprocess.run([sys.executable, "-c", code, str(clips["h264"])], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bad_file_amid_good_ones_is_substituted(clips: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"not a video" * 100)
    with VideoLoader(
        [clips["h264"], bad, clips["hevc"], clips["vp9"]] * 3, batch=4, device="cuda", transform={"size": 64}
    ) as loader:
        paths = [path for batch in loader for path in batch.paths]
        assert len(paths) == 12
        assert str(bad) not in paths
        assert list(loader.bad_files) == [str(bad)]


def test_breaking_off_costs_no_decoders(clips: dict[str, Path]) -> None:
    """An epoch that is left amid its clips leaves its NVDEC sessions fit for the next one."""
    with VideoLoader([clips["h264"], clips["hevc"]] * 40, batch=4, device="cuda", transform={"size": 64}, seed=3) as loader:
        expected = [batch.video.clone() for batch in loader]
        for _ in range(6):
            next(iter(loader))
        loader.set_epoch(0)
        for batch, before in zip(loader, expected, strict=True):
            assert torch.equal(batch.video, before)
        assert loader.stats()["decoders_created"] <= 2 * len(loader._job.engines)


FAULT = """
import cupy, sys, torch
from gpupipe import VideoLoader
from gpupipe.device.module import launch
from gpupipe.errors import SyncError

poison = cupy.RawKernel('extern "C" __global__ void poison(int* p) { *p = 1; }', "poison")
def broken(clip):
    import numpy
    launch(poison, (1,), (1,), (numpy.uint64(64),))
loader = VideoLoader([sys.argv[1]] * 8, batch=2, device="cuda", transform={"size": 64}, after=broken)
try:
    for batch in loader:
        batch.video.sum().item()
except SyncError as error:
    print(error)
    sys.stdout.flush()
    import os
    os._exit(7)
"""


def test_a_fault_on_the_pipelines_stream_is_a_sync_error(clips: dict[str, Path]) -> None:
    """In a process of its own: a fault ends the CUDA context for good."""
    done = subprocess.run(
        [sys.executable, "-c", FAULT, str(clips["h264"])], capture_output=True, text=True, timeout=100, env=os.environ
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "TT_ERR_SYNC" in done.stdout
    assert "stage '" in done.stdout


def test_threads_give_up_the_interpreter_lock_seldom(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time they must win it back, and a training loop of many small ops stands still for as long as they have it."""
    ops: list[str] = []
    calls: list[str] = []
    work, decode = Pipeline._work, _Target.decode

    def counted(pipeline: Any, worker: Any) -> None:
        with counted_ops(ops):
            work(pipeline, worker)

    def watched(name: str) -> Any:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("gpupipe-clips"):
                calls.append(name)
            return original(*args, **kwargs)

        return call

    def decoded(*args: Any, **kwargs: Any) -> Any:
        calls.append("Decode")
        return decode(*args, **kwargs)

    transform = {"size": 96, "color_jitter": {"contrast": 0.4}}
    with VideoLoader([clips["h264"]] * 160, clip={"frames": 8}, batch=4, device="cuda", transform=transform) as loader:
        list(loader)  # decoders and memory are there from here on
        monkeypatch.setattr(Pipeline, "_work", counted)
        monkeypatch.setattr(_Target, "decode", decoded)
        for name in ("stat", "open", "fstat", "preadv", "close"):
            monkeypatch.setattr(os, name, watched(name))
        main: list[str] = []
        for _ in loader:
            pass
        with counted_ops(main):
            batch = next(iter(loader))
    assert len(ops) <= 3 * 160, "a view of the batch a clip; its memory and two uploads a batch"
    assert calls.count("Decode") <= 3 * 160
    assert len(calls) - calls.count("Decode") <= 6 * 160
    assert len(main) <= len(batch), main
