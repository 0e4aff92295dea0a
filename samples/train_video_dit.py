"""Trains a video diffusion transformer (video_dit.py) on clips of yours, or on a small set that it makes.

    python samples/train_video_dit.py                                     # on clips that it makes
    python samples/train_video_dit.py videos/ --frames 16 --size 128 --hidden 768 --depth 12 --heads 12 --micro-batch 2
    python samples/train_video_dit.py videos/ --vae Wan-AI/Wan2.1-T2V-1.3B-Diffusers --frames 17 --size 256 --hidden 768
    python samples/train_video_dit.py videos/ --config samples/train.yaml # all of it in one file
    torchrun --nproc_per_node 8 samples/train_video_dit.py videos/ --out run

Ended by SIGTERM or Ctrl-C it writes a checkpoint first, all ranks behind the same step; a second Ctrl-C ends it at once.
Started again with the same --out it goes on from checkpoint.pt, which holds weights, their averages, the optimizer, the loss
scale and where the data stood, as if it had never stopped. The loss of each step goes to losses.csv, videos that the averaged
model makes to samples-STEP.gif.

With --vae it learns latents of a frozen autoencoder, which encodes the next batch beside the training on this one.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from video_dit import VideoDiT, VideoDiTConfig, flow_loss, sample
from video_dit_options import loader_settings, parse, step_settings, videos_of, write_gif
from video_latents import Latents

from gpupipe import Batch, VideoLoader
from gpupipe.errors import ConfigError, GpupipeError
from gpupipe.train import (
    AdaptiveGraph,
    Ema,
    LeakWatch,
    PipelineExecutor,
    Precision,
    Watch,
    fuse,
    load_checkpoint,
    memory_report,
    recompute,
    reserve_memory,
    save_checkpoint,
)
from gpupipe.train.graphs import paused
from gpupipe.train.watch import Seen


class Trainer:
    """Model, data and what stands between them. All that a run consists of is in :meth:`save`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.step, self.stopping = options, 0, False
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        settings = loader_settings(options)
        self.loader = VideoLoader(
            videos_of(options, self.rank), **settings, device=options.device, seed=options.seed, repeat=True
        )
        self.device, self.seed = self.loader.device, self.loader.config.seed
        precision, self.step_config = step_settings(options, self.device)
        reserve_memory(self.step_config.memory, str(self.device))
        self.latents = Latents(options.vae, self.device, options.vae_at_once) if options.vae else None
        self.batches = PipelineExecutor(self.loader, prepare=self.prepared)
        torch.manual_seed(self.seed)  # all ranks begin with the same weights
        clips, (height, width) = self.loader.config.clip, self.loader.config.transform.size
        shape = self.latents.shape(clips.frames, height, width) if self.latents else (3, clips.frames, height, width)
        patch = tuple(options.patch or ((1, 2, 2) if self.latents else (1, 4, 4)))
        if any(side % step or not side for side, step in zip(shape[1:], patch, strict=True)):
            what = "latents" if self.latents else "clips"
            raise ConfigError(
                f"{what} of {' x '.join(map(str, shape[1:]))} (frames, rows, columns) are not filled by patches of {patch}",
                fix="give another --size or --frames, or --patch with three numbers that divide these",
            )
        self.config = VideoDiTConfig(*shape[1:], patch, options.hidden, options.depth, options.heads, shape[0])
        self.identity = asdict(self.config) | {"vae": options.vae}
        self.net = self.build()
        self.precision = Precision(precision, self.device)
        trained = self.precision.prepare(self.net)
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.ema = Ema(self.net, options.ema, weights=self.precision.masters)
        self.model = self.parallel()
        self.watch = Watch(self.net, self.loss_of, self.precision)
        self.hosts = dist.new_group(backend="gloo") if self.ranks > 1 else None  # of the CPUs: nobody waits for a GPU
        memory = self.step_config.memory
        self.leaks = LeakWatch(memory.leak_watch if memory is not None else None, device=self.device)
        self.noted: float | None = None
        """When the figures of a step were last told of, in this stretch of steps."""
        self.begun: tuple[int, float] | None = None
        """The step behind which this stretch of steps began, and when: a checkpoint ends it, which takes a time of its own."""
        self.checkpoint, self.losses = options.out / "checkpoint.pt", options.out / "losses.csv"

    def build(self) -> VideoDiT:
        """The model on its device, as the optimizer is to find it."""
        net = VideoDiT(self.config).to(self.device)
        fuse(net)  # layers of torch's: a model that is written over gpupipe.ops, as this one, has none left that count
        if isinstance(self.step_config.recompute, str):
            recompute(net, self.step_config.recompute, blocks=list(net.blocks))
        if self.step_config.cuda_graph is not None:
            AdaptiveGraph(net, **self.step_config.cuda_graph.model_dump(), device=self.device).installed()
        return net

    def parallel(self) -> nn.Module:
        """The model as a step calls it: over several ranks one that averages their gradients."""
        if self.ranks > 1 and not self.precision.masters:  # the gradients of those are averaged by the precision itself
            return DistributedDataParallel(self.net)
        return self.net

    def run(self) -> None:
        if self.checkpoint.exists():
            self.load()
        self.begin_losses()
        with self.batches:
            self.steps()

    def steps(self) -> None:
        """All that are left."""
        planned = isinstance(self.step_config.recompute, str)
        for parts in steps_of(self.batches):
            if self.step >= self.options.steps:
                break
            self.step += 1
            seen = self.watch.after(self.step, parts, *self.train_step(parts))
            if not planned:
                self.plan(parts[0])
                planned = True
            if seen is not None:
                self.note(seen, self.since_noted())
            self.leaks.after()
            stopping = self.all_stop()
            if stopping or self.step % self.options.save_every == 0 or self.step == self.options.steps:
                took = self.mean_of_stretch()  # these figures come all at once: nothing is between one's and the next one's
                for late in self.watch.settle():
                    self.note(late, took)
                self.save()
                self.begun = None
            if stopping:
                break
            if self.step % self.options.sample_every == 0 or self.step == self.options.steps:
                self.show()
                self.begun = None
            if self.begun is None:
                self.begun, self.noted = (self.step, time.perf_counter()), None
        if self.rank == 0:
            print(memory_report(self.device, model=self.net, optimizer=self.optimizer, averages=self.ema.averages.values()))

    def since_noted(self) -> float | None:
        """Seconds since the figures of the step before were told of; None behind those that came all at once."""
        before, self.noted = self.noted, time.perf_counter()
        return None if before is None else self.noted - before

    def mean_of_stretch(self) -> float | None:
        """Seconds that a step of this stretch took on average; None where it has none. Waits for the device."""
        if self.begun is None or self.begun[0] == self.step:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - self.begun[1]) / (self.step - self.begun[0])

    def all_stop(self) -> bool:
        """Whether this rank or another one has been asked to end: all of them hear of it behind the same step."""
        if self.hosts is None:
            return self.stopping
        asked = torch.tensor(int(self.stopping))
        dist.all_reduce(asked, dist.ReduceOp.MAX, self.hosts)
        return bool(asked)

    def plan(self, part: Batch) -> None:
        """What is made again for a budget of memory; asked behind a step, when the optimizer's state is there."""
        blocks = list(self.net.blocks)
        print(recompute(self.net, self.step_config.recompute, step=lambda: self.forward(part), blocks=blocks))

    def train_step(self, parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the optimizer, by the gradients of all its parts; its loss and the gradients' norm, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, self.step / max(1, self.options.warmup))
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self.model.no_sync() if self.waits(part) else contextlib.nullcontext():  # type: ignore[operator]
                loss = self.forward(part)
                self.precision.backward(loss)
            total += loss.detach()
        if self.ranks > 1:
            dist.all_reduce(total)
            total /= self.ranks
        norm = self.precision.step(self.optimizer, clip=self.options.clip)
        self.ema.update()
        return total, norm

    def waits(self, part: Batch) -> bool:
        """Whether the gradients of a part stay on this rank until those of the step's last part are there."""
        return isinstance(self.model, DistributedDataParallel) and part.part[0] + 1 < part.part[1]

    def prepared(self, part: Batch) -> Batch:
        """What is learned of a batch; works beside the training on the one before."""
        return part if self.latents is None else part.like({"video": self.latents.encode(part.video)})

    def forward(self, part: Batch) -> torch.Tensor:
        """The part's share of its step's loss, in the precision that is asked for."""
        with self.precision.autocast():
            return self.loss_of(self.model, part)

    def loss_of(self, model: nn.Module, part: Batch) -> torch.Tensor:
        """The part's share of its step's loss."""
        noise, time = drawn(part, self.seed)
        return flow_loss(model, part.video, noise, time) * part.share

    def note(self, seen: Seen, took: float | None) -> None:
        """Takes down the figures of a step, and the seconds that it took; one that was not finite is done again."""
        if seen.report is not None and self.watch.config.repeat != "no":
            with self.watch.careful():
                seen = self.watch.after(seen.step, seen.batches, *self.train_step(list(seen.batches))) or seen
        if self.rank == 0:
            with self.losses.open("a", newline="") as lines:
                csv.writer(lines, lineterminator="\n").writerow([seen.step, seen.loss, seen.norm, seen.scale])
            timed = "" if took is None else f", {1000 * took:.0f} ms"
            print(f"step {seen.step}: loss {seen.loss:.4f}, gradients {seen.norm:.3f}{timed}", flush=True)

    def begin_losses(self) -> None:
        """The losses up to the step from which this goes on: what was done after the checkpoint is done again."""
        if self.rank == 0:
            self.options.out.mkdir(parents=True, exist_ok=True)
            kept = self.losses.read_text().splitlines()[1:] if self.losses.exists() else []
            kept = [line for line in kept if line.count(",") == 3 and int(line.split(",")[0]) <= self.step]
            self.losses.write_text("\n".join(["step,loss,norm,scale", *kept]) + "\n")

    def save(self) -> None:
        if self.rank == 0:  # its loader's state serves all ranks
            save_checkpoint(
                self.checkpoint,
                step=self.step,
                config=self.identity,
                model=self.net.state_dict(),
                ema=self.ema.state_dict(),
                optimizer=self.optimizer.state_dict(),
                precision=self.precision.state_dict(),
                loader=self.batches.state_dict(),
            )
            print(f"checkpoint behind step {self.step}", flush=True)

    def load(self) -> None:
        found = load_checkpoint(self.checkpoint, device=self.device)
        if {"vae": None} | found["config"] != self.identity:
            raise SystemExit(f"{self.checkpoint} is of another model, {found['config']}: give its options, or another --out")
        self.step = found["step"]
        self.net.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.precision.load_state_dict(found["precision"], self.net)
        self.ema.load_state_dict(found["ema"])
        self.batches.load_state_dict(found["loader"])
        if self.rank == 0:
            print(f"goes on behind step {self.step}", flush=True)

    def show(self) -> None:
        """Four videos that the averaged model makes, from the same noise each time."""
        if self.rank == 0:
            config, generator = self.config, torch.Generator(self.device).manual_seed(self.seed)
            shape = (4, config.channels, config.frames, config.height, config.width)
            noise = torch.randn(shape, generator=generator, device=self.device)
            with self.ema.applied(), self.precision.autocast(), paused():
                made = sample(self.net, noise, self.options.sample_steps)
            video = made if self.latents is None else self.latents.decode(made)
            write_gif(self.options.out / f"samples-{self.step:06d}.gif", video)


def drawn(part: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise (B, C, T, H, W) and times (B,), which are dense in the middle (logit-normal; Esser et al. 2024).

    Each clip has a generator of its own, so that neither parts nor ranks nor a new start change what it draws.
    """
    generator = torch.Generator(part.video.device)
    noise, place = [], []
    for clip in part.clips:
        key = repr((seed, clip.request.epoch, clip.request.sample, clip.clip)).encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        noise.append(torch.randn(part.video.shape[1:], generator=generator, device=part.video.device))
        place.append(torch.randn((), generator=generator, device=part.video.device))
    return torch.stack(noise), torch.stack(place).sigmoid()


def steps_of(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """The parts of each step of the optimizer."""
    parts: list[Batch] = []
    for part in batches:
        parts.append(part)
        if part.part[0] + 1 == part.part[1]:
            yield parts
            parts = []


def interrupted(trainer: Trainer, *_: object) -> None:
    """What Ctrl-C does: the first asks as SIGTERM does, the second ends the run where it is."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer.stopping = True
    os.write(2, b"ends behind this step, with a checkpoint; Ctrl-C once more ends it at once\n")  # print may be at work


def main(trainer_of: type[Trainer] = Trainer) -> None:
    options = parse(__doc__)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group()  # before the loader, which takes rank and world size from it
        if options.device in (None, "auto") and torch.cuda.is_available():
            options.device = f"cuda:{dist.get_node_local_rank()}"
            torch.cuda.set_device(options.device)
    try:
        trainer = trainer_of(options)
    except GpupipeError as error:  # of what was asked for: its own words say what to do, a traceback nothing
        print(f"train_video_dit.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stopping", True))  # clusters ask before they kill
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, partial(interrupted, trainer))
    with trainer.loader:
        trainer.run()
    if trainer.rank == 0:
        print(f"{options.out}: losses.csv, checkpoint.pt, and samples-STEP.gif where there are any", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
