"""The cases of bench_transform.py: planes of a format and size, what was drawn for them, and what they should become."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams
from gpupipe.types import PlaneFormat, Planes, VideoInfo

CLIPS, FRAMES = 8, 16
PITCH_BYTES = 512
SIZES = {"tiny": (96, 64), "256p": (456, 256), "1080p": (1920, 1080)}


@dataclass(frozen=True)
class Case:
    """``FORMAT-SIZE-OUTPUT-KIND``: planes of a format and size, and which preset makes which output of them."""

    name: str
    bits: int
    width: int
    height: int
    config: TransformConfig


def case_of(name: str) -> Case:
    """Raises: ValueError: when it is no case's name."""
    parts = name.split("-")
    if len(parts) != 4 or parts[0] not in ("nv12", "p010") or parts[1] not in SIZES or parts[3] not in ("train", "eval"):
        raise ValueError(f"{name!r} is not FORMAT-SIZE-OUTPUT-KIND: nv12 or p010, {', '.join(SIZES)}, a number, train or eval")
    size = int(parts[2])
    config = TransformConfig(preset=f"kinetics_{parts[3]}", size=(size, size))
    return Case(name, 10 if parts[0] == "p010" else 8, *SIZES[parts[1]], config)


@dataclass(frozen=True)
class Clip:
    """A clip to make: its planes, and what was drawn for it."""

    planes: Planes
    info: VideoInfo
    params: TransformParams


def make_clips(case: Case, device: torch.device) -> list[Clip]:
    """Slowly changing pictures with some noise, as video is; each clip has its own draw."""
    rng = np.random.default_rng(0)
    form = PlaneFormat(
        case.width, case.height, case.width // 2, case.height // 2, case.bits, 6 if case.bits > 8 else 0, interleaved=True
    )
    pitch = -(-form.row_samples * form.sample_bytes // PITCH_BYTES) * PITCH_BYTES // form.sample_bytes
    rows, columns = np.arange(form.rows, dtype=np.float32)[:, None], np.arange(pitch, dtype=np.float32)[None]
    dtype = np.uint8 if case.bits == 8 else np.uint16
    info = VideoInfo(
        path="made up", container="none", codec="none", pix_fmt="none", width=case.width, height=case.height, frames=FRAMES,
        time_base=Fraction(1, 30), fps=30.0, start_seconds=0.0, duration_seconds=FRAMES / 30, bit_depth=case.bits,
        color_matrix="bt709", color_range="limited",
    )  # fmt: skip
    transform = ClipTransform(case.config, FRAMES)
    clips = []
    for number in range(CLIPS):
        frames = []
        for k in range(FRAMES):
            wave = np.sin((rows + 3 * k) / 37) * np.cos((columns + 50 * number) / 53)
            codes = (0.5 + 0.2 * wave + 0.03 * rng.random((form.rows, pitch), dtype=np.float32)) * 2**case.bits
            frames.append(codes.astype(dtype) << form.shift)
        data = torch.from_numpy(np.stack(frames)).to(device)
        clips.append(Clip(Planes(data, form), info, transform.draw(info, np.random.default_rng(number))))
    return clips


def reference(case: Case, clip: Clip) -> torch.Tensor:
    """(3, T, H, W) by the float reference on the CPU."""
    transform = ClipTransform(case.config.model_copy(update={"dtype": "float32"}), FRAMES)
    out = torch.empty(transform.clip_shape)
    planes = Planes(clip.planes.data.cpu(), clip.planes.format)
    transform.apply(planes, clip.info, clip.params, range(FRAMES), out)
    return out
