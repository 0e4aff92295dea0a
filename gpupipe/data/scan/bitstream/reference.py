"""Which pictures no other picture refers to: packets of these may be left out where their frames are not wanted."""

from __future__ import annotations

from gpupipe.data.scan.bitstream.nal import units

_H264_SLICES = range(1, 6)
_H264_SEI, _H264_DELIMITER, _H264_FILLER = 6, 9, 12
_H264_HARMLESS = frozenset({_H264_SEI, _H264_DELIMITER, _H264_FILLER})
_HEVC_HARMLESS = frozenset({35, 38, 39, 40})
"""Access unit delimiter, filler data, prefix and suffix SEI."""


def unreferenced_layer(codec: str, packet: bytes, length_size: int) -> int | None:
    """The temporal layer of a packet to which no picture of its own layer refers; None when one may, or it is not known.

    H.264: every slice has ``nal_ref_idc`` 0 (H.264 clause 7.4.1); there are no layers, so it is 0. HEVC: every slice is a
    sub-layer non-reference picture (an even NAL type below 16, H.265 table 7-1) of layer 0; pictures of higher temporal layers
    may refer to it all the same, so only those of the stream's highest layer can be left out. A packet that carries anything
    else that lasts, such as parameter sets, counts as referred to. Other codecs: None.
    """
    if codec not in ("h264", "hevc"):
        return None
    layer: int | None = None
    try:
        for start, end in units(packet, length_size):
            if start == end:
                continue
            if codec == "h264":
                kind = packet[start] & 31
                if kind in _H264_SLICES:
                    if packet[start] >> 5 & 3:
                        return None
                    layer = 0
                elif kind not in _H264_HARMLESS:
                    return None
            else:
                kind = packet[start] >> 1 & 63
                if kind < 32:
                    outer_layer = (packet[start] & 1) << 5 | packet[start + 1] >> 3
                    if kind >= 16 or kind % 2 or outer_layer:
                        return None
                    layer = (packet[start + 1] & 7) - 1
                elif kind not in _HEVC_HARMLESS:
                    return None
    except (ValueError, IndexError):
        return None
    return layer
