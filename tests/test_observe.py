"""Measuring, machine facts and pictures."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpupipe import Batch, TransformConfig, VideoLoader
from gpupipe.data.transform.params import whole
from gpupipe.errors import SourceError
from gpupipe.observe.measure import Measurement, ResourceSampler, machine_facts, measure, quantile
from gpupipe.observe.plots import bench_timeline, contact_sheet, pictures, training_curve
from gpupipe.types import ClipRecord, ClipRequest, FramePick


@pytest.fixture
def loader(clips: dict[str, Path]):  # type: ignore[no-untyped-def]
    """Six entries in batches of two: three batches an epoch."""
    videos = [str(clips["h264"])] * 6
    with VideoLoader(videos, clip={"frames": 4}, transform={"size": 32}, batch=2, device="cpu") as made:
        yield made


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.99, 1.0])
def test_quantile_equals_numpy(share: float) -> None:
    values = list(np.random.default_rng(0).normal(size=37))
    assert quantile(values, share) == pytest.approx(np.quantile(values, share))
    assert quantile([], share) == 0.0


def test_one_epoch_without_limits(loader: VideoLoader) -> None:
    result = measure(loader)
    assert (result.batches, result.clips, result.frames, result.epochs) == (3, 6, 24, 1)
    assert result.decoders == {"cpu": 6}
    assert result.packets_per_frame is not None
    assert result.packets_per_frame >= 1
    assert result.first_batch_seconds <= result.seconds
    assert sum(result.waits) == pytest.approx(result.wait_seconds)
    assert result.wait_seconds <= result.seconds
    assert list(result.batch_ends) == sorted(result.batch_ends)
    assert result.batch_clips == (2, 2, 2)


def test_limits_go_on_over_epochs(loader: VideoLoader) -> None:
    by_clips = measure(loader, clips=8)
    assert (by_clips.clips, by_clips.epochs) == (8, 2)
    by_time = measure(loader, seconds=0.5)
    assert 0.5 <= by_time.seconds < 20
    assert by_time.epochs > 1


def test_warm_up_is_not_counted(loader: VideoLoader) -> None:
    seen: list[int] = []
    result = measure(loader, clips=4, warmup_batches=2, step=lambda batch: seen.append(batch.index))
    assert seen == [0, 1, 2, 0], "warm-up batches go through the step too"
    assert (result.clips, result.warmup_batches) == (4, 2)
    with pytest.raises(SourceError, match="warm-up"):
        measure(loader, warmup_batches=4)


def test_a_slow_step_is_not_a_wait(loader: VideoLoader) -> None:
    result = measure(loader, step=lambda batch: time.sleep(0.2))
    assert result.seconds >= 0.6
    assert result.wait_seconds <= result.seconds - 0.6


def test_sampler_counts_what_this_process_uses() -> None:
    spent = time.process_time()
    with ResourceSampler(interval=0.05) as sampler:
        block = np.ones(32 << 20, np.uint8)
        end = time.perf_counter() + 0.8
        while time.perf_counter() < end:
            block.sum()
            time.sleep(0.001)  # lets the sampler's thread in, on a busy machine too
        spent = time.process_time() - spent
    use = sampler.result()
    seconds = use.samples[-1].seconds
    assert use.cpu_cores_mean * seconds == pytest.approx(spent, abs=0.15)
    assert use.peak_host_bytes > block.nbytes
    assert len(use.samples) >= 2
    assert use.gpu_percent_mean is None
    assert use.peak_torch_bytes is None


def test_machine_facts_are_those_of_the_result_files() -> None:
    facts = machine_facts()
    assert {"gpu", "driver", "cpu_cores", "torch", "cupy", "triton", "pynvvideocodec"} <= set(facts)
    assert facts["torch"] == torch.__version__
    assert facts["cpu_cores"] >= 1


def a_batch(video: torch.Tensor, frames: int) -> Batch:
    size = video.shape[0]
    pick = FramePick((0,) * frames, (True,) * frames)
    records = tuple(
        ClipRecord(f"/videos/{'long-name-' * 20}{n}.mp4", ClipRequest(0, 0, n, 0), pick, whole((8, 8)), "cpu")
        for n in range(size)
    )
    mask = torch.ones(size, frames, dtype=torch.bool)
    mask[:, -1] = False
    times = torch.arange(frames, dtype=torch.float64).repeat(size, 1) / 25
    return Batch({"video": video, "pts_seconds": times, "mask": mask, "label": torch.arange(size)}, records)


@pytest.mark.parametrize("layout", ["NCTHW", "NTCHW"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_pictures_undo_the_normalisation(layout: str, dtype: str) -> None:
    config = TransformConfig(size=8, layout=layout, dtype=dtype)
    rgb = torch.randint(0, 256, (2, 3, 4, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    video = rgb
    if dtype != "uint8":
        mean, std = (torch.tensor(t).view(1, 3, 1, 1, 1) for t in (config.mean, config.std))
        video = ((rgb / 255 - mean) / std).to(getattr(torch, dtype))
    if layout == "NTCHW":
        video = video.transpose(1, 2)
    shown = pictures(a_batch(video, 4), config)
    off = np.abs(shown.astype(int) - rgb.permute(0, 2, 3, 4, 1).numpy().astype(int)).max()
    assert off <= (2 if dtype == "bfloat16" else 0)


def test_contact_sheet_shows_the_clips(tmp_path: Path) -> None:
    """Each tile has its clip's colour, whatever the path's length and the number of frames."""
    colours = torch.tensor([[250, 10, 10], [10, 250, 10], [10, 10, 250]], dtype=torch.uint8)
    video = colours.view(3, 3, 1, 1, 1).expand(3, 3, 20, 8, 8)
    file = tmp_path / "new" / "sheet.png"
    contact_sheet(a_batch(video, 20), file, TransformConfig(size=8, dtype="uint8"), title="t" * 500,
                  labels=["first", "second", "third"], frames=5, tile=40)  # fmt: skip
    sheet = np.asarray(Image.open(file).convert("RGB")).reshape(-1, 3)
    for colour in colours.numpy():
        found = int((sheet == colour).all(axis=1).sum())
        assert found == 5 * 64 * 40, "five tiles of 64 by 40 pixels a clip"


def test_plots_are_drawn(tmp_path: Path, loader: VideoLoader) -> None:
    measured: Measurement = measure(loader)
    timeline = bench_timeline(measured, tmp_path / "timeline.png", title="a title")
    curve = training_curve(tmp_path / "curve.png", losses=[2.0, 1.5, 1.0, 0.5, 0.4], accuracies=[0.5, 0.9], steps_per_epoch=2,
                           waits=[0.1, 0, 0, 0, 0], target=0.9, title="a title")  # fmt: skip
    for file in (timeline, curve):
        with Image.open(file) as picture:
            assert min(picture.size) > 600
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50, "more than an empty page"


@pytest.mark.gpu
def test_the_gpu_is_measured(clips: dict[str, Path]) -> None:
    videos = [str(clips["h264"])] * 16
    with VideoLoader(videos, clip={"frames": 4}, transform={"size": 64}, batch=4, device="cuda") as made:
        use = measure(made, seconds=2).resources
    assert use.gpu_percent_mean is not None
    assert use.peak_torch_bytes is not None
    assert use.peak_device_bytes is not None
    assert 0 < use.peak_torch_bytes <= use.peak_device_bytes
    assert machine_facts()["gpu"] == torch.cuda.get_device_name(0)
