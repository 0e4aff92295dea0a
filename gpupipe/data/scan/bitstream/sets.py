"""The parameter sets in force: a decode that starts in mid-stream needs those that came before, wherever they came."""

from __future__ import annotations

import re

from gpupipe.data.scan.bitstream.dpb import skip_profile_tier_level
from gpupipe.data.scan.bitstream.nal import START_CODE, BitReader, parameter_sets, unescape, units

HEADERS = {
    "mpeg1video": (b"\x00\x00\x01\xb3", (b"\x00\x00\x01\xb8", b"\x00\x00\x01\x00")),
    "mpeg2video": (b"\x00\x00\x01\xb3", (b"\x00\x00\x01\xb8", b"\x00\x00\x01\x00")),
    "mpeg4": (b"\x00\x00\x01", (b"\x00\x00\x01\xb3", b"\x00\x00\x01\xb6")),
}
"""MPEG: the start code of the sequence's header, and those that end it: of a group of pictures, of a picture."""
_LAYERS = re.compile(b"\x00\x00\x01[\x20-\x2f]")
"""Start code of a video object layer of MPEG-4, without which its header says nothing."""
_KINDS = {"h264": (7, 8), "hevc": (32, 33, 34)}
"""NAL types of parameter sets, in the order in which one refers to another: (video,) sequence, picture."""


def is_parameter_set(codec: str, first_byte: int) -> bool:
    """Whether a NAL unit of H.264 or HEVC that starts with this byte is a parameter set."""
    return _kind(codec, first_byte) in _KINDS[codec]


class ParameterSets:
    """The parameter sets of H.264 or HEVC that a decoder holds, each until another with its number comes; or an MPEG header.

    Args:
        codec: a codec without anything of the kind never has any.
        extradata: the sample description, whose sets are in force from the start.
    """

    def __init__(self, codec: str, extradata: bytes) -> None:
        self._codec = codec
        self._sets: dict[tuple[int, int], bytes] = {}
        self.see(parameter_sets(codec, extradata) if codec in _KINDS else extradata, 0)

    def see(self, packet: bytes, length_size: int) -> None:
        """Takes over the sets of a packet. Damaged ones count by what can be read of them."""
        if self._codec in HEADERS:
            header = _header(self._codec, packet)
            if header:
                self._sets = {(0, 0): header}
        if self._codec not in _KINDS:
            return
        try:
            for start, end in units(packet, length_size):
                if start < end and is_parameter_set(self._codec, packet[start]):
                    unit = packet[start:end].rstrip(b"\x00")  # zeros belong to the next start code
                    kind = _kind(self._codec, unit[0])
                    self._sets[kind, _number(self._codec, kind, unit)] = unit
        except (ValueError, IndexError):
            pass

    def in_force(self) -> bytes:
        """All of them in Annex B form, each behind those that it refers to; the header of an MPEG sequence as it is."""
        if self._codec in HEADERS:
            return self._sets.get((0, 0), b"")
        return b"".join(START_CODE + self._sets[key] for key in sorted(self._sets))


def _header(codec: str, packet: bytes) -> bytes:
    """The sequence's header with all that belongs to it; empty where a packet has none."""
    begin, ends = HEADERS[codec]
    at = packet.find(begin)
    if at < 0:
        return b""
    end = min((found for code in ends if (found := packet.find(code, at)) >= 0), default=len(packet))
    header = packet[at:end]
    return header if codec != "mpeg4" or _LAYERS.search(header) else b""


def _kind(codec: str, first_byte: int) -> int:
    return first_byte & 31 if codec == "h264" else first_byte >> 1 & 63


def _number(codec: str, kind: int, unit: bytes) -> int:
    """The number by which others refer to a parameter set (H.264 clauses 7.3.2.1.1 and 7.3.2.2, H.265 clauses 7.3.2.1 to 3).

    Raises:
        ValueError: when the unit ends before it.
    """
    if codec == "h264":
        reader = BitReader(unescape(unit[1:64]))
        if kind == 7:
            reader.bits(24)  # profile, constraints, level
        return reader.unsigned()
    reader = BitReader(unescape(unit[2:200]))
    if kind == 32:
        return reader.bits(4)
    if kind == 33:
        reader.bits(4)
        sub_layers = reader.bits(3)
        reader.bits(1)
        skip_profile_tier_level(reader, sub_layers)
    return reader.unsigned()
