"""NAL units of H.264 and HEVC: finding them, parameter sets out of a sample description, the Annex B form.

Sources: ITU-T H.264 (08/2021) and H.265 (09/2023) annex B; ISO/IEC 14496-15 for ``avcC`` and ``hvcC``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

START_CODE = b"\x00\x00\x00\x01"
_LENGTH = struct.Struct(">I")
_START = re.compile(b"\x00\x00\x01")


def nal_length_size(codec: str, extradata: bytes) -> int:
    """Bytes of the length field before each NAL unit (1, 2 or 4); 0 for streams in Annex B form and other codecs."""
    if codec == "h264" and len(extradata) >= 7 and extradata[0] == 1:
        return (extradata[4] & 3) + 1
    if (
        codec == "hevc"
        and len(extradata) >= 23
        and (extradata[0] == 1 or extradata[:3] not in (b"\x00\x00\x00", b"\x00\x00\x01"))
    ):
        return (extradata[21] & 3) + 1
    return 0


def parameter_sets(codec: str, extradata: bytes) -> bytes:
    """The parameter sets of a sample description in Annex B form; ``extradata`` itself where it has that form already."""
    if nal_length_size(codec, extradata) == 0:
        return extradata
    sets: list[bytes] = []
    if codec == "h264":
        at = _take_sets(extradata, 6, extradata[5] & 31, sets)
        if at < len(extradata):
            _take_sets(extradata, at + 1, extradata[at], sets)
    else:
        at = 23
        for _ in range(extradata[22]):
            at = _take_sets(extradata, at + 3, int.from_bytes(extradata[at + 1 : at + 3], "big"), sets)
    return b"".join(START_CODE + s for s in sets if s)


def _take_sets(extradata: bytes, at: int, count: int, sets: list[bytes]) -> int:
    """Appends ``count`` sets with 16-bit lengths from ``at`` on, fewer where the data ends; returns where they end."""
    for _ in range(count):
        if at >= len(extradata):
            break
        size = int.from_bytes(extradata[at : at + 2], "big")
        sets.append(extradata[at + 2 : at + 2 + size])
        at += 2 + size
    return at


def to_annexb(packet: bytes, length_size: int, head: bytes = b"") -> bytes:
    """A packet with its length fields turned into start codes, after ``head`` (parameter sets, or nothing).

    Raises:
        ValueError: when a length field points past the packet's end.
    """
    if length_size == 0:
        return head + packet if head else packet
    if length_size == 4:  # length and start code are equally long: overwrite in place
        data = bytearray(packet)
        put_start_codes(data, 0, len(data))
        return head + data if head else bytes(data)
    return head + b"".join(START_CODE + packet[start:end] for start, end in units(packet, length_size))


def put_start_codes(memory: bytearray, begin: int, end: int) -> None:
    """Overwrites the length fields of 4 bytes of the NAL units from ``begin`` to ``end``.

    Raises:
        ValueError: when they do not end there.
    """
    at = begin
    while at + 4 <= end:
        (size,) = _LENGTH.unpack_from(memory, at)
        _LENGTH.pack_into(memory, at, 1)  # which is a start code
        at += 4 + size
    if at != end:
        raise ValueError("NAL unit lengths do not add up to the packet's size")


def from_annexb(stream: bytes, length_size: int) -> bytes:
    """NAL units in Annex B form with their start codes turned into length fields; as they are for ``length_size`` 0."""
    if length_size == 0:
        return stream
    return b"".join((end - start).to_bytes(length_size, "big") + stream[start:end] for start, end in _annexb_units(stream))


def _annexb_units(stream: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each NAL unit, without the zeros that lead up to the next start code."""
    for start, end in units(stream, 0):
        yield start, start + len(stream[start:end].rstrip(b"\x00"))


def units(packet: bytes, length_size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each NAL unit in a packet, length-prefixed or in Annex B form (``length_size`` 0).

    Raises:
        ValueError: when a length field points past the packet's end.
    """
    if length_size == 0:
        starts = [match.end() for match in _START.finditer(packet)]
        ends = [start - 3 for start in starts[1:]] + [len(packet)]
        yield from zip(starts, ends, strict=False)  # without a start code there is an end and no start
        return
    at, length = 0, len(packet)
    while at + length_size <= length:
        start = at + length_size
        size = _LENGTH.unpack_from(packet, at)[0] if length_size == 4 else int.from_bytes(packet[at:start], "big")
        at = start + size
        if at > length:
            raise ValueError("a NAL unit length points past the packet's end")
        yield start, at


def unescape(data: bytes) -> bytes:
    """A NAL unit without its emulation prevention bytes (00 00 03 → 00 00)."""
    return data.replace(b"\x00\x00\x03", b"\x00\x00")


class BitReader:
    """Reads fixed-length and Exp-Golomb numbers (H.264 clause 9.1), most significant bit first."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def bits(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise ValueError("the header ends early")
        return (self._value >> self._left) & ((1 << count) - 1)

    def unsigned(self) -> int:
        zeros = 0
        while self.bits(1) == 0:
            zeros += 1
        return (1 << zeros) - 1 + self.bits(zeros)
