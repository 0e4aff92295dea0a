"""Which pictures no other picture refers to: packets of these may be left out where their frames are not wanted."""

from __future__ import annotations

from typing import NamedTuple

from gpupipe.data.scan.bitstream.nal import units
from gpupipe.data.scan.bitstream.sets import is_parameter_set

_H264_SLICES = range(1, 6)
_HEVC_SLICES = range(32)
_H264_HARMLESS = frozenset({6, 9, 12})
"""SEI, access unit delimiter, filler data."""
_HEVC_HARMLESS = frozenset({35, 38, 39, 40})
"""Access unit delimiter, filler data, prefix and suffix SEI."""
_HEVC_ENDS = frozenset({36, 37})
"""End of sequence, end of bitstream."""


class Picture(NamedTuple):
    """What the NAL units of a packet tell of its picture."""

    layer: int = 0
    """Temporal layer."""
    unreferenced: bool = False
    """No picture of its own layer refers to it."""
    has_sets: bool = False
    """Parameter sets come with it."""
    kind: int = -1
    """HEVC: NAL type of its last slice; -1 without."""
    ended: bool = False
    """HEVC: the sequence before it has ended."""
    ends: bool = False
    """HEVC: the sequence ends with it."""
    empty: bool = False
    """The packet holds no picture at all."""


_REFERRED, _UNREFERENCED = Picture(), Picture(unreferenced=True)


def picture_of(codec: str, packet: bytes, length_size: int) -> Picture:
    """Looks at the NAL units of a packet of H.264 or HEVC; another codec's picture counts as referred to.

    H.264: unreferenced when every slice has ``nal_ref_idc`` 0 (H.264 clause 7.4.1); there are no layers, so it is 0. HEVC:
    unreferenced when every slice is of a sub-layer non-reference picture (an even NAL type below 16, H.265 table 7-1) of layer
    0. Pictures of higher temporal layers may refer to it all the same, so only those of the stream's highest layer can be left
    out. A packet that carries anything else that lasts, such as parameter sets, counts as referred to.
    """
    single = codec == "h264" and length_size == 4 and len(packet) > 4 and packet[:4] == (len(packet) - 4).to_bytes(4, "big")
    if single and packet[4] & 31 in _H264_SLICES:  # as most are: told in a third of the time
        return _REFERRED if packet[4] & 0x60 else _UNREFERENCED
    layer, slices, lasting, sets = 0, 0, False, False
    picture, ended, ends, found = -1, False, False, False
    if codec not in ("h264", "hevc"):
        return _REFERRED
    try:
        for start, end in units(packet, length_size):
            if start == end:
                continue
            found = True
            if codec == "h264":
                kind = packet[start] & 31
                if kind in _H264_SLICES:
                    slices += 1
                    lasting = lasting or bool(packet[start] >> 5 & 3)
                else:
                    lasting = lasting or kind not in _H264_HARMLESS
                    sets = sets or is_parameter_set(codec, packet[start])
            else:
                kind = packet[start] >> 1 & 63
                if kind in _HEVC_SLICES:
                    slices += 1
                    picture, ended, ends = kind, ended or ends, False
                    outer_layer = (packet[start] & 1) << 5 | packet[start + 1] >> 3
                    lasting = lasting or kind >= 16 or bool(kind % 2) or bool(outer_layer)
                    layer = max(layer, (packet[start + 1] & 7) - 1)
                else:
                    lasting = lasting or kind not in _HEVC_HARMLESS
                    ends = ends or kind in _HEVC_ENDS
                    sets = sets or is_parameter_set(codec, packet[start])
    except (ValueError, IndexError):
        return Picture(layer, False, sets, picture, ended, ends)
    return Picture(layer, found and not lasting, sets, picture, ended, ends, slices == 0)


def opening(codec: str, packet: bytes, length_size: int, slice_bytes: int) -> bytes:
    """A packet of H.264 or HEVC up to the first ``slice_bytes`` of its first slice: what its headers say, without its picture.

    Returns:
        In the packet's own form; the packet itself for other codecs, where its lengths are wrong, and without slices.
    """
    if codec not in ("h264", "hevc"):
        return packet
    slices = _H264_SLICES if codec == "h264" else _HEVC_SLICES
    try:
        for start, end in units(packet, length_size):
            kind = packet[start] & 31 if codec == "h264" else packet[start] >> 1 & 63
            if kind in slices:
                size = min(slice_bytes, end - start)
                prefix = (
                    packet[:start] if length_size == 0 else packet[: start - length_size] + size.to_bytes(length_size, "big")
                )
                return prefix + packet[start : start + size]
    except (ValueError, IndexError, OverflowError):
        pass
    return packet
