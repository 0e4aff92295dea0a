"""What a loader makes on a GPU beyond crop and normalisation: the CPU loader's batches, decoded from the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe import Batch, VideoLoader
from gpupipe.types import Clip

pytestmark = pytest.mark.gpu

CLOSE = 2e-3
"""Of values with ImageNet's std of 0.22: a tenth of a code of 255 in RGB, and float32 sums through several steps."""


def _both(clips: dict[str, Path], **given: Any) -> tuple[Batch, Batch]:
    videos = [{"path": str(clips["h264"]), "label": k} for k in range(6)]
    settings: dict[str, Any] = {"clip": {"frames": 4}, "batch": 6} | given
    settings["transform"] = {"size": 48, "dtype": "float32"} | settings.get("transform", {})
    batches = []
    for device in ("cuda", "cpu"):
        with VideoLoader(videos, device=device, **settings) as loader:
            batches.append(next(iter(loader)))
    return batches[0], batches[1]


def _negative(clip: Clip) -> torch.Tensor:
    return 255 - clip.video


def _shifted(clip: Clip) -> None:
    clip.video += float(clip.rng.random())


@pytest.mark.parametrize(
    "given",
    [
        {"transform": {"preset": "kinetics_train"}},
        {"transform": {"preset": "kinetics_train", "draws": "frame", "clamp": False}},
        {"transform": {"affine": {"degrees": 30, "scale": (0.8, 1.2)}, "fill": 0.5, "vflip": 0.5}},
        {"transform": {"blur": {"kernel_size": 5}, "erasing": {"p": 1.0}, "grayscale": 0.5}},
        {"transform": {"memory_format": "channels_last_3d", "mix": {"mixup": 1.0, "cutmix": 1.0, "num_classes": 6}}},
        {"clip": {"frames": 4, "speed": (0.4, 0.7), "blend": True, "reverse": 0.5}},
        {"clip": {"frames": 4, "clips_per_video": 3}, "transform": {"crop": "three"}},
        {"before": _negative},
        {"after": _shifted},
    ],
)
def test_the_gpus_batches_are_the_cpus(clips: dict[str, Path], given: dict[str, Any]) -> None:
    on_gpu, on_cpu = _both(clips, **given)
    assert on_gpu.params == on_cpu.params
    assert on_gpu.mix == on_cpu.mix
    assert on_gpu.video.is_cuda
    assert on_gpu.video.stride() == on_cpu.video.stride()
    assert float((on_gpu.video.cpu() - on_cpu.video).abs().max()) < CLOSE
    torch.testing.assert_close(on_gpu["label"].cpu(), on_cpu["label"])


def test_automatic_augmentation_differs_at_steps_alone(clips: dict[str, Path]) -> None:
    """Posterize, solarize and equalise turn a rounding error into a step: seldom."""
    on_gpu, on_cpu = _both(clips, transform={"auto_augment": {"num_ops": 3}})
    assert float(((on_gpu.video.cpu() - on_cpu.video).abs() > CLOSE).float().mean()) < 2e-3


def test_two_runs_give_identical_bits(clips: dict[str, Path]) -> None:
    transform = {"preset": "kinetics_train", "affine": {"degrees": 10}, "blur": {"kernel_size": 5}, "auto_augment": {}}
    first, second = (_both(clips, transform=transform)[0] for _ in range(2))
    assert torch.equal(first.video, second.video)


def test_float32_matmul_precision_changes_nothing(clips: dict[str, Path]) -> None:
    """Trainers ask for TF32; colours must not get it."""
    transform = {"preset": "kinetics_train", "blur": {"kernel_size": 5}}
    plain = _both(clips, transform=transform)[0]
    try:
        torch.set_float32_matmul_precision("high")
        other = _both(clips, transform=transform)[0]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(plain.video, other.video)
