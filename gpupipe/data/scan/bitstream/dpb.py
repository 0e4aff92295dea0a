"""How many pictures a decoder has to hold for a stream: what its parameter sets ask for and what its level allows."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from gpupipe.data.scan.bitstream.nal import BitReader, unescape
from gpupipe.data.scan.bitstream.sequence import sequences

_MAX_FRAMES = 16
_H264_MAX_DPB_MBS = {
    9: 396, 10: 396, 11: 900, 12: 2376, 13: 2376, 20: 2376, 21: 4752, 22: 8100, 30: 8100, 31: 18000, 32: 20480, 40: 32768,
    41: 32768, 42: 34816, 50: 110400, 51: 184320, 52: 184320, 60: 696320, 61: 696320, 62: 696320,
}  # fmt: skip
"""H.264 table A-1: macroblocks that the picture buffer of a level has room for."""
_HEVC_MAX_LUMA = {
    30: 36864, 60: 122880, 63: 245760, 90: 552960, 93: 983040, 120: 2228224, 123: 2228224, 150: 8912896, 153: 8912896,
    156: 8912896, 180: 35651584, 183: 35651584, 186: 35651584,
}  # fmt: skip
"""H.265 table A.8: luma samples of a level's largest picture."""
_WITH_CHROMA_FORMAT = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244)
"""H.264 profiles whose sequence parameter sets state chroma format, depth and scaling lists."""


@lru_cache(maxsize=1024)
def pictures_held(codec: str, sets: bytes) -> tuple[int, ...]:
    """What the decoded picture buffer of a stream is sized by.

    Args:
        codec: ``h264`` and ``hevc`` state it; any other codec has a fixed number of pictures.
        sets: parameter sets in Annex B form.

    Returns:
        H.264 (clauses 7.3.2.1.1, E.1.1 and A.3.1): (reference frames, frames held). HEVC (clauses 7.3.2.2 and A.4.2): (pictures
        held, those that the level allows). The largest of each over all sequence parameter sets; empty where none can be read.
    """
    if codec not in ("h264", "hevc"):
        return ()
    read, header_bytes = (_h264, 1) if codec == "h264" else (_hevc, 2)
    found = []
    for unit in sequences(codec, sets, 0):
        with suppress(ValueError):  # damaged
            found.append(read(BitReader(unescape(unit[header_bytes:]))))
    return tuple(max(values) for values in zip(*found, strict=True))


def _h264(sps: BitReader) -> tuple[int, int]:
    profile, constraints, level = sps.bits(8), sps.bits(8), sps.bits(8)
    sps.unsigned()
    if profile in _WITH_CHROMA_FORMAT:
        _skip_h264_format(sps)
    sps.unsigned()
    order = sps.unsigned()
    if order == 0:
        sps.unsigned()
    elif order == 1:
        sps.bits(1)
        sps.unsigned(), sps.unsigned()
        for _ in range(min(sps.unsigned(), 255)):
            sps.unsigned()
    references = sps.unsigned()
    sps.bits(1)
    width, height = sps.unsigned() + 1, sps.unsigned() + 1
    if not sps.bits(1):  # fields: the height counts pairs of rows of macroblocks
        height *= 2
        sps.bits(1)
    sps.bits(1)
    if sps.bits(1):
        for _ in range(4):
            sps.unsigned()
    stated = _h264_buffering(sps) if sps.bits(1) else None
    if stated is not None:
        return references, stated
    one_b = level == 11 and constraints & 0x10 and profile in (66, 77, 88)
    room = _H264_MAX_DPB_MBS.get(9 if one_b else level, 0) // (width * height)
    return references, min(room, _MAX_FRAMES) or _MAX_FRAMES


def _skip_h264_format(sps: BitReader) -> None:
    chroma = sps.unsigned()
    if chroma == 3:
        sps.bits(1)
    sps.unsigned(), sps.unsigned()
    sps.bits(1)
    if sps.bits(1):
        for number in range(12 if chroma == 3 else 8):
            if sps.bits(1):
                _skip_scaling_list(sps, 16 if number < 6 else 64)


def _skip_scaling_list(sps: BitReader, entries: int) -> None:
    """H.264 clause 7.3.2.1.1.1: after a next scale of 0 no more of the list is sent."""
    last = 8
    for _ in range(entries):
        code = sps.unsigned()
        last = (last + (code + 1 >> 1 if code & 1 else -(code >> 1))) % 256
        if last == 0:
            return


def _h264_buffering(vui: BitReader) -> int | None:
    """``max_dec_frame_buffering``, where the usability information has it."""
    if vui.bits(1) and vui.bits(8) == 255:  # sample aspect ratio
        vui.bits(32)
    if vui.bits(1):
        vui.bits(1)
    if vui.bits(1):
        vui.bits(4)
        if vui.bits(1):
            vui.bits(24)
    if vui.bits(1):
        vui.unsigned(), vui.unsigned()
    if vui.bits(1):
        vui.bits(65)
    rates = [vui.bits(1) and _skip_h264_rate(vui) for _ in range(2)]
    if any(rates):
        vui.bits(1)
    vui.bits(1)
    if not vui.bits(1):
        return None
    vui.bits(1)
    return [vui.unsigned() for _ in range(6)][-1]


def _skip_h264_rate(vui: BitReader) -> bool:
    """H.264 clause E.1.2."""
    count = min(vui.unsigned(), 31) + 1
    vui.bits(8)
    for _ in range(count):
        vui.unsigned(), vui.unsigned()
        vui.bits(1)
    vui.bits(20)
    return True


def _hevc(sps: BitReader) -> tuple[int, int]:
    sps.bits(4)
    sub_layers = sps.bits(3)
    sps.bits(1)
    level = skip_profile_tier_level(sps, sub_layers)
    sps.unsigned()
    if sps.unsigned() == 3:
        sps.bits(1)
    width, height = sps.unsigned(), sps.unsigned()
    if sps.bits(1):
        for _ in range(4):
            sps.unsigned()
    sps.unsigned(), sps.unsigned(), sps.unsigned()
    held = 1
    for _ in range(sub_layers + 1 if sps.bits(1) else 1):  # the last one is that of all sub-layers
        held = sps.unsigned() + 1
        sps.unsigned(), sps.unsigned()
    samples, largest = width * height, _HEVC_MAX_LUMA.get(level, 0)
    if samples <= largest // 4:
        return held, 16
    return held, 12 if samples <= largest // 2 else 8 if samples <= 3 * largest // 4 else 6


def skip_profile_tier_level(reader: BitReader, sub_layers: int) -> int:
    """H.265 clause 7.3.3, with profilePresentFlag 1 and maxNumSubLayersMinus1 ``sub_layers``; returns the level."""
    reader.bits(88)
    level = reader.bits(8)
    if sub_layers:
        present = [(reader.bits(1), reader.bits(1)) for _ in range(8)][:sub_layers]
        for profile, sub_level in present:
            reader.bits(88 * profile + 8 * sub_level)
    return level
