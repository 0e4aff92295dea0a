"""What has to stay the same for a decoder to keep its configuration: a change in mid-stream shows in the headers."""

from __future__ import annotations

from gpupipe.data.scan.bitstream.nal import BitReader, parameter_sets, units

_PARAMETER_SETS = {"h264": 7, "hevc": 33}
"""NAL type of the sequence parameter set."""
_VP8_START = b"\x9d\x01\x2a"
_VP9_SYNC = 0x498342
_SRGB = 7


def sequences(codec: str, packet: bytes, length_size: int) -> set[bytes]:
    """The sequence parameter sets in a packet of H.264 or HEVC, or the size that a frame of VP8 or VP9 states; empty without.

    Sources: RFC 6386 section 9.1 for VP8; VP9 Bitstream Specification 0.6 section 6.2 for VP9.
    """
    try:
        if codec in _PARAMETER_SETS:
            return _sets(codec, packet, length_size)
        if codec == "vp8" and not packet[0] & 1 and packet[3:6] == _VP8_START:
            return {packet[6:10]}
        if codec == "vp9":
            return _vp9_size(BitReader(packet[:16]))
    except (ValueError, IndexError):
        pass
    return set()


def sequences_of_extradata(codec: str, extradata: bytes) -> set[bytes]:
    """The sequence parameter sets of a sample description."""
    return sequences(codec, parameter_sets(codec, extradata), 0) if codec in _PARAMETER_SETS else set()


def _sets(codec: str, packet: bytes, length_size: int) -> set[bytes]:
    found = set()
    for start, end in units(packet, length_size):
        if start == end:
            continue
        kind = packet[start] & 31 if codec == "h264" else packet[start] >> 1 & 63
        if kind == _PARAMETER_SETS[codec]:
            found.add(packet[start:end].rstrip(b"\x00"))
    return found


def _vp9_size(header: BitReader) -> set[bytes]:
    """The size that a frame states; none for one that takes over the size of a frame that it refers to."""
    header.bits(2)
    profile = header.bits(1) | header.bits(1) << 1
    if profile == 3:
        header.bits(1)
    if header.bits(1):  # a frame that is there already is shown
        return set()
    inter, shown, resilient = header.bits(1), header.bits(1), header.bits(1)
    if not inter:
        if header.bits(24) != _VP9_SYNC:
            return set()
        _skip_vp9_colour(header, profile)
        return {header.bits(32).to_bytes(4, "big")}
    intra_only = not shown and header.bits(1)
    if not resilient:
        header.bits(2)
    if intra_only:
        if header.bits(24) != _VP9_SYNC:
            return set()
        if profile > 0:
            _skip_vp9_colour(header, profile)
        header.bits(8)
        return {header.bits(32).to_bytes(4, "big")}
    header.bits(8 + 3 * 4)
    if any(header.bits(1) for _ in range(3)):
        return set()
    return {header.bits(32).to_bytes(4, "big")}


def _skip_vp9_colour(header: BitReader, profile: int) -> None:
    if profile >= 2:
        header.bits(1)
    own_subsampling = profile in (1, 3)
    if header.bits(3) != _SRGB:
        header.bits(4 if own_subsampling else 1)
    elif own_subsampling:
        header.bits(1)
