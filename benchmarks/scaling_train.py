"""What a rank of bench_scaling.py does with the sample's trainer; started under torchrun with a part and its folder."""

from __future__ import annotations

import itertools
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import train_video_dit
from clip_rates import synchronise
from scaling_ranks import Found, answer_in, task
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from video_dit import VideoDiT

from gpupipe import Batch

WARM_STEPS = 5
"""Before the clock starts."""


class Timed(train_video_dit.Trainer):
    """The trainer of the sample, whose run is so many steps with a clock beside them."""

    given: Found
    folder: Path

    def run(self) -> None:
        with self.batches:
            self.timed()

    def timed(self) -> None:
        steps, times = train_video_dit.steps_of(self.batches), list[float]()
        figures: list[tuple[float, float]] = []

        def some(count: int) -> None:
            for parts in itertools.islice(steps, count):
                self.step += 1
                seen = self.watch.after(self.step, parts, *self.train_step(parts))
                figures.extend([(seen.loss, seen.norm)] if seen is not None else [])

        some(WARM_STEPS)
        for _ in range(self.given["runs"]):
            synchronise(self.device)
            dist.barrier()
            begin = time.perf_counter()
            some(self.given["steps"])
            synchronise(self.device)
            times.append(1000 * (time.perf_counter() - begin) / self.given["steps"])
        figures += [(seen.loss, seen.norm) for seen in self.watch.settle()]
        if not all(map(math.isfinite, itertools.chain(*figures))):
            raise RuntimeError(f"losses and norms that are not finite: {figures}")
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        weights = sum(float(whole(value.detach()).double().sum()) for value in self.net.parameters())
        answer_in(self.folder)({"step_ms": times, "peak_bytes": peak, "figures": figures, "weights": weights})
        dist.barrier()


class Sharded(Timed):
    """The same with parameters, gradients and the optimizer's state in shards (FSDP2)."""

    def build(self) -> VideoDiT:
        net = super().build()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        return net

    def parallel(self) -> nn.Module:
        return self.net

    def train_step(self, parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, norm = super().train_step(parts)
        return loss, whole(norm)


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank may have a shard alone."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    """Steps of the sample's trainer, as a user starts it."""
    folder = Path(sys.argv[2])
    given = task(folder)
    kind = {"ddp": Timed, "fsdp2": Sharded}[given["subject"]]
    kind.given, kind.folder = given, folder
    sys.argv[1:] = given["arguments"]
    train_video_dit.main(kind)


if __name__ == "__main__":
    main()
