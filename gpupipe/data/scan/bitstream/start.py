"""Where a decode may start. A container's keyframe flag is only a hint: intra refresh and open GOPs are flagged too."""

from __future__ import annotations

from gpupipe.data.scan.bitstream.nal import BitReader, unescape, units

_RECOVERY_POINT = 6
_MPEG = (b"\x00\x00\x01\x00", 5, 3, 7, 1)
_PICTURE_TYPES = {"mpeg1video": _MPEG, "mpeg2video": _MPEG, "mpeg4": (b"\x00\x00\x01\xb6", 4, 6, 3, 0)}
"""Where a picture's type is: (start code, byte from there, bits to shift it by, mask, the type of I pictures)."""


def is_start_point(codec: str, packet: bytes, length_size: int) -> bool:
    """True when decoding from this packet on gives every later picture in display order exactly.

    H.264: an IDR picture, or a recovery point with ``recovery_frame_cnt`` 0, ``exact_match_flag`` 1 and ``broken_link_flag`` 0
    (H.264 clause D.2.8). HEVC: a BLA, IDR or CRA picture (H.265 clause 7.4.2.2). MPEG-1, MPEG-2 and MPEG-4 part 2: an I picture
    (H.262 clause 6.3.9, ISO/IEC 14496-2 clause 6.3.5). Other codecs: the container's keyframe.
    """
    if codec in _PICTURE_TYPES:
        start_code, at, shift, mask, intra = _PICTURE_TYPES[codec]
        found = packet.find(start_code)
        return 0 <= found < len(packet) - at and packet[found + at] >> shift & mask == intra
    if codec not in ("h264", "hevc"):
        return True
    try:
        for start, end in units(packet, length_size):
            if codec == "hevc":
                kind = packet[start] >> 1 & 63
                if kind < 32:
                    return 16 <= kind <= 21
            else:
                kind = packet[start] & 31
                if kind == 5:
                    return True
                if kind == 1:
                    return False
                if kind == 6 and _exact_recovery(unescape(packet[start + 1 : end])):
                    return True
    except (ValueError, IndexError):
        return False
    return False


def _exact_recovery(sei: bytes) -> bool:
    at = 0
    while at + 2 <= len(sei) and sei[at] != 0x80:
        kind = size = 0
        while sei[at] == 255:
            kind, at = kind + 255, at + 1
        kind, at = kind + sei[at], at + 1
        while sei[at] == 255:
            size, at = size + 255, at + 1
        size, at = size + sei[at], at + 1
        if kind == _RECOVERY_POINT:
            header = BitReader(sei[at : at + size])
            return header.unsigned() == 0 and header.bits(1) == 1 and header.bits(1) == 0
        at += size
    return False
