"""The benchmark of training steps: that its subjects do the same work, and that one that does not is found out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_train
import pytest
import torch
import train_curves
import train_feed
import train_loop
import train_models
import train_parts
from loader_cases import Draw
from train_models import Reference
from train_parts import SUBJECTS, Part, Training
from video_dit import VideoDiT, VideoDiTConfig

from gpupipe import ops

CPU = torch.device("cpu")
TINY = Reference(VideoDiTConfig(frames=4, height=8, width=8, patch=(2, 2, 4), hidden=32, depth=2, heads=2, channels=4))


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    with ops.use("reference"):
        yield


def test_the_plain_model_is_the_same_model() -> None:
    """Over the same weights, float32: outputs and all gradients, so that eager is measured at equal work."""
    made = [TINY.build(fused, CPU) for fused in (True, False)]
    video, _, time = train_models.inputs_of(TINY, 3, CPU)
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
    truth = train_parts.expected(TINY, CPU)
    assert set(truth.exact) == {"loss", *dict(VideoDiT(TINY.config).named_parameters())}
    for part in SUBJECTS.values():
        if part.compiled == "no":
            truth.check(Training(part, TINY, CPU).results(truth.inputs))


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_models_of_diffusers_are_the_same_fused_or_not(family: str) -> None:
    """Eager's norms are torch's own in the place of theirs: that must be the model as it was published, parameters and all."""
    pytest.importorskip("diffusers")
    model = bench_train.QUICK[family]
    plain, fused = (model.build(one, CPU) for one in (False, True))
    assert plain.state_dict().keys() == fused.state_dict().keys()
    inputs = train_models.inputs_of(model, 2, CPU)
    losses = [model.loss(net, *inputs) for net in (plain, fused)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-4)
    assert sum(isinstance(module, train_models.RmsNorm) for module in plain.modules()) >= 2
    truth = train_parts.expected(model, CPU)
    for name in bench_train.PUBLISHED_SUBJECTS:
        if SUBJECTS[name].compiled == "no":
            truth.check(Training(SUBJECTS[name], model, CPU).results(truth.inputs))


def test_what_is_missing_or_late_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise RuntimeError(f"{name} cannot be used")

    monkeypatch.setattr(train_models, "load", absent)
    told: list[Any] = []
    rows = bench_train.step_rows(bench_train.QUICK["wan"], 1, ["eager", "fused"], CPU, 1, told.append, lambda: True)
    assert [(row.subject, row.value) for row in rows] == [("eager", None), ("fused", None)]
    assert all("diffusers cannot be used" in str(row.error) for row in rows)
    assert [row for part in told for row in part] == rows, "each is told as soon as it is there"
    late = bench_train.step_rows(TINY, 1, ["eager"], CPU, 1, told.append, lambda: False)
    assert "the time was up" in str(late[0].error)


def test_saved_memory_is_what_a_forward_leaves() -> None:
    """A deeper model leaves more, one that computes in bf16 less; and what CUDA graphs keep all the time is no such figure."""
    inputs = train_models.inputs_of(TINY, 2, CPU)
    one, two = (Training(SUBJECTS["bf16"], model, CPU).saved_gb(inputs) for model in (TINY.one_block(), TINY))
    wide = Training(Part(precision={"dtype": "float32"}), TINY, CPU).saved_gb(inputs)
    assert one is not None
    assert two is not None
    assert wide is not None
    assert 0 < one < two < wide
    assert Training(SUBJECTS["graphs"], TINY, CPU).saved_gb(inputs) is None


def test_a_subject_that_does_other_work_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(VideoDiT):
        def forward(self, video: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return super().forward(video, time) * 1.1

    monkeypatch.setattr(train_models, "VideoDiT", Lazy)
    rows = bench_train.step_rows(TINY, 1, ["eager", "fused"], CPU, 1, lambda _: None, lambda: True)
    found = {(row.subject, row.metric): row for row in rows}
    assert found["eager", "step_ms"].value is not None
    assert "off in the mean" in str(found["fused", "step_ms"].error)
    assert ("fused", "samples_per_s") not in found


def test_steps_change_the_weights_of_every_subject() -> None:
    inputs = train_models.inputs_of(TINY, 1, CPU)
    for name, part in SUBJECTS.items():
        if part.compiled == "no":
            training = Training(part, TINY, CPU, rate=1e-2)
            weight = training.net.get_parameter("last.weight")
            before = weight.detach().clone()
            training.step(inputs)
            assert not torch.equal(before, weight), name
            assert all(value.grad is None for value in training.parameters), name


def test_losses_further_from_eagers_than_another_order_s_are_no_figure() -> None:
    curves = {"eager": [1.0] * 30, train_curves.ANOTHER: [1.1] * 30, "near": [1.05] * 30, "far": [1.2] * 30}
    assert train_curves.verdict("case", "near", "near", curves).value == pytest.approx(1.05)
    far = train_curves.verdict("case", "far", "far", curves)
    assert far.value is None
    assert "0.20000 off eager's" in str(far.error)
    assert train_curves.verdict("case", "eager", train_curves.ANOTHER, curves).value == pytest.approx(1.1)


def test_the_narrow_model_learns() -> None:
    videos = torch.rand(4, 4, 1, 1, 1).expand(4, 4, 4, 8, 8).contiguous()
    losses = train_curves.train(Part(precision={"dtype": "float32"}), 0, TINY, videos, 40, CPU)
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
    whole, one = torch.compile, TINY.one_block()
    monkeypatch.setattr(torch, "compile", lambda model, **_: whole(model, fullgraph=True, backend="aot_eager"))
    training = Training(Part(fused=fused, compiled="default"), one, CPU)
    assert isinstance(training.net, VideoDiT)
    training.net.rope_on(CPU)
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = [float(training(torch.randn(1, 4, 4, 8, 8))) for _ in range(3)]
    assert len(set(losses)) == 3
    torch._dynamo.reset()


def test_a_fed_step_is_on_the_clips_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the executor as by a DataLoader, in latents as in pixels: else the subjects would not do equal work."""
    pytest.importorskip("diffusers")
    options = argparse.Namespace(media=tmp_path, warmup=0.0, windows=1, seconds=0.0)
    for feed in ("pixels-tiny", "latents-tiny"):
        for subject in ("pipeline", "gpupipe"):
            found = train_feed.measured(train_feed.FEEDS[feed], subject, tmp_path / f"{feed}-{subject}", CPU, options)
            values = {row.metric: row.value for row in found}
            assert set(values) == {"step_ms", "samples_per_s", "wait_ms_p99", "unhidden_percent"}
            assert 0 <= (values["unhidden_percent"] or 0) <= 100

    class Late(train_feed.Executed):
        def __init__(self, case: Any, draws: Any, device: Any, encode: Any) -> None:
            super().__init__(case, [Draw(one.path, one.start + 3) for one in draws], device, encode)

    monkeypatch.setattr(train_feed, "Executed", Late)
    with pytest.raises(RuntimeError, match="wrong output"):
        train_feed.measured(train_feed.FEEDS["pixels-tiny"], "pipeline", tmp_path / "late", CPU, options)
