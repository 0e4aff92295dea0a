"""One video's packets."""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.record import CHECKSUM_BYTES, FAMILY, MAGIC
from gpupipe.types import FramePick, VideoInfo

_fraction = lru_cache(maxsize=256)(Fraction)
"""Most videos have one of a few, and a fraction takes long to read."""
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class VideoIndex:
    """Where each packet lies and which frame it yields. Packets are numbered in file order, which is decoding order.

    Attributes:
        identity: the file as it was when the index was made.
        info: facts of the stream.
        stream: number of the stream in its container.
        position: (P,) byte position of each packet's data; -1 where the data is not one piece of the file.
        size: (P,) bytes of each packet.
        pts: (P,) presentation times in ``info.time_base``.
        key: (P,) the container's keyframe flags.
        droppable: (P,) packets of pictures to which no other picture refers.
        start: (P,) packets from which a decode may start.
        display: (F,) the packet that yields each frame, in display order.
        extradata: the codec's configuration as the container holds it.
        length_size: bytes of NAL length fields; 0 for Annex B streams and other codecs.
        in_force: (first packet, the parameter sets in force from there on, in Annex B form), ascending from packet 0.
        counted: ``pts`` are counted, since the container's times do not say what is shown when.
    """

    identity: Identity
    info: VideoInfo
    stream: int
    position: Int64s
    size: Int64s
    pts: Int64s
    key: Bools
    start: Bools
    droppable: Bools
    display: Int64s
    extradata: bytes = field(repr=False)
    length_size: int
    in_force: tuple[tuple[int, bytes], ...] = field(default=((0, b""),), repr=False)
    counted: bool = False

    @classmethod
    def parse(cls, record: bytes, identity: Identity) -> Self | None:
        """The index that a record holds; None when the record is of another version of the file or of this form.

        Raises:
            ValueError, KeyError, TypeError: when the record is damaged.
        """
        if not record.startswith(MAGIC):
            if record.startswith(FAMILY):
                return None
            raise ValueError("no index record")
        body = memoryview(record)[:-CHECKSUM_BYTES]
        if zlib.crc32(body) != int.from_bytes(record[-CHECKSUM_BYTES:], "little"):
            raise ValueError("wrong checksum")
        at = len(MAGIC) + 4
        end = at + int.from_bytes(body[len(MAGIC) : at], "little")
        header = json.loads(bytes(body[at:end]))
        if header["identity"] != identity.as_dict():
            return None
        arrays: dict[str, Any] = {}
        for name, (dtype, count) in header["arrays"].items():
            stored = np.frombuffer(body, dtype, count, end)
            arrays[name] = stored.astype(np.int64) if stored.dtype.kind == "i" else stored
            end += stored.nbytes
        facts = header["info"]
        fractions = {name: _fraction(facts[name]) for name in ("time_base", "pixel_aspect")}
        info = VideoInfo(**{**facts, **fractions, "coded_size": tuple(facts["coded_size"])})
        extradata = base64.b64decode(header["extradata"])
        in_force = tuple((packet, base64.b64decode(sets)) for packet, sets in header["in_force"])
        others = {name: header[name] for name in ("length_size", "counted")} | {"extradata": extradata, "in_force": in_force}
        return cls(identity, info, header["stream"], **others, **arrays)

    @cached_property
    def mapped(self) -> bool:
        """True when packets can be read from the file by position, without a demuxer."""
        return bool((self.position >= 0).all())

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """(F,) time of each frame in seconds of the video's clock, never falling."""
        times: NDArray[np.float64] = self.pts[self.display].astype(np.float64) * float(self.info.time_base)
        return times

    def seconds_of(self, frames: Iterable[int]) -> tuple[float, ...]:
        """Times of single frames, as in :attr:`seconds`."""
        tick = float(self.info.time_base)
        return tuple(float(self.pts[self.display[frame]]) * tick for frame in frames)

    def seconds_shown(self, pick: FramePick) -> tuple[float, ...]:
        """Times of a clip's frames; of blended ones the times between."""
        times = self.seconds_of(pick.indices)
        if not pick.blend:
            return times
        following = self.seconds_of(pick.decoded[len(times) :])
        return tuple(a + share * (b - a) for a, b, share in zip(times, following, pick.blend, strict=True))

    @cached_property
    def _starts(self) -> list[int]:
        """Packets to start from, ascending; 0 among them, for a file that begins amid a group of pictures."""
        starts: list[int] = np.flatnonzero(self.start).tolist()
        return starts if starts[:1] == [0] else [0, *starts]

    def start_for(self, frame: int) -> int:
        """The packet from which a decode must start to get a frame.

        The last start point at or before the frame's packet that is not shown after it: a leading picture, shown before its
        start point, belongs to the one before.
        """
        packet = int(self.display[frame])
        place = bisect_right(self._starts, packet) - 1
        while place > 0 and self.pts[self._starts[place]] > self.pts[packet]:
            place -= 1
        return self._starts[place]

    def in_show_order(self, packets: Sequence[int]) -> list[int]:
        """Packets of one run, ascending, in the order in which their frames are shown.

        Lost ones without a time of their own come last: they were still to be shown when their sequence ended.
        """
        first = packets[0]
        pts: list[int] = self.pts[first : packets[-1] + 1].tolist()
        if not self._untimed:
            return [packet for _, packet in sorted([(pts[packet - first], packet) for packet in packets])]
        return sorted(packets, key=lambda packet: (packet in self._untimed, pts[packet - first]))

    @cached_property
    def unshown(self) -> frozenset[int]:
        """Packets that yield no frame of the video: hidden or lost pictures, or none at all."""
        rest = np.ones(len(self.pts), np.bool_)
        rest[self.display] = False
        return frozenset(np.flatnonzero(rest).tolist())

    @cached_property
    def _untimed(self) -> frozenset[int]:
        """Packets that yield no frame and share their time with another: a demuxer had to make it up."""
        times, counts = np.unique(self.pts, return_counts=True)
        shared = set(times[counts > 1].tolist()) if self.unshown else set()
        return frozenset(packet for packet in self.unshown if int(self.pts[packet]) in shared)

    @cached_property
    def keyframes(self) -> Int64s:
        """Display positions of the frames at which a decode may start, ascending."""
        return np.flatnonzero(self.start[self.display])

    def sets_at(self, packet: int) -> tuple[bytes, bool]:
        """(the parameter sets in force at a packet, in Annex B form; whether they are others than at the first packet)."""
        place = bisect_right(self.in_force, packet, key=lambda change: change[0]) - 1
        return self.in_force[place][1], place > 0

    @cached_property
    def set_changes(self) -> dict[int, bytes]:
        """The parameter sets that come into force at each packet but the first."""
        return {packet: sets for packet, sets in self.in_force if packet > 0}

    def at(self, seconds: float) -> int:
        """Display position of the frame on show at a time: the last one with a time at or before it, else the first."""
        return max(0, int(np.searchsorted(self.seconds, seconds + 1e-9, side="right")) - 1)
