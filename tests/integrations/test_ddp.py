"""The sample of plain DistributedDataParallel, on two ranks: a run that goes on ends as the uninterrupted one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from runs import HERE, run_ranks

SAMPLE = HERE.parent.parent / "samples" / "train_ddp.py"
CODE = """
import json, runpy, sys, torch
torch.manual_seed(0)
_, sample, arguments, _ = sys.argv
sys.argv[1:] = json.loads(arguments)
runpy.run_path(json.loads(sample), run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_sample_goes_on_from_its_file(small_data: Path, tmp_path: Path) -> None:
    """Three batches an epoch and rank, a file behind the second: what goes on has the third, then the next epoch."""
    results = []
    for epochs, resume in ((1, ""), (2, "first.pt"), (2, "")):
        arguments = [str(small_data), "--epochs", str(epochs), *(["--resume", resume] if resume else [])]
        run_ranks(CODE, tmp_path, str(SAMPLE), arguments)
        shutil.move(tmp_path / "ddp.pt", tmp_path / ("first.pt" if epochs == 1 else "last.pt"))
        results.append(torch.load(tmp_path / ("first.pt" if epochs == 1 else "last.pt")))
        said = (tmp_path / "rank0.log").read_text()
        assert f"rank 0, epoch {epochs - 1}: validation accuracy" in said
    first, taken_up, whole = results
    assert (first["loader"]["epoch"], whole["loader"]["epoch"]) == (0, 1)
    assert first["loader"]["samples"] == 16
    assert taken_up["loader"] == whole["loader"]
    assert all(torch.equal(taken_up["model"][name], tensor) for name, tensor in whole["model"].items())
    assert any(not torch.equal(first["model"][name], tensor) for name, tensor in whole["model"].items())
