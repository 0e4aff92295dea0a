"""The command line of train_video_dit.py, what its configuration file says, and the files that it reads and writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from PIL import Image

from gpupipe.cli.demo_data import make_clips
from gpupipe.config import MemoryConfig, PrecisionConfig
from gpupipe.train import TrainingConfig

OWN = "video_dit"
"""The key of a file under which options of this command stand, beside ``gpupipe``, under which those of loader and step do."""


def parse(description: str | None) -> argparse.Namespace:
    """What is asked for: by the command line, else by the file, else by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="*", help="files, folders, patterns or tables; none: a small set is made")
    parser.add_argument("--config", type=Path, help="YAML for loader, step and these options, such as samples/train.yaml")
    parser.add_argument(
        "--out", type=Path, default=Path("video_dit_out"), help="of checkpoint, losses and videos (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer, in all (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="clips of a step on each rank; default 8")
    parser.add_argument("--micro-batch", type=int, help="clips of a forward and backward; fewer need less memory")
    parser.add_argument("--frames", type=int, help="of a clip; default 8, with --vae 9")
    parser.add_argument("--stride", type=int, help="distance between frames of a clip; default 2")
    parser.add_argument("--size", type=int, help="of a clip, in pixels; default 32")
    parser.add_argument("--vae", help="learn latents: a folder of a diffusers autoencoder, a model's name, or random")
    parser.add_argument("--vae-at-once", type=int, default=1, help="clips that go through it together (default: %(default)s)")
    parser.add_argument("--patch", type=int, nargs=3, help="of a token; default 1 4 4, with --vae 1 2 2")
    parser.add_argument("--hidden", type=int, default=128, help="columns of the model (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of attention (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--master-weights", action="store_true", help="parameters in that type, with float32 copies")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps in which the rate rises (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="the gradients' norm, at most (default: %(default)s)")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the averages (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of weights, order of clips, noise; default 0")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument(
        "--sample-every", type=int, default=100, help="steps between videos that the model makes (default: %(default)s)"
    )
    parser.add_argument("--sample-steps", type=int, default=25, help="Euler steps of such a video (default: %(default)s)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--reserve", help="memory set aside at the start: a share of the GPU's, or an amount such as 60GB")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    options = parser.parse_args()
    if options.config is not None:
        try:
            read = yaml.safe_load(options.config.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            parser.error(f"--config: {options.config} cannot be read: {error}")
        told = (read.get(OWN) or {}) if isinstance(read, dict) else None
        if not isinstance(told, dict):
            parser.error(f"--config: {options.config} holds no mapping of settings")
        given = {name.replace("-", "_"): value for name, value in told.items()}
        if odd := sorted(set(given) - set(vars(options)) | set(given) & {"config", "videos"}):
            parser.error(f"{options.config}: {OWN} has {odd[0]}, which is no option of this command")
        given |= {name: Path(given[name]) for name in ("out",) if name in given}
        parser.set_defaults(**given)
        options = parser.parse_args()
    for name in ("steps", "batch", "save_every", "sample_every", "sample_steps", "vae_at_once", "hidden", "depth", "heads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} takes a number from 1 on")
    if options.hidden % (2 * options.heads):
        parser.error(f"--hidden {options.hidden} makes no heads of an even width: give a multiple of {2 * options.heads}")
    return options


def loader_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the VideoLoader: the file, and what the command line says of clips; without a file what is usual here."""
    given: dict[str, Any] = {
        "clip": {"frames": options.frames, "stride": options.stride},
        "transform": {"size": options.size},
        "batch": {"size": options.batch, "micro_size": options.micro_batch},
    }
    given = {stage: {name: value for name, value in fields.items() if value is not None} for stage, fields in given.items()}
    usual: dict[str, Any] = {
        "clip": {"frames": 9 if options.vae else 8, "stride": 2},
        "transform": {"preset": "diffusion", "size": 32, "dtype": "float32"},  # -1 to 1
        "batch": {"size": 8},
    }
    return {"config": options.config or usual, **{stage: fields for stage, fields in given.items() if fields}}


def step_settings(options: argparse.Namespace, device: torch.device) -> tuple[PrecisionConfig, TrainingConfig]:
    """The precision, and what else file and command line say of the training step."""
    step = TrainingConfig() if options.config is None else TrainingConfig.from_yaml(options.config)
    if options.reserve is not None:
        step = TrainingConfig(
            **{**step.model_dump(), "memory": {**(step.memory or MemoryConfig()).model_dump(), "reserve": options.reserve}}
        )
    usual = PrecisionConfig(dtype="bfloat16" if device.type == "cuda" else "float32")
    given = {"dtype": options.dtype, "master_weights": options.master_weights or None}
    given = {name: value for name, value in given.items() if value is not None}
    return PrecisionConfig(**{**(step.mixed_precision or usual).model_dump(), **given}), step


def videos_of(options: argparse.Namespace, rank: int) -> Any:
    """The user's videos, or a set that the first rank makes."""
    if options.videos:  # one by itself: a list may name videos that are not there yet
        return options.videos[0] if len(options.videos) == 1 else options.videos
    folder = options.out / "clips"
    if rank == 0:
        make_clips(folder, train=10, val=1)
    if dist.is_initialized():
        dist.barrier()
    return folder / "train.csv"


def write_gif(file: Path, videos: torch.Tensor, seconds: float = 0.1) -> None:
    """Videos (B, 3, T, H, W) of -1 to 1, side by side."""
    pixels = ((videos.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    frames = pixels.permute(2, 3, 0, 4, 1).flatten(2, 3)  # (T, H, B * W, 3)
    first, *rest = [Image.fromarray(frame) for frame in frames.cpu().numpy()]
    first.save(file, save_all=True, append_images=rest, duration=round(1000 * seconds), loop=0)
