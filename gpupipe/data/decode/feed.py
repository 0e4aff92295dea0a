"""The bytes of a plan's packets: straight from the file where the index says so, else through a demuxer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from gpupipe.data.bytes import LocalFile
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, Plan
from gpupipe.data.scan.demux import open_video, whole_packets
from gpupipe.errors import DecodeError, OpenError

_SPAN = 4
"""One read for a whole run of packets when the span in the file is at most this many times the packets' own bytes."""
_GAP_BYTES = 64 << 10
"""Packets that lie no further apart are read ahead as one piece: a disk takes no longer for it."""


def ranges(index: VideoIndex, plan: Plan) -> list[tuple[int, int]]:
    """(position, bytes) of what a feed will read for a plan, ascending and apart; empty where it must demux."""
    if not index.mapped:
        return []
    pieces: list[tuple[int, int]] = []
    for run in plan.passes:
        position, size = _places(index, list(run.packets))
        low, high, at_once = _span(position, size)
        pieces += [(low, high)] if at_once else [(at, at + length) for at, length in zip(position, size, strict=True)]
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pieces):
        if merged and low <= merged[-1][1] + _GAP_BYTES:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return [(low, high - low) for low, high in merged]


def _places(index: VideoIndex, numbers: list[int]) -> tuple[list[int], list[int]]:
    """(positions, sizes) of packets, ascending by number."""
    first, end = numbers[0], numbers[-1] + 1
    position, size = index.position[first:end].tolist(), index.size[first:end].tolist()
    return [position[n - first] for n in numbers], [size[n - first] for n in numbers]


def _span(position: list[int], size: list[int]) -> tuple[int, int, bool]:
    """(first byte, end, whether one read is to take it all) of packets."""
    low = min(position)
    high = max(at + length for at, length in zip(position, size, strict=True))
    return low, high, high - low <= _SPAN * sum(size)


class PacketFeed:
    """Reads the packets of one video, run by run, from a file that ``files`` lends."""

    def __init__(self, index: VideoIndex, files: OpenFiles = UNKEPT) -> None:
        self._index = index
        self._open = ExitStack()
        self._file: LocalFile | None = None
        if index.mapped:
            path = index.identity.path
            self._file = self._open.enter_context(files.lend(index.identity))
            if not self._file.is_still(index.identity):  # packets of another version may decode, to wrong pictures
                self.close()
                raise OpenError(f"{path} was replaced or changed after it was indexed", fix="is it being written?", path=path)

    def packets(self, run: Pass) -> Iterator[tuple[int, bytes]]:
        """(number, data) of each packet of a run, in decoding order.

        Raises:
            OpenError: when the file has changed or can no longer be read.
            DecodeError: when the demuxer does not find the packets again.
        """
        return self._from_file(self._file, run) if self._file is not None else self._demuxed(run)

    def _from_file(self, file: LocalFile, run: Pass) -> Iterator[tuple[int, bytes]]:
        numbers = list(run.packets)
        position, size = _places(self._index, numbers)
        low, high, at_once = _span(position, size)
        whole = file.read(low, high - low) if at_once else None
        for number, at, length in zip(numbers, position, size, strict=True):
            data = whole[at - low : at - low + length] if whole is not None else file.read(at, length)
            if len(data) != length:
                path = self._index.identity.path
                raise OpenError(f"{path} ends inside packet {number}", fix="the file changed since it was indexed", path=path)
            yield number, data

    def _demuxed(self, run: Pass) -> Iterator[tuple[int, bytes]]:
        """Demuxes from a seek a little before the run, or from the start where a seek fails or lands behind it."""
        import av

        index = self._index
        wanted = frozenset(run.packets)
        given = False
        for rewind in (run.first == 0, True):
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
