"""The shape of a clip, chosen for its video before anything is decoded, and what it costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from gpupipe.config import ClipConfig, LoaderConfig
from gpupipe.data.index import VideoIndex
from gpupipe.data.index.fill import survey
from gpupipe.data.sample import fills
from gpupipe.data.source import start_frame
from gpupipe.data.transform.picture import CHANNELS
from gpupipe.errors import GpupipeError
from gpupipe.types import Entry

Patch = tuple[int, int, int]


class Shape(NamedTuple):
    """Frames, rows and columns of a clip."""

    frames: int
    height: int
    width: int

    def grid(self, patch: Patch) -> Patch:
        """Tokens along time, height and width; those at the edges counted whole."""
        return (-(-self.frames // patch[0]), -(-self.height // patch[1]), -(-self.width // patch[2]))

    def tokens(self, patch: Patch) -> int:
        return math.prod(self.grid(patch))

    @property
    def values(self) -> int:
        """Numbers of its three channels."""
        return CHANNELS * self.frames * self.height * self.width


def shapes_of(config: LoaderConfig) -> tuple[Shape, ...]:
    """All shapes that clips may have, the longest first."""
    frames: tuple[int, ...] = (config.clip.frames,)
    sizes: tuple[tuple[int, int], ...] = (config.transform.size,)
    if config.batch.buckets is not None:
        frames = config.batch.buckets.frames or frames
        sizes = config.batch.buckets.sizes_for(config.transform.size)
    return tuple(Shape(length, *size) for length in sorted(frames, reverse=True) for size in sizes)


def choose(shapes: Sequence[Shape], clip: ClipConfig, index: VideoIndex, start: int | None = None) -> Shape:
    """The shape for a video: the longest that it fills, else the shortest; of these the one nearest in aspect ratio.

    Args:
        shapes: as :func:`shapes_of` gives them.
        start: the frame from which its clips start, where the row says so.
    """
    lengths = list(dict.fromkeys(shape.frames for shape in shapes))
    length = next((frames for frames in lengths if fills(clip, index, frames, start)), lengths[-1])
    height, width = index.info.display_size
    ratio = math.log(height / width)
    return min(
        (shape for shape in shapes if shape.frames == length),
        key=lambda shape: (abs(math.log(shape.height / shape.width) - ratio), shape),
    )


def shapes_for(
    entries: Sequence[Entry], config: LoaderConfig, processes: int
) -> tuple[list[Shape | None], dict[str, GpupipeError]]:
    """The shape of the clips of each video, None where it cannot be indexed; and what is wrong with these, by path.

    Args:
        processes: how many make missing indices side by side.
    """
    shapes = shapes_of(config)
    if len(shapes) == 1:
        return [shapes[0] for _ in entries], {}
    rows: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        rows.setdefault(entry.path, []).append(number)
    found: list[Shape | None] = [None] * len(entries)
    bad = {}
    with closing(survey(entries, processes, (config.rank or 0, config.world_size or 1))) as outcomes:
        for path, outcome in outcomes:
            if isinstance(outcome, GpupipeError):
                bad[path] = outcome
                continue
            for number in rows[path]:
                found[number] = choose(shapes, config.clip, outcome, start_frame(entries[number]))
    return found, dict(sorted(bad.items()))


def digest(shapes: Sequence[Shape | None]) -> str:
    """What tells the shapes of one list of videos from those of another."""
    return hashlib.sha256(repr([shape and tuple(shape) for shape in shapes]).encode()).hexdigest()[:32]
