"""Which packets to feed for a clip's frames, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupipe.data.index import VideoIndex

_MOST_HELD = 16
"""Pictures that a decoder holds at most (H.264 A.3.1, H.265 A.4.2)."""


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

    def packet_bytes(self, index: VideoIndex) -> int:
        """Bytes of the packets to decode, of the video that the plan is for."""
        return sum(int(index.size[list(run.packets)].sum()) for run in self.passes)


def make_plan(index: VideoIndex, indices: Sequence[int]) -> Plan:
    """Plans the decode of frames given by display position, in any order and with repeats.

    Each frame is reached from the last start point that can give it; runs that meet become one. Pictures that no other picture
    refers to are left out unless they are wanted.
    """
    # Plain Python: NumPy gives up the interpreter lock in each sort and search, which costs more to win back than they save.
    frames = sorted({int(frame) for frame in indices})
    targets = [int(index.display[frame]) for frame in frames]
    last = len(index.pts) - 1
    second_field = int(index.info.interlaced)  # it may come as a packet of its own
    needs = sorted((index.start_for(frame), target) for frame, target in zip(frames, targets, strict=True))
    spans: list[tuple[int, int]] = []
    for first, target in needs:
        end = min(target + second_field, last)
        if spans and (first <= spans[-1][1] or (first == spans[-1][1] + 1 and not _ended_before(index, first))):
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((first, end))
    slots = {packet: slot for slot, packet in enumerate(targets)}
    position = {frame: slot for slot, frame in enumerate(frames)}
    passes = tuple(Pass(tuple(_needed(index, slots, first, end))) for first, end in spans)
    return Plan(passes, slots, tuple(position[int(i)] for i in indices), tuple(frames))


def _ended_before(index: VideoIndex, start: int) -> bool:
    """Whether the sequence before a start point may have been ended there, by a NAL unit that says so or by an edit.

    The pictures that a decoder still held are then lost, and so are the start point's leading ones; what of them comes out
    depends on the decoder. Within a run across that place a frame could be taken for another.
    """
    return not index.unshown.isdisjoint(range(start - _MOST_HELD, start + _MOST_HELD + 1))


def _needed(index: VideoIndex, wanted: Mapping[int, int], first: int, end: int) -> list[int]:
    """Which packets from ``first`` to ``end`` to feed.

    HEVC: not the leading pictures of the start point, unless one is wanted. They may refer to pictures before it, and no
    picture that is shown after it refers to them (H.265 clause 3, trailing picture). In H.264 one may.
    """
    droppable = index.droppable[first : end + 1].tolist()
    fed = [packet for packet, free in enumerate(droppable, first) if not free or packet in wanted]
    if index.info.codec != "hevc":
        return fed
    pts, starts = index.pts[first : end + 1].tolist(), index.start[first + 1 : end + 1].tolist()
    following = first + 1 + starts.index(True) if True in starts else end + 1
    leading = {packet for packet in range(first + 1, following) if pts[packet - first] < pts[0]}
    return fed if leading & wanted.keys() else [packet for packet in fed if packet not in leading]
