"""The pages about training: each of their examples runs, one after the other, on a loader and a small model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gpupipe
from gpupipe import ops
from gpupipe.train import Ema

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(autouse=True)
def plain_ops() -> Iterator[None]:
    with ops.use("reference"):
        yield


class Model(nn.Module):
    """Takes what ends in 8 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch if isinstance(batch, torch.Tensor) else batch.video).square().mean()


@pytest.mark.parametrize("page", ["memory", "precision", "runtime"])
def test_examples_run_as_they_stand(
    page: str, clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no more in place than their names: a model, its optimizer, a loader, and a folder of videos."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("\n".join(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[:1]))
    (tmp_path / "videos").mkdir()
    for number in range(256):
        (tmp_path / "videos" / f"{number}.mp4").symlink_to(clips["h264"])
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(*batches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        for batch in batches[:1]:
            if "precision" not in known:
                return loss_of(model, batch).detach(), torch.zeros(())
            with known["precision"].autocast():
                loss = loss_of(model, batch)
            known["precision"].backward(loss)
        return loss.detach(), known["precision"].step(known["optimizer"])

    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(
            gpupipe.VideoLoader(
                [str(clips["h264"])] * 4,
                clip={"frames": 2},
                transform={"size": 8, "dtype": "float32" if page == "memory" else "bfloat16"},
                batch=1,
                device="cpu",
            )
        )
        known: dict[str, Any] = {
            "model": model, "optimizer": optimizer, "loader": loader, "loss_of": loss_of,
            "train_step": train_step, "ema": Ema(model), "logger": SimpleNamespace(log=dict),
            "batch": next(iter(loader)), "biggest": torch.ones(64, 8), "random_tokens": lambda tokens: torch.ones(tokens, 8),
            "vae": SimpleNamespace(encode=lambda video: video * 2), "validate": lambda model: None,
            "step": 0,
        }  # fmt: skip
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(example.replace('"cuda"', '"cpu"'), known)
            if known["loader"] is not loader:
                stack.enter_context(known["loader"])
    if page == "memory":
        assert known["plan"].size == 199_680, "most, as a multiple"
        assert known["buffers"].made == 1, "the loop uses one buffer again"
