"""What one rank of bench_scaling.py does; started under torchrun with the part, a folder for its answer, and JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_video_dit
from clip_rates import cpu_seconds, synchronise, warm_up
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from video_dit import VideoDiT

from gpupipe import Batch, VideoLoader
from gpupipe.observe.measure import measure

Found = dict[str, Any]
Answer = Callable[[Found], None]
WARM_STEPS = 3
"""Before the clock starts, at least."""


def join(device: str) -> torch.device:
    """Joins the group; this rank's device, ``cpu`` or the GPU of its number on this machine."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(own)
    return own


def loader_alone(given: Found, answer: Answer) -> None:
    """An epoch of each of ``videos``, as fast as the loader gives it: when it began and ended, and what that took."""
    device = join(given["device"])
    warm_up(device)
    runs = []
    for videos in given["videos"]:
        dist.barrier()
        cpu, begin = cpu_seconds(), time.time()
        with VideoLoader(videos, config=given["loader"], device=device) as loader:
            found = measure(loader)
            end = time.time()
            runs.append(
                {
                    "begin": begin,
                    "end": end,
                    "clips": found.clips,
                    "cpu_s": cpu_seconds() - cpu,
                    "nvdec_percent": found.resources.nvdec_percent_mean,
                    "host_bytes": found.resources.peak_host_bytes,
                    "device_bytes": found.resources.peak_device_bytes,
                }
            )
    answer({"runs": runs})
    dist.barrier()
    dist.destroy_process_group()


class Timed(train_video_dit.Trainer):
    """The trainer of the sample, whose run is so many steps with a clock beside them."""

    given: Found
    answer: Answer

    def run(self) -> None:
        steps, losses, times = train_video_dit.steps_of(self.loader), [], []

        def some(count: int) -> None:
            for parts in itertools.islice(steps, count):
                self.step += 1
                seen = self.watch.after(self.step, parts, *self.train_step(parts))
                losses.extend([seen.loss] if seen is not None else [])

        some(max(WARM_STEPS, self.given["steps"]))
        for _ in range(self.given["runs"]):
            synchronise(self.device)
            dist.barrier()
            begin = time.perf_counter()
            some(self.given["steps"])
            synchronise(self.device)
            times.append(1000 * (time.perf_counter() - begin) / self.given["steps"])
        losses += [seen.loss for seen in self.watch.settle()]
        if not all(map(math.isfinite, losses)):
            raise RuntimeError(f"losses that are not finite: {losses}")
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        weights = sum(float(whole(value.detach()).double().sum()) for value in self.net.parameters())
        type(self).answer({"step_ms": times, "peak_bytes": peak, "losses": losses, "weights": weights})
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


def train(given: Found, answer: Answer) -> None:
    """Steps of the sample's trainer, as a user starts it."""
    kind = Sharded if given["subject"] == "fsdp2" else Timed
    kind.given, kind.answer = given, staticmethod(answer)  # type: ignore[assignment]
    sys.argv[1:] = given["arguments"]
    train_video_dit.main(kind)


def resume(given: Found, answer: Answer) -> None:
    """So many batches from ``state`` on: of each clip what it is and a hash of its pixels; and the state behind them."""
    device = join(given["device"])
    steps, state = [], given["state"]
    with VideoLoader(given["videos"], config=given["loader"], device=device, repeat=True) as loader:
        loader.load_state_dict(state)
        for batch in itertools.islice(loader, given["steps"]):
            hashes = [hash_of(clip) for clip in batch.video]
            requests = [clip.request for clip in batch.clips]
            files = [Path(clip.path).name for clip in batch.clips]
            steps.append([[one.epoch, one.sample, *more] for one, *more in zip(requests, files, hashes, strict=True)])
            state = batch.state
    answer({"steps": steps, "state": state})
    dist.barrier()
    dist.destroy_process_group()


def hash_of(pixels: torch.Tensor) -> str:
    """Of the bits of a tensor."""
    return hashlib.blake2b(pixels.contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


PARTS: dict[str, Callable[[Found, Answer], None]] = {"loader": loader_alone, "train": train, "resume": resume}


def main() -> None:
    part, folder, given = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])

    def answer(found: Found) -> None:
        file = folder / f"rank{dist.get_rank()}.json"
        file.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        file.with_suffix(".part").rename(file)

    PARTS[part](given, answer)


if __name__ == "__main__":
    main()
