"""Preparation on a data stream beside training on the compute stream: right whatever is slow, and really beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.train.executor import PipelineExecutor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("slow", ["prepare", "train", "neither"])
def test_no_wrong_byte_whatever_is_slow(slow: str) -> None:
    batches = [torch.full((1 << 20,), float(k), device="cuda") for k in range(12)]

    def prepare(batch: torch.Tensor) -> torch.Tensor:
        if slow == "prepare":
            torch.cuda._sleep(20_000_000)
        return batch * 2 + 1

    with PipelineExecutor(batches, prepare=prepare, ahead=2) as run:
        for number, made in enumerate(run):
            if slow == "train":
                torch.cuda._sleep(20_000_000)
            wrong = (made != 2 * number + 1).sum()
            del made  # its memory may be the next one's, once this stream has passed
            run.log(wrong=wrong)
        assert run.metrics(wait=True) == {"wrong": 0.0}


def test_preparation_goes_on_beside_training() -> None:
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def work(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = x @ weight
        return x

    def hidden(batches: list[torch.Tensor]) -> float:
        with PipelineExecutor(batches, prepare=lambda batch: work(batch, 20), timeline=True) as run:
            for made in run:
                work(made, 200)
            return run.hidden()

    batches = [torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(30)]
    hidden(batches[:3])  # the first product of a thread waits for its library
    assert hidden(batches) > 0.5


def test_a_loaders_batches_are_prepared_and_metrics_do_not_wait(clips: dict[str, Path]) -> None:
    options = {"clip": {"frames": 4}, "transform": {"size": 32, "dtype": "float32"}, "batch": 2, "device": "cuda", "seed": 1}
    paths = [clips["h264"], clips["hevc"], clips["vp9"]] * 4
    with VideoLoader(paths, **options) as loader:
        expected = [float(batch.video.double().mean()) for batch in loader]
    with (
        VideoLoader(paths, **options) as loader,
        PipelineExecutor(loader, prepare=lambda batch: batch.video.double().mean()) as run,
    ):
        found = []
        for mean in run:
            torch.cuda._sleep(5_000_000)
            run.log(mean=mean)
            found.append(mean)
            assert isinstance(run.metrics(), dict)
    assert [float(mean) for mean in found] == pytest.approx(expected)
