"""Loss curves of bench_train.py: a narrow model of each kind learns real clips, with each subject alike."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_block import Curves, generator, smooth
from common import NOT_BEGUN, Row, failed, summarise
from train_models import Model
from train_parts import SUBJECTS, Part, Training

from gpupipe import VideoLoader
from gpupipe.cli.demo_data import make_clips

LOSS_RATE, LOSS_BATCH = 1e-3, 8
ANOTHER = "eager-another-order"


def real_clips(model: Model, clips: int) -> torch.Tensor:
    """What the narrow models learn: (clips, 3, T, H, W), float32 of -1 to 1, decoded from files."""
    _, frames, height, width = model.shape
    with tempfile.TemporaryDirectory() as folder:
        made = make_clips(Path(folder), train=-(-clips // 6), val=1)
        look = {"preset": "diffusion", "size": (height, width), "dtype": "float32"}
        one = {"clip": {"frames": frames, "stride": 2}, "transform": look, "batch": 6, "shuffle": False, "device": "cpu"}
        with VideoLoader(made.train, config=one) as loader:
            return torch.cat([batch.video for batch in loader])


def train(part: Part, order: int, model: Model, videos: torch.Tensor, steps: int, device: torch.device) -> list[float]:
    """The loss of each step; ``order`` seeds which videos, times and noise come when."""
    training, source, losses = Training(part, model, device, LOSS_RATE), generator(order), []
    for _ in range(steps):
        clean = videos[torch.randint(len(videos), (LOSS_BATCH,), generator=source)]
        noise, time = torch.randn(clean.shape, generator=source), torch.rand(LOSS_BATCH, generator=source)
        losses.append(training.step((clean.to(device), noise.to(device), time.to(device))))
    return [float(loss) for loss in losses]


def loss_rows(
    model: Model,
    subjects: Sequence[str],
    videos: torch.Tensor,
    steps: int,
    device: torch.device,
    begin: Callable[[], bool] = lambda: True,
) -> tuple[list[Row], Curves]:
    """The loss that each subject comes to, and the curves; it counts if it is as near to eager's as another order of data.

    ``torch.compile`` is left out: it computes what eager does, and compiling takes longer than all the training.

    Args:
        begin: asked before each; False: the time is up.
    """
    case = f"loss-{model.case}"
    rows: list[Row] = []
    curves: Curves = {}
    for name in ["eager", ANOTHER, *(name for name in subjects if name != "eager" and SUBJECTS[name].compiled == "no")]:
        # The other order is a case of its own: beside the subjects it would pass for one that did the same.
        own, subject = (f"{case}-another-order", "eager") if name == ANOTHER else (case, name)
        try:
            if not begin():
                raise TimeoutError(NOT_BEGUN)
            curves[name] = train(SUBJECTS[subject], int(name == ANOTHER), model, videos, steps, device)
            rows.append(verdict(own, subject, name, curves))
        except Exception as fault:  # whatever a subject raises is its result, told in its row
            rows.append(failed(own, subject, "loss_final", f"{type(fault).__name__}: {fault}", "lower"))
    return rows, curves


def verdict(case: str, subject: str, name: str, curves: Curves) -> Row:
    """The row of a curve that was just trained."""
    if subject != "eager" and "eager" in curves and ANOTHER in curves:
        gaps = [float((smooth(curves[each]) - smooth(curves["eager"])).abs().mean()) for each in (name, ANOTHER)]
        if not gaps[0] <= gaps[1]:
            told = f"{gaps[0]:.5f} off eager's losses in the mean, another order of data {gaps[1]:.5f}"
            return failed(case, subject, "loss_final", told, "lower")
    return summarise(case, subject, "loss_final", [float(smooth(curves[name])[-1])], "lower")
