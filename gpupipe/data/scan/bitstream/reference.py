"""Which pictures no other picture refers to: packets of these may be left out where their frames are not wanted."""

from __future__ import annotations

from gpupipe.data.scan.bitstream.nal import units
from gpupipe.data.scan.bitstream.sets import is_parameter_set

_H264_SLICES = range(1, 6)
_H264_HARMLESS = frozenset({6, 9, 12})
"""SEI, access unit delimiter, filler data."""
_HEVC_HARMLESS = frozenset({35, 38, 39, 40})
"""Access unit delimiter, filler data, prefix and suffix SEI."""


def picture_layer(codec: str, packet: bytes, length_size: int) -> tuple[int, bool, bool]:
    """(temporal layer of a packet's picture, whether no picture of its own layer refers to it, whether it has parameter sets).

    H.264: unreferenced when every slice has ``nal_ref_idc`` 0 (H.264 clause 7.4.1); there are no layers, so it is 0. HEVC:
    unreferenced when every slice is of a sub-layer non-reference picture (an even NAL type below 16, H.265 table 7-1) of layer
    0. Pictures of higher temporal layers may refer to it all the same, so only those of the stream's highest layer can be left
    out. A packet that carries anything else that lasts, such as parameter sets, counts as referred to; so does every picture of
    another codec.
    """
    layer, slices, lasting, sets = 0, 0, False, False
    if codec not in ("h264", "hevc"):
        return 0, False, False
    try:
        for start, end in units(packet, length_size):
            if start == end:
                continue
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
                if kind < 32:
                    slices += 1
                    outer_layer = (packet[start] & 1) << 5 | packet[start + 1] >> 3
                    lasting = lasting or kind >= 16 or bool(kind % 2) or bool(outer_layer)
                    layer = max(layer, (packet[start + 1] & 7) - 1)
                else:
                    lasting = lasting or kind not in _HEVC_HARMLESS
                    sets = sets or is_parameter_set(codec, packet[start])
    except (ValueError, IndexError):
        return layer, False, sets
    return layer, slices > 0 and not lasting, sets
