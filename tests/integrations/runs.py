"""What the tests of the trainers share: settings of a small loader, a small model, and what a run saw."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpupipe import Batch

HERE = Path(__file__).resolve().parent
SETTINGS: dict[str, Any] = {
    "clip": {"frames": 4, "stride": 2},
    "transform": {"size": 24, "dtype": "float32"},
    "batch": 2,
    "decode": {"threads": 2},
    "seed": 5,
}
"""Ten rows make five batches an epoch: an odd number, so that windows of two accumulated batches do not fit."""
VALIDATION: dict[str, Any] = {**SETTINGS, "shuffle": False, "batch": {"size": 2, "last": "partial"}}
Seen = tuple[int, tuple[int, ...], float]


class Classifier(nn.Module):
    """Means over 6x6 pixels and all frames, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pool = nn.AdaptiveAvgPool3d((1, 4, 4))
        self.head = nn.Linear(48, 3)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.pool(video).flatten(1))
        return logits


def fact(batch: Batch) -> Seen:
    """What tells a batch from any other: epoch, samples and pixels."""
    return batch.epoch, tuple(clip.request.sample for clip in batch.clips), batch.video.double().sum().item()


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


END = """
import os, sys
sys.stdout.flush()
os._exit(0)  # gloo's threads abort a process that ends by itself now and then, without any loader too
"""


def run_ranks(code: str, folder: Path, *arguments: Any, ranks: int = 2, launcher: bool = True) -> list[Any]:
    """Runs a script as torchrun would, once a rank; the lists that the first one printed as JSON.

    The script finds the arguments as JSON, then the folder. Without ``launcher`` it starts its further ranks itself.
    """
    (folder / "ranks.py").write_text(code + END)
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(folder / "ranks.py"), *map(json.dumps, arguments), str(folder)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks if launcher else 1)]
    processes = []
    for rank, log in enumerate(logs):
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        with log.open("w") as file:
            environment = {**common, **(told if launcher else {})}
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=folder))
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(codes), "\n".join(log.read_text() for log in logs)
    return [json.loads(line) for line in logs[0].read_text().splitlines() if line.startswith("[[")]


def run_sample(name: str, *arguments: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Runs a sample within this process, which has the trainer's package imported, and gives what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(HERE.parent.parent / "samples" / name), run_name="__main__")
    return printed.getvalue()
