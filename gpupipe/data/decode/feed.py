"""The bytes of a plan's packets: straight from the file where the index says so, else through a demuxer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpupipe.data.bytes import VideoFile
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, Plan
from gpupipe.data.scan.demux import open_video, whole_packets
from gpupipe.errors import DecodeError, OpenError

_WINDOW_BYTES = 8 << 20
"""Bytes of one read, unless a single packet is larger."""
_SPAN = 4
"""One read serves packets that lie apart while it takes at most this many times their own bytes …"""
_GAP_BYTES = 64 << 10
"""… and this much, which is no slower to read than to leave out."""


class Scratch:
    """Memory for one read after the other. Large blocks that come and go would leave the heap of each thread in pieces."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def room(self, size_bytes: int) -> memoryview:
        """``size_bytes`` bytes, which the next call hands out again."""
        if len(self._memory) < size_bytes:
            self._memory = bytearray(max(size_bytes, 2 * len(self._memory)))
        return memoryview(self._memory)[:size_bytes]


@dataclass(frozen=True, slots=True)
class _Window:
    """Packets that one read serves: (number, position, size) of each, and the bytes from ``low`` to ``high``."""

    low: int
    high: int
    packets: list[tuple[int, int, int]]


def _windows(index: VideoIndex, run: Pass) -> Iterator[_Window]:
    first, end = run.first, run.last + 1
    position, size = index.position[first:end].tolist(), index.size[first:end].tolist()
    places = [(number, position[number - first], size[number - first]) for number in run.packets]
    low, high = min(at for _, at, _ in places), max(at + length for _, at, length in places)
    if high - low <= min(_WINDOW_BYTES, _SPAN * sum(length for _, _, length in places) + _GAP_BYTES):
        yield _Window(low, high, places)
        return
    low = high = own = 0
    packets: list[tuple[int, int, int]] = []
    for number, at, length in places:
        lower, higher = min(low, at), max(high, at + length)
        if packets and higher - lower > min(_WINDOW_BYTES, _SPAN * (own + length) + _GAP_BYTES):
            yield _Window(low, high, packets)
            packets = []
        if not packets:
            lower, higher, own = at, at + length, 0
        low, high, own = lower, higher, own + length
        packets.append((number, at, length))
    yield _Window(low, high, packets)


def ranges(index: VideoIndex, plan: Plan) -> list[tuple[int, int]]:
    """(position, bytes) of what a feed will read for a plan, ascending and apart; empty where it must demux."""
    if not index.mapped:
        return []
    pieces = sorted((window.low, window.high) for run in plan.passes for window in _windows(index, run))
    merged: list[tuple[int, int]] = []
    for low, high in pieces:
        if merged and low <= merged[-1][1] + _GAP_BYTES:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return [(low, high - low) for low, high in merged]


class PacketFeed:
    """Reads the packets of one video, run by run, from a file that ``files`` lends, into ``scratch``."""

    def __init__(self, index: VideoIndex, files: OpenFiles = UNKEPT, scratch: Scratch | None = None) -> None:
        self._index = index
        self._files = files
        self._scratch = scratch or Scratch()
        self._open = ExitStack()
        self._file: VideoFile | None = None
        if index.mapped:
            path = index.identity.path
            with files.reading():
                self._file = self._open.enter_context(files.lend(index.identity))
            if not self._file.is_still(index.identity):  # packets of another version may decode, to wrong pictures
                self.close()
                raise OpenError(f"{path} was replaced or changed after it was indexed", fix="is it being written?", path=path)

    def packets(self, run: Pass) -> Iterator[tuple[int, bytes | memoryview]]:
        """(number, data) of each packet of a run, in decoding order. The data is there until the next packet is asked for.

        Raises:
            OpenError: when the file has changed or can no longer be read.
            DecodeError: when the demuxer does not find the packets again.
        """
        return self._from_file(self._file, run) if self._file is not None else self._demuxed(run)

    def _from_file(self, file: VideoFile, run: Pass) -> Iterator[tuple[int, bytes | memoryview]]:
        for window in _windows(self._index, run):
            memory = self._scratch.room(window.high - window.low)
            with self._files.reading(len(memory)):
                there = window.low + file.read_into(window.low, memory)
            if there < window.high:
                path = self._index.identity.path
                number = next(number for number, at, length in window.packets if at + length > there)
                raise OpenError(f"{path} ends inside packet {number}", fix="the file changed since it was indexed", path=path)
            low = window.low
            for number, at, length in window.packets:
                yield number, memory[at - low : at - low + length]

    def _demuxed(self, run: Pass) -> Iterator[tuple[int, bytes]]:
        """Demuxes from a seek a little before the run, or from the start where a seek fails or lands behind it, or where times
        say nothing."""
        import av

        index = self._index
        wanted = frozenset(run.packets)
        given = False
        for rewind in (run.first == 0 or index.counted, True):
            container, stream = open_video(index.identity.path)
            with container, suppress(av.error.FFmpegError):
                number = 0 if rewind else None
                if not rewind:
                    container.seek(int(index.pts[run.first]), stream=stream, backward=True, any_frame=False)
                for packet in whole_packets(container, stream):
                    if number is None:
                        number = self._number_of(packet)
                        if number is None or number > run.first:
                            break
                    if number in wanted:
                        given = True
                        yield number, bytes(packet)
                    if number == run.last:
                        return
                    number += 1
            if given:  # the file ends inside the run
                break
        path = index.identity.path
        raise DecodeError(
            f"{path}: packets {run.first} to {run.last} are not found again", fix="is the file changing?", path=path
        )

    def _number_of(self, packet: Any) -> int | None:
        """The number of the first packet after a seek, known by its time and size; None when that is not unique."""
        index = self._index
        time = packet.pts if packet.pts is not None else packet.dts
        (found,) = ((index.pts == time) & (index.size == packet.size)).nonzero()
        return int(found[0]) if len(found) == 1 else None

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
