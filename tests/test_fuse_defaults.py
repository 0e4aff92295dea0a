"""What fuse leaves alone by default: made from results of benchmarks, and heeded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuse_defaults
import pytest
import torch
from common import gpu_slug
from torch import nn

from gpupipe.train import defaults, fuse, switches

ROOT = Path(__file__).resolve().parent.parent


def row(case: str, subject: str, value: float | None, metric: str = "gpu_time_us") -> dict[str, Any]:
    return {"case": case, "subject": subject, "metric": metric, "better": "lower", "value": value, "error": "out of registers"}


def pair(case: str, ours: tuple[float, float], eager: tuple[float, float]) -> list[dict[str, Any]]:
    sides = zip(("fwd", "bwd"), ours, eager, strict=True)
    return [row(f"{case}-{side}", name, value) for side, a, b in sides for name, value in (("gpupipe", a), ("eager", b))]


OPS = [
    *pair("mlp-n32768-h3072-bf16", (100.0, 300.0), (100.0, 250.0)),
    *pair("layer_norm-n32768-h3072-bf16", (10.0, 20.0), (20.0, 30.0)),
    *pair("layer_norm-n1024-h3072-bf16", (3.3, 3.3), (3.0, 3.0)),
    *pair("linear_act-n32768-h3072-bf16", (101.0, 101.0), (100.0, 100.0)),
    *pair("qkv_linear-n32768-h3072-bf16", (99.0, 99.0), (100.0, 100.0)),
    row("conv3d_act-c128-16x128x128-bf16-fwd", "gpupipe", None),
    row("conv3d_act-c128-16x128x128-bf16-fwd", "eager", 5.0),
    row("mlp-n32768-h3072-bf16-fwd", "limit", 1.0),
    row("softmax_dropout-8x24x2048x2048-bf16-fwd", "gpupipe", 9.0),
    row("softmax_dropout-8x24x2048x2048-bf16-fwd", "eager", 1.0),
]
BLOCK = [
    row("factorised-t32", name, value, "step_ms") for name, value in (("gpupipe", 44.0), ("eager", 40.0), ("compile", 30.0))
]
TRAIN = [
    row("video_dit", name, value, "step_ms")
    for name, value in (("eager", 100.0), ("fused", 110.0), ("fused-mlp", 97.0), ("fused-attention", 107.0))
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name, rows in (("ops", OPS), ("block", BLOCK)):
        for gpu in ("h200", "cpu"):
            (tmp_path / f"{name}--{gpu}.json").write_text(json.dumps({"benchmark": name, "rows": rows}))
    return tmp_path


def written(folder: Path) -> dict[str, dict[str, str]]:
    names: dict[str, Any] = {}
    exec(fuse_defaults.written(folder), names)
    found: dict[str, dict[str, str]] = names["SLOWER"]
    return found


def test_what_measured_slower_is_off_on_that_gpu(results: Path) -> None:
    """By both sides together and over all sizes; within the noise, and what no kind goes through, is not."""
    assert written(results) == {
        "h200": {
            "block": "1.10 times eager's time in block (1 case)",
            "conv_block": "failed in ops: out of registers",
            "mlp": "1.14 times eager's time in ops (1 case)",
        }
    }


def test_a_training_step_outweighs_ops_alone(results: Path) -> None:
    """A kernel that loses alone may win in a step, and the other way round."""
    (results / "train--h200.json").write_text(json.dumps({"benchmark": "train", "rows": TRAIN}))
    found = written(results)["h200"]
    assert "mlp" not in found
    assert found["attention"] == "1.07 times eager's time in train (1 case)"
    assert set(found) == {"attention", "block", "conv_block"}


def test_the_script_rewrites_the_defaults_and_tells_when_they_are_old(results: Path, tmp_path: Path) -> None:
    file = tmp_path / "defaults.py"
    file.write_text(Path(defaults.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "fuse_defaults.py"),
        "--results",
        str(results),
        "--defaults",
        str(file),
    ]
    assert subprocess.run([*command, "--check"], capture_output=True).returncode == 1
    assert subprocess.run(command).returncode == 0
    assert subprocess.run([*command, "--check"]).returncode == 0
    names: dict[str, Any] = {}
    exec(file.read_text(encoding="utf-8"), names)
    assert set(names["slower"]("h200")) == {"block", "conv_block", "mlp"}
    assert names["slower"]("a100") == {}
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA H200"):
        assert names["slug"](name) == gpu_slug(name), "the results of this GPU would not be found"


def test_the_committed_defaults_are_what_the_committed_results_say() -> None:
    text = Path(defaults.__file__).read_text(encoding="utf-8")
    assert fuse_defaults.rewritten(text, fuse_defaults.written(fuse_defaults.RESULTS)) == text


def test_every_kind_that_has_ops_has_cases_of_them() -> None:
    """A case that is renamed would no longer count."""
    from op_cases import all_cases

    cases = {case.name.partition("-")[0] for case in all_cases()}
    assert {op for ops in fuse_defaults.OPS.values() for op in ops} <= cases
    assert set(fuse_defaults.OPS) <= set(switches.KINDS)


def test_a_kind_that_is_slower_is_left_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody asks for it."""
    monkeypatch.setattr(defaults, "SLOWER", {"h200": {"norm": "1.30 times eager's time in ops (2 cases)"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    report = fuse(model)
    assert [entry.name for entry in report.replaced] == ["1"]
    assert "norm: 1.30 times eager's time in ops (2 cases)" in str(report)
    assert [entry.name for entry in fuse(model, kinds=["norm"]).replaced] == ["0"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    assert len(fuse(nn.LayerNorm(8)).replaced) == 1
