"""The tuner on a real GPU: it times, keeps the winner, and asks no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpupipe import ops
from gpupipe.device import autotune, disk

pytestmark = pytest.mark.gpu


def test_times_once_and_keeps_the_winner(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", "full")
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr("gpupipe.ops.norms.SMALL", -1)  # torch's own norm needs no tuner
    x = torch.randn(4096, 768, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(768, dtype=torch.bfloat16, device="cuda")
    exact = torch.nn.functional.rms_norm(x.double(), (768,), weight.double(), 1e-6)
    found = ops.rms_norm(x, weight)
    assert (found.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()
    assert len(list((fresh_cache / disk.LAUNCHES).iterdir())) == 1
    monkeypatch.setattr(autotune, "_chosen", {})  # as a new process would start
    monkeypatch.setattr(autotune, "cold_us", lambda *_: pytest.fail("timed again"))
    assert torch.equal(ops.rms_norm(x, weight), found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [512, 8192])
def test_the_best_is_among_those_that_the_model_would_try(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within noise; benchmarks/ranking.py does the same for every kernel of the benchmark."""
    monkeypatch.setenv("GPUPIPE_AUTOTUNE", "full")
    x = torch.randn(rows, 3072, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    scale = torch.randn(1, 3072, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with autotune.noting(64) as choices:
        ops.modulate_norm(x, scale, scale).float().sum().backward()
    assert {choice.op for choice in choices} == {"norm_forward", "norm_backward"}
    allowed = 2.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.15  # beside others that use the GPU, times say little
    for choice in choices:
        assert choice.us[choice.best(autotune.TIMED)] <= allowed * choice.us[choice.best()], choice
