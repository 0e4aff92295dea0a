"""The cases of bench_loader.py: their videos, the clips to draw from them, and the finished form that every subject owes."""

from __future__ import annotations

import functools
import os
import re
import shutil
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
import torch
import torch.nn.functional as F
from make_media import kind_of

_AT_ONCE = 64
"""Frames made into floats at a time: whole videos would take tens of GB."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Case:
    """``clips`` visits of one clip each; a clip has ``frames`` frames, ``stride`` apart, of a video of one of these kinds."""

    name: str
    kinds: tuple[str, ...]
    stride: int
    frames: int = 16
    size: int = 224
    batch: int = 8
    clips: int = 200
    cold: bool = False
    """Each visit has a file of its own that is not in the page cache."""


MIXED = (
    "h264-1080p", "h264-256p", "hevc-720p", "h264-720p", "vp9-256p", "hevc-1080p", "h264-720p-g60", "h264-256p-g30",
)  # fmt: skip
_FORMS = {None: 16, "-frame": 1, "-whole": 512}
"""Frames of a clip."""
_NAME = re.compile(r"(?:(\w+-\w+)-g(\d+)|mixed)-s(\d+)(-frame|-whole)?(-cold)?")


def case_of(name: str) -> Case:
    """The case of a name: ``CODEC-SIZE-gN-sN`` or ``mixed-sN``.

    With ``-frame`` for single frames or ``-whole`` for the first 512 frames of each video, ``-cold`` for cold files.

    Raises:
        ValueError: when it is no case's name.
    """
    if name == "h264-tiny-s1":
        return Case(name, ("h264-tiny",), 1, frames=8, size=64, batch=4, clips=16)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not CODEC-SIZE-gN-sN or mixed-sN, with -frame or -whole and -cold after it")
    kind = match[1] if match[2] == "250" else f"{match[1]}-g{match[2]}"
    kinds = (kind,) if match[1] else MIXED
    for each in kinds:
        kind_of(each)
    case = Case(name, kinds, int(match[3]), frames=_FORMS[match[4]], cold=bool(match[5]))
    return replace(case, batch=1, clips=42) if match[4] == "-whole" else case


@dataclass(frozen=True)
class Draw:
    """One visit: the clip of the case that starts at display frame ``start`` of the file ``path``."""

    path: str
    start: int


def draw(case: Case, sources: Sequence[Path], folder: Path, seed: int) -> list[Draw]:
    """A file of its own for each visit (a hard link to one of the sources) and a random start in it; the same for one seed.

    For a cold case it is a copy that the page cache has let go of.
    """
    rng = np.random.default_rng(seed)
    lengths = [len(packets(source)[0]) for source in sources]
    folder.mkdir(parents=True, exist_ok=True)
    draws = []
    for number in range(case.clips):
        which = number % len(sources)
        path = folder / f"{number:04d}{sources[which].suffix}"
        if case.cold:
            shutil.copyfile(sources[which], path)
            _forget(path)
        else:
            os.link(sources[which], path)
        last = lengths[which] - (case.frames - 1) * case.stride - 1
        if last < 0:
            raise ValueError(f"{sources[which]} is too short for {case.frames} frames, {case.stride} apart")
        draws.append(Draw(str(path), 0 if case.frames == _FORMS["-whole"] else int(rng.integers(0, last + 1))))
    return draws


def _forget(path: Path) -> None:
    """Makes the kernel let go of a file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    mean, std = _normalisation(device)
    parts: list[torch.Tensor] = []
    for part in frames[..., top : top + side, left : left + side].split(_AT_ONCE):  # type: ignore[no-untyped-call]
        small = F.interpolate(part.float() / 255, (case.size, case.size), mode="bilinear", antialias=True, align_corners=False)
        parts.append(((small - mean) / std).to(torch.bfloat16))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)


@functools.cache
def _normalisation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation (3, 1, 1), uploaded once: an upload waits for all that is on the stream before it."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std


def decode_cpu(path: str | BinaryIO, wanted: Sequence[int]) -> torch.Tensor:
    """(N, 3, H, W) uint8 RGB of the display frames ``wanted`` (ascending), by PyAV: seek to the keyframe, decode, convert."""
    with av.open(path, "r") as container:
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
