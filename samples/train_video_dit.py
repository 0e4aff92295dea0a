"""Trains a video diffusion transformer (video_dit.py) on clips of yours, or on a small set that it makes.

    python samples/train_video_dit.py                                     # on clips that it makes
    python samples/train_video_dit.py videos/ --frames 16 --size 128 --hidden 768 --depth 12 --heads 12 --micro-batch 2
    torchrun --nproc_per_node 8 samples/train_video_dit.py videos/ --out run

Ended by SIGTERM it writes a checkpoint first, all ranks behind the same step. Started again with the same --out it goes on from
checkpoint.pt, which holds weights, their averages, the optimizer, the loss scale and where the data stood, as if it had never
stopped. The loss of each step goes to losses.csv, videos that the averaged model makes to samples-STEP.gif.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from video_dit import VideoDiT, VideoDiTConfig, flow_loss, sample

from gpupipe import Batch, VideoLoader
from gpupipe.cli.demo_data import make_clips
from gpupipe.train import (
    Ema,
    LeakWatch,
    Precision,
    Watch,
    load_checkpoint,
    memory_report,
    reserve_memory,
    save_checkpoint,
)
from gpupipe.train.watch import Seen


class Trainer:
    """Model, data and what stands between them. All that a run consists of is in :meth:`save`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.step, self.stopping = options, 0, False
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.loader = VideoLoader(
            videos_of(options, self.rank),
            clip={"frames": options.frames, "stride": options.stride},
            transform={"preset": "diffusion", "size": options.size, "dtype": "float32"},  # -1 to 1
            batch={"size": options.batch, "micro_size": options.micro_batch},
            device=options.device,
            seed=options.seed,
            repeat=True,
        )
        self.device = self.loader.device
        reserve_memory(options.reserve, str(self.device))
        torch.manual_seed(options.seed)  # all ranks begin with the same weights
        patch, size = tuple(options.patch), options.size
        self.config = VideoDiTConfig(options.frames, size, size, patch, options.hidden, options.depth, options.heads)
        self.net = self.build()
        dtype = options.dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        self.precision = Precision({"dtype": dtype, "master_weights": options.master_weights}, self.device)
        trained = self.precision.prepare(self.net)
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.ema = Ema(self.net, options.ema, weights=self.precision.masters)
        self.model = self.parallel()
        self.watch = Watch(self.net, self.loss_of, self.precision)
        self.hosts = dist.new_group(backend="gloo") if self.ranks > 1 else None  # of the CPUs: nobody waits for a GPU
        self.leaks = LeakWatch(device=self.device)
        self.checkpoint, self.losses = options.out / "checkpoint.pt", options.out / "losses.csv"

    def build(self) -> VideoDiT:
        """The model on its device, as the optimizer is to find it."""
        return VideoDiT(self.config).to(self.device)

    def parallel(self) -> nn.Module:
        """The model as a step calls it: over several ranks one that averages their gradients."""
        if self.ranks > 1 and not self.precision.masters:  # the gradients of those are averaged by the precision itself
            return DistributedDataParallel(self.net)
        return self.net

    def run(self) -> None:
        if self.checkpoint.exists():
            self.load()
        self.begin_losses()
        for parts in steps_of(self.loader):
            if self.step >= self.options.steps:
                break
            self.step += 1
            seen = self.watch.after(self.step, parts, *self.train_step(parts))
            if seen is not None:
                self.note(seen)
            self.leaks.after()
            stopping = self.all_stop()
            if stopping or self.step % self.options.save_every == 0 or self.step == self.options.steps:
                for late in self.watch.settle():
                    self.note(late)
                self.save()
            if stopping:
                break
            if self.step % self.options.sample_every == 0 or self.step == self.options.steps:
                self.show()
        if self.rank == 0:
            print(memory_report(self.device, model=self.net, optimizer=self.optimizer, averages=self.ema.averages.values()))

    def all_stop(self) -> bool:
        """Whether this rank or another one has been asked to end: all of them hear of it behind the same step."""
        if self.hosts is None:
            return self.stopping
        asked = torch.tensor(int(self.stopping))
        dist.all_reduce(asked, dist.ReduceOp.MAX, self.hosts)
        return bool(asked)

    def train_step(self, parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the optimizer, by the gradients of all its parts; its loss and the gradients' norm, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, self.step / max(1, self.options.warmup))
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self.model.no_sync() if self.waits(part) else contextlib.nullcontext():  # type: ignore[operator]
                with self.precision.autocast():
                    loss = self.loss_of(self.model, part)
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

    def loss_of(self, model: nn.Module, part: Batch) -> torch.Tensor:
        """The part's share of its step's loss."""
        noise, time = drawn(part, self.options.seed)
        return flow_loss(model, part.video, noise, time) * part.share

    def note(self, seen: Seen) -> None:
        """Takes down the figures of a step; one that was not finite is done again."""
        if seen.report is not None and self.watch.config.repeat != "no":
            with self.watch.careful():
                seen = self.watch.after(seen.step, seen.batches, *self.train_step(list(seen.batches))) or seen
        if self.rank == 0:
            with self.losses.open("a", newline="") as lines:
                csv.writer(lines, lineterminator="\n").writerow([seen.step, seen.loss, seen.norm, seen.scale])
            print(f"step {seen.step}: loss {seen.loss:.4f}, gradients {seen.norm:.3f}", flush=True)

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
                config=asdict(self.config),
                model=self.net.state_dict(),
                ema=self.ema.state_dict(),
                optimizer=self.optimizer.state_dict(),
                precision=self.precision.state_dict(),
                loader=self.loader.state_dict(),
            )
            print(f"checkpoint behind step {self.step}", flush=True)

    def load(self) -> None:
        found = load_checkpoint(self.checkpoint, device=self.device)
        if found["config"] != asdict(self.config):
            raise SystemExit(f"{self.checkpoint} is of another model, {found['config']}: give its options, or another --out")
        self.step = found["step"]
        self.net.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.precision.load_state_dict(found["precision"], self.net)
        self.ema.load_state_dict(found["ema"])
        self.loader.load_state_dict(found["loader"])
        if self.rank == 0:
            print(f"goes on behind step {self.step}", flush=True)

    def show(self) -> None:
        """Four videos that the averaged model makes, from the same noise each time."""
        if self.rank == 0:
            config, generator = self.config, torch.Generator(self.device).manual_seed(self.options.seed)
            shape = (4, config.channels, config.frames, config.height, config.width)
            noise = torch.randn(shape, generator=generator, device=self.device)
            with self.ema.applied(), self.precision.autocast():
                made = sample(self.net, noise, self.options.sample_steps)
            write_gif(self.options.out / f"samples-{self.step:06d}.gif", made)


def drawn(part: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise (B, 3, T, H, W) and times (B,), which are dense in the middle (logit-normal; Esser et al. 2024).

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


def steps_of(loader: VideoLoader) -> Iterator[list[Batch]]:
    """The parts of each step of the optimizer."""
    parts: list[Batch] = []
    for part in loader:
        parts.append(part)
        if part.part[0] + 1 == part.part[1]:
            yield parts
            parts = []


def videos_of(options: argparse.Namespace, rank: int) -> Any:
    """The user's videos, or a set that the first rank makes."""
    if options.videos:
        return options.videos
    folder = options.out / "clips"
    if rank == 0:
        make_clips(folder, train=10, val=1)
    if dist.is_initialized():
        dist.barrier()
    return folder / "train.csv"


def write_gif(file: Path, videos: torch.Tensor, seconds: float = 0.1) -> None:
    """Videos (B, 3, T, H, W) of -1 to 1, side by side."""
    pixels = (
        ((videos.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(2, 3, 0, 4, 1).flatten(2, 3)
    )  # (T, H, B * W, 3)
    first, *rest = [Image.fromarray(frame) for frame in pixels.cpu().numpy()]
    first.save(file, save_all=True, append_images=rest, duration=round(1000 * seconds), loop=0)


def main(trainer_of: type[Trainer] = Trainer) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="*", help="files, folders, patterns or tables; none: a small set is made")
    parser.add_argument(
        "--out", type=Path, default=Path("video_dit_out"), help="folder of checkpoint, losses and videos (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer, in all (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="clips of a step on each rank (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, help="clips of a forward and backward; fewer need less memory")
    parser.add_argument("--frames", type=int, default=8, help="of a clip (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=2, help="distance between frames of a clip (default: %(default)s)")
    parser.add_argument("--size", type=int, default=32, help="of a clip, in pixels (default: %(default)s)")
    parser.add_argument(
        "--patch", type=int, nargs=3, default=(1, 4, 4), help="frames, rows and columns of a token (default: %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=128, help="columns of the model (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of attention (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--master-weights", action="store_true", help="parameters in that type, with float32 copies")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps in which the rate rises (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="the gradients' norm, at most (default: %(default)s)")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the averages (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="fixes weights, order, noise and augmentations (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument(
        "--sample-every", type=int, default=100, help="steps between videos that the model makes (default: %(default)s)"
    )
    parser.add_argument("--sample-steps", type=int, default=25, help="Euler steps of such a video (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--reserve", help="memory set aside at the start: a share of the GPU's, or an amount such as 60GB")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    options = parser.parse_args()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group()  # before the loader, which takes rank and world size from it
        if options.device == "auto" and torch.cuda.is_available():
            options.device = f"cuda:{dist.get_node_local_rank()}"
            torch.cuda.set_device(options.device)
    for name in ("steps", "batch", "save_every", "sample_every", "sample_steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} takes a number from 1 on")
    trainer = trainer_of(options)
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stopping", True))  # clusters ask before they kill
    with trainer.loader:
        trainer.run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
