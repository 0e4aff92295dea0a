"""A run's packets as a small file of their own, in memory, for decoders that take nothing but files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from gpupipe.data.index import VideoIndex
from gpupipe.data.scan.bitstream.nal import from_annexb
from gpupipe.data.scan.demux import open_video

_TICK = Fraction(1, 1000)
_APART = 10
"""Ticks from one picture to the next: a hundredth of a second. Times of the file say nothing but the order of showing."""
PICTURE_SECONDS = float(_APART * _TICK)


@contextmanager
def memory_file(name: str) -> Iterator[str]:
    """The path of an empty file in memory, gone at the end of the block. For this process only."""
    handle = os.memfd_create(name)
    try:
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


@contextmanager
def clip_file(index: VideoIndex, packets: Iterable[tuple[int, bytes | memoryview]], shown: Sequence[int]) -> Iterator[str]:
    """The path of an MP4 file of H.264 or HEVC packets, gone at the end of the block.

    Its n-th picture in the order of showing is that of packet ``shown[n]``, at a constant rate, whatever times the video has.
    The first packet alone is marked as a keyframe, for nobody to seek in it, and has the parameter sets in force there.

    Args:
        packets: (number, data), in decoding order.
        shown: their numbers in the order of showing.

    Raises:
        OpenError: when the video can no longer be opened.
    """
    with memory_file("gpupipe-clip") as path:
        _write(path, index, packets, shown)
        yield path


def _write(path: str, index: VideoIndex, packets: Iterable[tuple[int, bytes | memoryview]], shown: Sequence[int]) -> None:
    import av

    ranks = {packet: rank for rank, packet in enumerate(shown)}
    late = max(place - ranks[packet] for place, packet in enumerate(sorted(shown)))  # so that nothing is shown undecoded
    source, template = open_video(index.identity.path)
    with source, av.open(path, "w", format="mp4") as out:
        stream = out.add_stream_from_template(template)
        stream.time_base = _TICK
        for place, (number, data) in enumerate(packets):
            head = from_annexb(index.sets_at(number)[0], index.length_size) if place == 0 else b""
            packet = av.Packet(head + bytes(data))
            packet.stream, packet.time_base, packet.is_keyframe = stream, _TICK, place == 0
            packet.dts, packet.pts, packet.duration = place * _APART, (ranks[number] + late) * _APART, _APART
            out.mux(packet)
