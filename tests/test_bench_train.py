"""The benchmark of training steps: that its subjects do the same work, and that one that does not is found out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bench_train
import pytest
import torch
import train_loop
from bench_train import SUBJECTS, Part, Training
from video_dit import VideoDiT, VideoDiTConfig

from gpupipe import ops

CPU = torch.device("cpu")
TINY = VideoDiTConfig(frames=4, height=8, width=8, patch=(2, 2, 4), hidden=32, depth=2, heads=2, channels=4)


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    with ops.use("reference"):
        yield


def test_the_plain_model_is_the_same_model() -> None:
    """Over the same weights, float32: outputs and all gradients, so that eager is measured at equal work."""
    made = [bench_train.model_of(fused, TINY, CPU) for fused in (True, False)]
    video, _, time = bench_train.inputs_of(TINY, 3, CPU)
    outs = [model(video, time) for model in made]
    assert made[0].state_dict().keys() == made[1].state_dict().keys()
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-4)
    for out in outs:
        out.square().mean().backward()
    for (name, one), other in zip(made[0].named_parameters(), made[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_each_subject_gives_the_gradients_that_eager_gives() -> None:
    inputs, eager, exact = bench_train.expected(TINY, CPU)
    for name, part in SUBJECTS.items():
        if part.compiled == "no":
            bench_train.compare(Training(part, TINY, CPU).results(inputs), eager, exact)
            assert set(eager) == {"loss", *dict(VideoDiT(TINY).named_parameters())}, name


def test_a_subject_that_does_other_work_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(VideoDiT):
        def forward(self, video: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return super().forward(video, time) * 1.1

    monkeypatch.setattr(bench_train, "VideoDiT", Lazy)
    rows = bench_train.step_rows(TINY, 1, ["eager", "fused"], CPU, runs=1)
    found = {(row.subject, row.metric): row for row in rows}
    assert found["eager", "step_ms"].value is not None
    assert "off in the mean" in str(found["fused", "step_ms"].error)
    assert ("fused", "samples_per_s") not in found


def test_steps_change_the_weights_of_every_subject() -> None:
    inputs = bench_train.inputs_of(TINY, 1, CPU)
    for name, part in SUBJECTS.items():
        if part.compiled == "no":
            training = Training(part, TINY, CPU, rate=1e-2)
            before = training.net.last.weight.detach().clone()
            training.step(inputs)
            assert not torch.equal(before, training.net.last.weight), name
            assert all(value.grad is None for value in training.parameters), name


def test_losses_further_from_eagers_than_another_order_s_are_no_figure() -> None:
    curves = {"eager": [1.0] * 30, bench_train.ANOTHER: [1.1] * 30, "near": [1.05] * 30, "far": [1.2] * 30}
    assert bench_train.verdict("case", "near", "near", curves).value == pytest.approx(1.05)
    far = bench_train.verdict("case", "far", "far", curves)
    assert far.value is None
    assert "0.20000 off eager's" in str(far.error)
    assert bench_train.verdict("case", "eager", bench_train.ANOTHER, curves).value == pytest.approx(1.1)


def test_the_narrow_model_learns() -> None:
    videos = torch.rand(4, 4, 1, 1, 1).expand(4, 4, 4, 8, 8).contiguous()
    losses = bench_train.train(Part(precision={"dtype": "float32"}), 0, TINY, videos, 40, CPU)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_launches_are_what_the_host_sends() -> None:
    def event(kind: str, name: str) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": 0, "dur": 1, "args": {"stream": 7}}

    sent = [event("cuda_runtime", name) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")]
    sent += [event("cuda_driver", "cuLaunchKernelEx"), event("cuda_runtime", "cudaGraphLaunch")]
    others = [event("cuda_runtime", name) for name in ("cudaStreamSynchronize", "cudaEventRecord", "cudaMalloc")]
    kernels = [event("kernel", "LaunchKernel")] * 50
    assert train_loop.launches(sent + others + kernels) == 5


def test_memory_of_graphs_is_in_the_peak() -> None:
    def segment(pool: tuple[int, int], total: int, used: int) -> dict[str, Any]:
        return {"segment_pool_id": pool, "total_size": total, "allocated_size": used}

    shared, graphs = segment((0, 0), 100, 10), [segment((0, 1), 50, 20), segment((3, 0), 7, 7)]
    assert bench_train.unseen_bytes([shared, *graphs]) == 30


@pytest.mark.parametrize("fused", [False, True])
def test_the_model_compiles_once_and_whole(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that compiles anew would be in the time of the peer, and so in a user's."""
    whole, one = torch.compile, VideoDiTConfig(**{**vars(TINY), "depth": 1})
    monkeypatch.setattr(torch, "compile", lambda model, **_: whole(model, fullgraph=True, backend="aot_eager"))
    training = Training(Part(fused=fused, compiled="default"), one, CPU)
    training.net.rope_on(CPU)
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = [float(training(torch.randn(1, 4, 4, 8, 8))) for _ in range(3)]
    assert len(set(losses)) == 3
    torch._dynamo.reset()
