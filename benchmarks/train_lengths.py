"""The case train-mixed-lengths: batches planned to a budget of tokens against fixed ones that are padded to the longest clip.

All subjects are fed by gpupipe, with the same clips in the same order, and train the same model within the same device memory,
so that they differ in how clips are put into batches, and in nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_cases import packets
from make_media import FPS, make
from train_loop import Mark, Measured
from train_steps import VIT_B, VIT_TINY, VideoVit, VitSize, adamw, train_step

from gpupipe import VideoLoader
from gpupipe.types import Batch

_SPARE_BYTES = 2 << 30
"""Of the limit, for what the loader has in preparation."""


@dataclass(frozen=True)
class Lengths:
    """``samples`` videos, of which the shares ``lengths`` have so many frames; ``batch`` clips are a fixed batch."""

    name: str
    kind: str
    model: VitSize
    lengths: dict[int, float]
    size: int
    batch: int
    samples: int

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def tokens(self, frames: int) -> int:
        """Tokens of a clip."""
        t, h, w = self.model.tubelet
        return (frames // t) * (self.size // h) * (self.size // w)


CASES = {
    case.name: case
    for case in (
        Lengths("train-mixed-lengths", "h264-256p", VIT_B, {16: 0.3, 24: 0.25, 32: 0.2, 48: 0.15, 64: 0.1}, 224, 8, 640),
        Lengths("train-mixed-lengths-tiny", "h264-tiny", VIT_TINY, {8: 0.4, 12: 0.4, 16: 0.2}, 64, 4, 40),
    )
}


def _planned(layout: str) -> Callable[[Lengths], dict[str, Any]]:
    return lambda case: {
        "size": case.batch * case.longest // min(case.lengths), "max_tokens": case.batch * case.tokens(case.longest),
        "patch": case.model.tubelet, "buckets": {"frames": sorted(case.lengths)}, "layout": layout,
    }  # fmt: skip


SUBJECTS: dict[str, Callable[[Lengths], dict[str, Any]]] = {
    "gpupipe": _planned("stack"),
    "gpupipe-pack": _planned("pack"),
    "gpupipe-pad": _planned("pad"),
    "fixed-longest": lambda case: {"size": case.batch},
    "fixed-batch-longest": lambda case: {"size": case.batch, "buckets": {"frames": sorted(case.lengths)}, "layout": "pad"},
}
"""The fields of ``batch``. ``fixed-longest`` pads to the longest clip of the set, ``fixed-batch-longest`` to the batch's."""
METRICS = ("samples_per_s", "peak_mib")


def videos(case: Lengths, media: Path, folder: Path, sources: int = 4) -> list[str]:
    """The case's files, each a link of its own to a source of its length, in an order that is the same for all."""
    made = {frames: make(media, [case.kind], sources=sources, seconds=frames / FPS)[case.kind] for frames in case.lengths}
    for frames, paths in made.items():
        assert all(len(packets(path)[0]) == frames for path in paths), paths
    counts = {frames: round(share * case.samples) for frames, share in case.lengths.items()}
    lengths = [frames for frames, count in counts.items() for _ in range(count)]
    np.random.default_rng(0).shuffle(lengths)
    folder.mkdir(parents=True)
    paths = [folder / f"{number:05}-{frames}.mp4" for number, frames in enumerate(lengths)]
    for number, (path, frames) in enumerate(zip(paths, lengths, strict=True)):
        os.link(made[frames][number % sources], path)
    return [str(path) for path in paths]


class Trainer:
    """The model, and the limit of device memory: what the largest fixed batch makes torch reserve, with a margin."""

    def __init__(self, case: Lengths, device: torch.device) -> None:
        self.case, self.device = case, device
        t, h, w = case.model.tubelet
        torch.manual_seed(0)
        self.model = VideoVit(case.model, (case.longest // t, case.size // h, case.size // w)).to(device)
        self.optimizer = adamw(self.model, device)
        video = torch.randn(case.batch, 3, case.longest, case.size, case.size, device=device, dtype=torch.bfloat16)
        mask = torch.ones(case.batch, case.longest, dtype=torch.bool, device=device)
        for _ in range(3):
            train_step(self.model, self.optimizer, video, mask)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            limit = 1.05 * torch.cuda.max_memory_reserved(device) + _SPARE_BYTES
            del video, mask
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, limit / torch.cuda.get_device_properties(device).total_memory), device
            )
            torch.cuda.reset_peak_memory_stats(device)

    def step(self, batch: Batch) -> int:
        """Trains on a batch: its frames that are no padding."""
        frames = [sum(clip.pick.mask) for clip in batch.clips]
        if "tokens" in batch:
            lengths = [self.case.tokens(each) for each in frames]
            train_step(self.model.packed, self.optimizer, batch["tokens"], batch["cu_seqlens"], lengths)
        else:
            train_step(self.model, self.optimizer, batch["video"], batch["mask"])
        return sum(frames)


def measure(case: Lengths, subject: str, media: Path, folder: Path, device: torch.device) -> Measured:
    """One epoch, from before the loader is made until its last step is done.

    Raises:
        RuntimeError: when samples or frames of them are missing.
    """
    trainer = Trainer(case, device)
    paths = videos(case, media, folder)
    wanted = sum(int(path.removesuffix(".mp4").rpartition("-")[2]) for path in paths)
    samples = frames = 0
    begin, last = time.perf_counter(), Mark(device)
    with VideoLoader(
        paths,
        clip={"frames": case.longest},
        transform={"size": case.size, "crop": "center", "hflip": 0.0, "dtype": "bfloat16"},
        batch={**SUBJECTS[subject](case), "last": "partial"},
        device=str(device),
        shuffle=False,
        on_bad_file="raise",
    ) as loader:
        for batch in loader:
            frames += trainer.step(batch)
            samples += len(batch.clips)
            before, last = last, Mark(device)
            before.wait()
        last.wait()
        seconds = time.perf_counter() - begin
    if (samples, frames) != (len(paths), wanted):
        raise RuntimeError(f"{samples} samples of {frames} frames came, not {len(paths)} of {wanted}")
    made = Measured({"samples_per_s": [samples / seconds]})
    if device.type == "cuda":
        made.values["peak_mib"] = [torch.cuda.max_memory_allocated(device) / 2**20]
    return made
