"""The demo's training loop: an ordinary one, with VideoLoader where a DataLoader would be."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from gpupipe.data.loader import VideoLoader
from gpupipe.types import Batch


@dataclass
class TrainLog:
    """What a training run came to; one value a step in ``losses`` and ``waits`` (seconds), one an epoch in ``accuracies``."""

    steps_per_epoch: int
    losses: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    clips: int = 0
    train_seconds: float = 0.0
    """Wall time of the training steps with their waits, without validation."""
    decoders: Counter[str] = field(default_factory=Counter)
    first_batch: Batch | None = None

    @property
    def clips_per_s(self) -> float:
        return self.clips / self.train_seconds if self.train_seconds else 0.0

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1] if self.accuracies else 0.0


def train(
    model: nn.Module,
    clips: VideoLoader,
    held_out: VideoLoader,
    *,
    epochs: int,
    learning_rate: float = 8e-3,
    stop_at: float = 1.0,
    on_step: Callable[[TrainLog], None] | None = None,
) -> TrainLog:
    """Trains with AdamW and a one-cycle schedule (Smith, Super-Convergence, 2018), validating after each epoch.

    Args:
        model: takes ``video`` (B, 3, T, H, W) and gives logits; on the loaders' device.
        clips: training batches with ``label``.
        held_out: validation batches with ``label``; the same clips every time.
        epochs: the schedule's length and the most epochs.
        learning_rate: the schedule's peak.
        stop_at: training ends after an epoch whose validation accuracy is at least this.
        on_step: called after each step.
    """
    log = TrainLog(steps_per_epoch=len(clips))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=epochs * len(clips), pct_start=0.2)
    for epoch in range(epochs):
        clips.set_epoch(epoch)
        model.train()
        mark = began = time.perf_counter()
        for batch in clips:
            log.waits.append(time.perf_counter() - mark)
            if log.first_batch is None:
                log.first_batch = batch
            with _precision(batch.video):
                loss = F.cross_entropy(model(batch["video"]), batch["label"], label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            log.losses.append(loss.item())
            log.clips += len(batch.clips)
            log.decoders.update(clip.decoder for clip in batch.clips)
            log.train_seconds += time.perf_counter() - began
            began = time.perf_counter()
            if on_step:
                on_step(log)
            mark = time.perf_counter()
        log.accuracies.append(accuracy(model, held_out))
        if log.accuracies[-1] >= stop_at:
            break
    return log


@torch.no_grad()
def accuracy(model: nn.Module, held_out: VideoLoader) -> float:
    """Share of the held-out clips whose class the model names rightly, 0 to 1."""
    model.eval()
    held_out.set_epoch(0)  # the same frames of each video every time
    right = total = 0
    for batch in held_out:
        with _precision(batch.video):
            found = model(batch["video"]).argmax(dim=1)
        right += int((found == batch["label"]).sum())
        total += len(found)
    return right / total if total else 0.0


def _precision(video: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """bf16 autocast on a GPU; float32 as it is on the CPU."""
    return torch.autocast("cuda", torch.bfloat16) if video.is_cuda else contextlib.nullcontext()
