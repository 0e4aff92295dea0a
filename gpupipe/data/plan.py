"""Which packets to feed for a clip's frames, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpupipe.data.index import VideoIndex
from gpupipe.data.index.model import Bools, Int64s


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of packets to feed, ascending, from a start point on."""

    packets: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.packets[0]

    @property
    def last(self) -> int:
        return self.packets[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode a multiset of frames of one video.

    Attributes:
        passes: runs of packets, in file order, none touching another.
        slots: for each packet whose frame is wanted, the position of that frame among the decoded ones.
        frame_map: for each frame asked for, its position among the decoded ones; repeats share one.
        frames: display positions of the decoded ones.
    """

    passes: tuple[Pass, ...]
    slots: dict[int, int]
    frame_map: tuple[int, ...]
    frames: tuple[int, ...]

    @property
    def packets(self) -> int:
        """The plan's cost: packets to decode."""
        return sum(len(run.packets) for run in self.passes)

    @property
    def plain_packets(self) -> int:
        """What the same frames cost without leaving anything out: all packets from each start point on."""
        return sum(run.last - run.first + 1 for run in self.passes)


def make_plan(index: VideoIndex, indices: Sequence[int]) -> Plan:
    """Plans the decode of frames given by display position, in any order and with repeats.

    Each frame is reached from the last start point that can give it; runs that meet become one. Pictures that no other picture
    refers to are left out unless they are wanted.
    """
    frames = np.unique(np.asarray(indices, np.int64))
    targets = index.display[frames]
    starts = index.start_of[frames]
    last = _last_packet(index, targets)
    spans: list[tuple[int, int]] = []
    for k in np.lexsort((targets, starts)):
        first, end = int(starts[k]), int(last[k])
        if spans and first <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((first, end))
    fed = ~index.droppable
    fed[targets] = True
    passes = tuple(Pass(tuple((first + np.flatnonzero(_needed(index, fed, first, end))).tolist())) for first, end in spans)
    slots = {int(packet): slot for slot, packet in enumerate(targets)}
    position = {int(frame): slot for slot, frame in enumerate(frames)}
    return Plan(passes, slots, tuple(position[int(i)] for i in indices), tuple(int(f) for f in frames))


def _needed(index: VideoIndex, fed: Bools, first: int, end: int) -> Bools:
    """Which packets from ``first`` to ``end`` to feed.

    HEVC: not the leading pictures of the start point. They may refer to pictures before it, and no picture that is shown after
    it refers to them (H.265 clause 3, trailing picture). In H.264 one may.
    """
    part = fed[first : end + 1]
    if index.info.codec != "hevc":
        return part
    following: Bools = part & (index.show_order[first : end + 1] >= index.show_order[first])
    return following


def _last_packet(index: VideoIndex, targets: Int64s) -> Int64s:
    """The last packet that each target needs: itself, and for interlaced video a second field that comes as its own packet."""
    if not index.info.interlaced:
        return targets
    following: Int64s = np.minimum(targets + 1, len(index.pts) - 1)
    return following
