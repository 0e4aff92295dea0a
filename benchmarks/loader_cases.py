"""The cases of bench_loader.py: their videos, the clips to draw from them, and the finished form that every subject owes."""

from __future__ import annotations

import os
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Case:
    """``clips`` visits of one clip each; a clip has ``frames`` frames, ``stride`` apart, of a video of this kind."""

    kind: str
    stride: int
    frames: int = 16
    size: int = 224
    batch: int = 8
    clips: int = 200

    @property
    def name(self) -> str:
        return f"{self.kind}-s{self.stride}" if "tiny" in self.kind else f"{self.kind}-g250-s{self.stride}"


CASES = {
    case.name: case
    for case in (
        Case("h264-1080p", 1),
        Case("h264-1080p", 4),
        Case("h264-256p", 1),
        Case("h264-256p", 4),
        Case("hevc-1080p", 1),
        Case("hevc-1080p", 4),
        Case("h264-tiny", 1, frames=8, size=64, batch=4, clips=16),
    )
}


@dataclass(frozen=True)
class Draw:
    """One visit: the clip of the case that starts at display frame ``start`` of the file ``path``."""

    path: str
    start: int


def draw(case: Case, sources: Sequence[Path], folder: Path, seed: int) -> list[Draw]:
    """A file of its own for each visit (a hard link to one of the sources) and a random start in it; the same for one seed."""
    rng = np.random.default_rng(seed)
    lengths = [len(packets(source)[0]) for source in sources]
    folder.mkdir(parents=True, exist_ok=True)
    draws = []
    for number in range(case.clips):
        which = number % len(sources)
        path = folder / f"{number:04d}{sources[which].suffix}"
        os.link(sources[which], path)
        last = lengths[which] - (case.frames - 1) * case.stride - 1
        draws.append(Draw(str(path), int(rng.integers(0, last + 1))))
    return draws


def indices(case: Case, start: int) -> list[int]:
    return list(range(start, start + case.frames * case.stride, case.stride))


def packets(path: Path) -> tuple[list[int], list[int]]:
    """The pts of all packets in decode order, and the positions of the keyframes among them."""
    with av.open(str(path)) as container:
        found = [packet for packet in container.demux(video=0) if packet.size and packet.pts is not None]
    return [int(packet.pts or 0) for packet in found], [k for k, packet in enumerate(found) if packet.is_keyframe]


def packets_needed(case: Case, draws: Sequence[Draw], sources: Sequence[Path]) -> float:
    """Packets that a plain decode of a clip feeds, on average: from the keyframe before its first frame to its last frame."""
    facts = [packets(source) for source in sources]
    needed = []
    for number, visit in enumerate(draws):
        pts, keys = facts[number % len(sources)]
        shown = sorted(pts)
        wanted = [shown[k] for k in indices(case, visit.start)]
        first = keys[bisect_right([pts[key] for key in keys], wanted[0]) - 1]
        needed.append(max(pts.index(p) for p in wanted) - first + 1)
    return statistics.mean(needed)


def finish(frames: torch.Tensor, case: Case, device: torch.device) -> torch.Tensor:
    """The work after decoding, for subjects that yield RGB: centre square, antialiased resize, normalise, bf16.

    Args:
        frames: (T, 3, H, W) uint8 on any device.

    Returns:
        (3, T, size, size) bfloat16 on ``device``.
    """
    frames = frames.to(device, non_blocking=True)
    side = min(frames.shape[-2:])
    top, left = (frames.shape[-2] - side) // 2, (frames.shape[-1] - side) // 2
    square = frames[..., top : top + side, left : left + side].float() / 255
    small = F.interpolate(square, (case.size, case.size), mode="bilinear", antialias=True, align_corners=False)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return ((small - mean) / std).to(torch.bfloat16).transpose(0, 1)


def decode_cpu(path: str, wanted: Sequence[int]) -> torch.Tensor:
    """(N, 3, H, W) uint8 RGB of the display frames ``wanted`` (ascending), by PyAV: seek to the keyframe, decode, convert."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        assert stream.average_rate is not None
        assert stream.time_base is not None
        tick = 1 / (stream.average_rate * stream.time_base)  # pts ticks a frame: the benchmark's files have a constant rate
        first = stream.start_time or 0
        container.seek(round(first + wanted[0] * tick), stream=stream)
        left = set(wanted)
        pictures = []
        for frame in container.decode(stream):
            assert frame.pts is not None
            number = round((frame.pts - first) / tick)
            if number in left:
                left.remove(number)
                pictures.append(frame.to_ndarray(format="rgb24", src_colorspace="ITU709", dst_color_range="JPEG"))
                if not left:
                    break
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def check(batch: torch.Tensor, draws: Sequence[Draw], case: Case) -> str | None:
    """Whether the first batch holds what was asked for: None, or what is wrong with it.

    Compares with the software decode. A clip must be near it (mean difference under a fifth of a standard deviation, which
    another chroma filter or even another colour matrix stays within) and nearer to it than to the clips one frame off.
    """
    expected = (case.batch, 3, case.frames, case.size, case.size)
    if tuple(batch.shape) != expected or batch.dtype != torch.bfloat16:
        return f"the batch is {batch.dtype} {tuple(batch.shape)}, not bfloat16 {expected}"
    for row in (0, case.batch - 1):
        got, visit = batch[row].float().cpu(), draws[row]
        last = len(packets(Path(visit.path))[0]) - (case.frames - 1) * case.stride - 1
        near = _distance(got, case, visit.path, visit.start)
        off = [_distance(got, case, visit.path, start) for start in (visit.start - 1, visit.start + 1) if 0 <= start <= last]
        if near > 0.2 or near >= min(off):
            return f"clip {row} differs from the software decode by {near:.3f}, from that of a frame off by {min(off):.3f}"
    return None


def _distance(got: torch.Tensor, case: Case, path: str, start: int) -> float:
    expected = finish(decode_cpu(path, indices(case, start)), case, torch.device("cpu")).float()
    return float((got - expected).abs().mean())


def in_batches(draws: Sequence[Draw], size: int) -> Iterator[Sequence[Draw]]:
    for first in range(0, len(draws) - size + 1, size):
        yield draws[first : first + size]
