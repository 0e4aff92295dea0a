"""What a rank of bench_scaling.py does with the sample's model alone: split, with its tokens shared out, and under a profiler.

Videos are made on the device, the same on all ranks. Started under torchrun with a part and its folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clip_rates import synchronise
from scaling_ranks import Found, answer_in, join, task
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from video_dit import VideoDiT, VideoDiTConfig, flow_loss

from gpupipe.train import Precision
from gpupipe.train.parallel import balance, param_groups, sequence_parallel, tensor_parallel

Loss = Callable[[int], torch.Tensor]
Step = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
WARM_STEPS = 2
"""Before the clock starts, beyond those that are compared."""


class Model:
    """The sample's model and its steps.

    Args:
        given: the task.
        device: of this rank.
        dtype: of its products.
    """

    def __init__(self, given: Found, device: torch.device, dtype: str) -> None:
        sizes = given["trainer"]
        self.config = VideoDiTConfig(
            sizes["frames"], sizes["size"], sizes["size"], tuple(sizes.get("patch", (1, 4, 4))), sizes["hidden"],
            sizes["depth"], sizes["heads"],
        )  # fmt: skip
        self.batch, self.device = given["batch"], device
        torch.manual_seed(0)
        self.net = VideoDiT(self.config).to(device)
        with torch.no_grad():  # as it begins, most gradients are zero
            for value in self.net.parameters():
                value.add_(torch.randn(value.shape, device=device), alpha=0.02)
        self.precision = Precision({"dtype": dtype}, device)

    def clips(self, step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Videos, noise and times of a step; other ones for other ranks."""
        generator = torch.Generator(self.device).manual_seed(1000 * rank + step)
        config = self.config
        shape = (self.batch, config.channels, config.frames, config.height, config.width)
        video, noise = (torch.randn(shape, generator=generator, device=self.device) for _ in range(2))
        return video, noise, torch.rand(self.batch, generator=generator, device=self.device)

    def steps(self, loss_of: Loss) -> Step:
        """Steps of the optimizer, as loss and gradients' norm."""
        optimizer = torch.optim.AdamW(param_groups(self.precision.prepare(self.net)), lr=1e-4, fused=True)

        def step(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            with self.precision.autocast():
                loss = loss_of(number)
            self.precision.backward(loss)
            return loss.detach(), self.precision.step(optimizer, clip=1.0)

        return step


def alone(model: Model) -> Step:
    return model.steps(lambda step: flow_loss(model.net, *model.clips(step)))


def by_heads(model: Model) -> Step:
    tensor_parallel(model.net, init_device_mesh(model.device.type, (dist.get_world_size(),)))
    return alone(model)


def by_tokens(model: Model) -> Step:
    sequence = sequence_parallel(model.net, init_device_mesh(model.device.type, (dist.get_world_size(),)))
    called = DistributedDataParallel(model.net)

    def loss_of(step: int) -> torch.Tensor:
        video, noise, time = model.clips(step)
        return flow_loss(called, sequence.own(video, 2), sequence.own(noise, 2), time)

    step = model.steps(loss_of)

    def mean(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss, norm = step(number)
        dist.all_reduce(loss)
        return loss / sequence.ranks, norm

    return mean


WAYS: dict[str, Callable[[Model], Step]] = {"alone": alone, "tp": by_heads, "sp": by_tokens}


def split(given: Found, answer: Callable[[Found], None]) -> None:
    """Each way of ``ways``: losses and norms of its first steps, times of those behind, and the peak of memory."""
    device = join(given["device"])
    found: Found = {}
    for way in given["ways"]:
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        step = WAYS[way](Model(given, device, given["dtype"]))
        figures = [[float(value) for value in step(number)] for number in range(given["compared"])]
        for number in range(WARM_STEPS):
            step(number)
        times = timed(step, given["steps"], given["runs"], device)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found[way] = {"figures": figures, "step_ms": times, "peak_bytes": peak}
    answer(found)
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Step, steps: int, runs: int, device: torch.device) -> list[float]:
    """Milliseconds of a step, in each of so many windows."""
    times = []
    for _ in range(runs):
        synchronise(device)
        dist.barrier()
        begin = time.perf_counter()
        for number in range(steps):
            step(number)
        synchronise(device)
        times.append(1000 * (time.perf_counter() - begin) / steps)
    return times


def overlap(given: Found, answer: Callable[[Found], None]) -> None:
    """Steps with other batches on each rank, under DistributedDataParallel with each size of its buckets in ``buckets_mb``, and
    under fully_shard: their times, and what of exchange is beside work in a profile of some."""
    device = join(given["device"])
    found: Found = {}
    for name in (*given["buckets_mb"], "fsdp2"):
        model = Model(given, device, given["dtype"])
        called: nn.Module = model.net
        if name == "fsdp2":
            for block in model.net.blocks:
                fully_shard(block)
            fully_shard(model.net)
        else:
            called = DistributedDataParallel(model.net, bucket_cap_mb=name)
        step = model.steps(lambda number, called=called, model=model: flow_loss(called, *model.clips(number, dist.get_rank())))  # type: ignore[misc]
        for number in range(WARM_STEPS + 1):  # the first sets up buckets
            step(number)
        times = timed(step, given["steps"], given["runs"], device)
        seen: list[dict[str, Any]] = []
        for _ in range(given["runs"]):
            seen.append(profiled(step, given["profiled"], device))
        found[str(name)] = {"step_ms": times, "balance": seen}
    answer(found)
    dist.barrier()
    dist.destroy_process_group()


def profiled(step: Step, count: int, device: torch.device) -> dict[str, Any]:
    """What so many steps are made of, a step."""
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if device.type == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for number in range(count):
            with torch.cuda.nvtx.range(f"step {number}") if device.type == "cuda" else nullcontext():  # type: ignore[attr-defined]
                step(number)
        synchronise(device)
    made = balance(profile)
    return {
        "work_ms": made.work_ms / count,
        "exchange_ms": made.exchange_ms / count,
        "exposed_ms": made.exposed_ms / count,
        "hidden": made.hidden,
        "bound": made.bound,
        "said": str(made),
    }


PARTS: dict[str, Callable[[Found, Callable[[Found], None]], None]] = {"split": split, "overlap": overlap}

if __name__ == "__main__":
    PARTS[sys.argv[1]](task(Path(sys.argv[2])), answer_in(Path(sys.argv[2])))
