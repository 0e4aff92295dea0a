"""NAL units, parameter sets and start points: against FFmpeg's own bit-stream filters, hand-made headers, and rubbish."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
from av.bitstream import BitStreamFilterContext
from clips import write_clip
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.data.scan.bitstream.dpb import pictures_held
from gpupipe.data.scan.bitstream.nal import (
    START_CODE,
    BitReader,
    from_annexb,
    nal_length_size,
    parameter_sets,
    to_annexb,
    unescape,
    units,
)
from gpupipe.data.scan.bitstream.reference import Picture, opening, picture_of
from gpupipe.data.scan.bitstream.sequence import sequences
from gpupipe.data.scan.bitstream.sets import ParameterSets
from gpupipe.data.scan.bitstream.start import is_start_point


def nals(data: bytes) -> list[bytes]:
    return [data[start:end].rstrip(b"\0") for start, end in units(data, 0)]


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc"])
def test_annex_b_equals_the_filter_of_ffmpeg(name: str, clips: dict[str, Path]) -> None:
    with av.open(str(clips[name])) as container:
        stream = container.streams.video[0]
        codec, extradata = stream.codec_context.name, bytes(stream.codec_context.extradata or b"")
        size = nal_length_size(codec, extradata)
        assert size == 4
        bsf = BitStreamFilterContext(f"{codec}_mp4toannexb", stream)
        packets = [packet for packet in container.demux(stream) if packet.size]
        ours = []
        for number, packet in enumerate(packets):
            ours.append(to_annexb(bytes(packet), size, parameter_sets(codec, extradata) if number == 0 else b""))
        theirs = [bytes(out) for packet in packets for out in bsf.filter(packet)]
    assert len(theirs) == len(ours) == 60
    sets = {"h264": 2, "hevc": 3}[codec]
    assert len(nals(parameter_sets(codec, extradata))) >= sets
    for mine, other in zip(ours, theirs, strict=True):
        # FFmpeg puts parameter sets before each keyframe; ours come once
        wanted = nals(other)
        assert [unit for unit in nals(mine) if unit in wanted] == nals(mine)
        assert [unit for unit in wanted if unit not in nals(parameter_sets(codec, extradata))] == [
            unit for unit in nals(mine) if unit not in nals(parameter_sets(codec, extradata))
        ]


def test_streams_in_annex_b_form_are_left_alone(tricky: Path) -> None:
    with av.open(str(tricky / "t06_start8s.ts")) as container:
        extradata = bytes(container.streams.video[0].codec_context.extradata or b"")
    assert nal_length_size("h264", extradata) == 0
    assert parameter_sets("h264", extradata) == extradata
    assert to_annexb(b"packet", 0, b"head") == b"headpacket"
    assert to_annexb(b"packet", 0) == b"packet"
    assert nal_length_size("vp9", b"\x01" * 30) == 0


def avcc(length_size: int, *sets: bytes) -> bytes:
    sps, *pps = sets
    parts = [b"\x01\x64\x00\x1f", bytes([0xFC | (length_size - 1), 0xE1]), len(sps).to_bytes(2, "big"), sps, bytes([len(pps)])]
    return b"".join([*parts, *(len(unit).to_bytes(2, "big") + unit for unit in pps)])


@pytest.mark.parametrize("length_size", [1, 2, 4])
def test_length_fields_of_every_size(length_size: int) -> None:
    description = avcc(length_size, b"\x67sps", b"\x68pps", b"\x68more")
    assert nal_length_size("h264", description) == length_size
    assert parameter_sets("h264", description) == b"".join(START_CODE + unit for unit in (b"\x67sps", b"\x68pps", b"\x68more"))
    contents = [b"\x06sei", b"\x65" + bytes(40), b""]
    packet = b"".join(len(unit).to_bytes(length_size, "big") + unit for unit in contents)
    assert to_annexb(packet, length_size, b"HEAD") == b"HEAD" + b"".join(START_CODE + unit for unit in contents)
    assert [packet[start:end] for start, end in units(packet, length_size)] == contents
    with pytest.raises(ValueError, match="NAL unit length"):
        to_annexb(packet + (9).to_bytes(length_size, "big") + b"short", length_size)


def test_start_codes_of_three_and_four_bytes() -> None:
    packet = b"\0\0\0\1\x09\xf0" + b"\0\0\1\x67ab" + b"\0\0\0\1\x65cd"
    assert nals(packet) == [b"\x09\xf0", b"\x67ab", b"\x65cd"]


def test_emulation_prevention_is_undone() -> None:
    assert unescape(b"\x06\0\0\3\1\0\0\3\0\0\3\2") == b"\x06\0\0\1\0\0\0\0\2"


def test_exp_golomb_codes_of_the_standards_table() -> None:
    # H.264 table 9-1: 1, 010, 011, 00100, 00101 … code 0, 1, 2, 3, 4
    reader = BitReader(int("1" + "010" + "011" + "00100" + "00101" + "0001000", 2).to_bytes(3, "big"))
    assert [reader.unsigned() for _ in range(6)] == [0, 1, 2, 3, 4, 7]
    with pytest.raises(ValueError, match="ends early"):
        BitReader(b"\0\0").unsigned()


def bits(text: str) -> bytes:
    text = text.replace(" ", "") + "1"
    return int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")


def sei(*messages: tuple[int, bytes]) -> bytes:
    def number(value: int) -> bytes:
        return b"\xff" * (value // 255) + bytes([value % 255])

    return b"\x06" + b"".join(number(kind) + number(len(body)) + body for kind, body in messages) + b"\x80"


def h264(*contents: bytes) -> bytes:
    return b"".join(START_CODE + unit for unit in contents)


EXACT = bits("1 1 0 00")  # recovery_frame_cnt ue(0), exact_match_flag, broken_link_flag, changing_slice_group_idc
SLICE = b"\x41\x9a\x22"


@pytest.mark.parametrize(
    ("packet", "start"),
    [
        (h264(b"\x65idr"), True),
        (h264(b"\x09\xf0", b"\x67sps", b"\x68pps", b"\x65idr"), True),
        (h264(SLICE), False),
        (h264(sei((6, EXACT)), SLICE), True),
        (h264(sei((1, b"timing"), (6, EXACT)), SLICE), True),
        (h264(sei((5, b"u" * 300), (6, EXACT)), SLICE), True),
        (h264(sei((5, b"u" * 255)), sei((6, EXACT)), SLICE), True),
        (h264(sei((261, EXACT)), SLICE), False),
        (h264(sei((6, bits("010 1 0 00"))), SLICE), False),  # recovers one frame later
        (h264(sei((6, bits("00101 1 0 00"))), SLICE), False),
        (h264(sei((6, bits("1 0 0 00"))), SLICE), False),  # only roughly
        (h264(sei((6, bits("1 1 1 00"))), SLICE), False),  # broken link
        (h264(sei((6, b""))[:-1], SLICE), False),
        (h264(SLICE, sei((6, EXACT))), False),  # belongs to what follows
        (b"", False),
    ],
)
def test_h264_start_points(packet: bytes, start: bool) -> None:
    assert is_start_point("h264", packet, 0) is start
    prefixed = b"".join((end - at).to_bytes(4, "big") + packet[at:end] for at, end in units(packet, 0))
    assert is_start_point("h264", prefixed, 4) is start


@pytest.mark.parametrize(
    ("kind", "start"), [(0, False), (1, False), (9, False), *((k, True) for k in range(16, 22)), (22, False)]
)
def test_hevc_start_points(kind: int, start: bool) -> None:
    unit = bytes([kind << 1, 1]) + b"slice"
    assert is_start_point("hevc", START_CODE + b"\x40\x01vps" + START_CODE + unit, 0) is start


def test_other_codecs_trust_the_container() -> None:
    assert is_start_point("vp9", b"anything", 0)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["h264", "hevc"]), st.binary(max_size=400), st.sampled_from([0, 1, 2, 4]))
def test_rubbish_is_read_in_bounded_time(codec: str, data: bytes, length_size: int) -> None:
    begin = time.thread_time()
    for extradata in (data, b"\x01" + data, b"\x01" * 22 + b"\xff" + data, b"\x01" * 22 + b"\xff" + b"\xff" * 400 + data):
        sets = parameter_sets(codec, extradata)
        assert isinstance(sets, bytes)
        assert nal_length_size(codec, extradata) in (0, 1, 2, 3, 4)
    assert is_start_point(codec, data, length_size) in (True, False)
    assert is_start_point(codec, START_CODE + b"\x06" + data, 0) in (True, False)
    try:
        out: Any = to_annexb(data, length_size)
    except ValueError:
        out = b""
    assert isinstance(out, bytes)
    assert time.thread_time() - begin < 1


def packets_of(path: Path) -> tuple[str, bytes, list[Any]]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        packets = [packet for packet in container.demux(stream) if packet.size]
        return context.codec.canonical_name, bytes(context.extradata or b""), packets


@pytest.mark.parametrize("name", ["h264", "hevc"])
def test_unreferenced_pictures_are_some_of_the_b_pictures(name: str, clips: dict[str, Path]) -> None:
    codec, extradata, packets = packets_of(clips[name])
    size = nal_length_size(codec, extradata)
    free = [packet for packet in packets if picture_of(codec, bytes(packet), size).unreferenced]
    assert 10 < len(free) < 50
    following = {packet.pts for one, packet in pairwise(packets) if packet.pts < one.pts}
    assert {packet.pts for packet in free} & following, "decoded after pictures that are shown later: B pictures"
    assert not any(packet.is_keyframe for packet in free)


def test_a_picture_with_parameter_sets_or_a_reference_is_kept() -> None:
    free, referred, sets = b"\x01\x9a", b"\x41\x9a", b"\x67\x64"
    assert picture_of("h264", START_CODE + free, 0)[:3] == (0, True, False)
    assert picture_of("h264", START_CODE + free + START_CODE + referred, 0)[:3] == (0, False, False)
    assert picture_of("h264", START_CODE + sets + START_CODE + free, 0)[:3] == (0, False, True)
    assert picture_of("hevc", START_CODE + bytes([0 << 1, 3]), 0)[:3] == (2, True, False), "TRAIL_N of the third temporal layer"
    assert picture_of("hevc", START_CODE + bytes([1 << 1, 3]), 0)[:3] == (2, False, False), (
        "TRAIL_R of the third temporal layer"
    )
    assert picture_of("hevc", START_CODE + bytes([0 << 1, 8 | 1]), 0)[:3] == (0, False, False), "another layer than the base"
    assert picture_of("vp9", free, 0)[:3] == (0, False, False)
    assert picture_of("h264", b"", 4)[:3] == (0, False, False)


@pytest.mark.parametrize("byte", [*range(256)])
def test_a_packet_of_one_unit_is_told_like_any_other(byte: int) -> None:
    unit = bytes([byte]) + b"\x9a\x12"
    assert picture_of("h264", b"\0\0\0\3" + unit, 4) == picture_of("h264", b"\0\3" + unit, 2)
    assert picture_of("h264", b"\0\0\0\4" + unit, 4) == picture_of("h264", b"\0\4" + unit, 2), "its length is wrong"
    assert picture_of("h264", b"\0\0\0" + bytes([byte]), 4) == Picture(empty=byte == 0), "and nothing after it"


@pytest.mark.parametrize("length_size", [0, 1, 2, 4])
def test_the_opening_of_a_packet_ends_amid_its_first_slice(length_size: int) -> None:
    units_before = [b"\x67" + bytes(9), b"\x06\x01\x02"]
    long_slice, second = b"\x65" + bytes(range(1, 200)), b"\x65" + bytes(50)

    def packed(*parts: bytes) -> bytes:
        prefixes = (len(part).to_bytes(length_size, "big") if length_size else START_CODE for part in parts)
        return b"".join(prefix + part for prefix, part in zip(prefixes, parts, strict=True))

    packet = packed(*units_before, long_slice, second)
    assert opening("h264", packet, length_size, 20) == packed(*units_before, long_slice[:20])
    assert opening("h264", packet, length_size, 500).rstrip(b"\0") == packed(*units_before, long_slice)
    assert opening("h264", packed(*units_before), length_size, 20) == packed(*units_before)
    assert opening("vp9", packet, length_size, 20) == packet


def test_the_opening_of_a_packet_with_wrong_lengths_is_the_packet() -> None:
    packet = b"\0\0\1\0\x65" + bytes(20)
    assert opening("h264", packet, 4, 8) == packet


def test_ends_of_sequences_of_hevc_before_and_after_a_picture() -> None:
    end, picture = START_CODE + bytes([36 << 1, 1]), START_CODE + bytes([21 << 1, 1])
    assert picture_of("hevc", picture, 0)[3:6] == (21, False, False)
    assert picture_of("hevc", end + picture, 0)[3:6] == (21, True, False)
    assert picture_of("hevc", picture + end, 0)[3:6] == (21, False, True)
    assert picture_of("hevc", end, 0)[3:] == (-1, False, True, True), "no picture at all"


@pytest.mark.parametrize(("name", "width", "height"), [("vp9", 320, 240), ("vp9_odd", 175, 143)])
def test_vp9_keyframes_state_their_size(name: str, width: int, height: int, clips: dict[str, Path]) -> None:
    _, _, packets = packets_of(clips[name])
    stated = [sequences("vp9", bytes(packet), 0) for packet in packets if packet.is_keyframe]
    assert stated
    assert set.union(*stated) == {(width - 1).to_bytes(2, "big") + (height - 1).to_bytes(2, "big")}
    assert not any(sequences("vp9", bytes(packet), 0) for packet in packets if not packet.is_keyframe)


@given(st.binary(max_size=64), st.sampled_from(["h264", "hevc", "vp8", "vp9", "mpeg4"]), st.sampled_from([0, 1, 2, 4]))
def test_headers_of_rubbish_are_no_error(data: bytes, codec: str, size: int) -> None:
    sequences(codec, data, size)
    picture_of(codec, data, size)


def bits(*fields: tuple[int, int]) -> bytes:
    """Fields of (value, width), most significant bit first, padded to 16 bytes."""
    text = "".join(f"{value:0{width}b}" for value, width in fields)
    return int(text.ljust(128, "0"), 2).to_bytes(16, "big")


def test_vp9_frames_that_state_a_size_of_their_own() -> None:
    size = ((319, 16), (239, 16))
    stated = {(319).to_bytes(2, "big") + (239).to_bytes(2, "big")}
    head = ((2, 2), (0, 1), (0, 1), (0, 1))  # marker, profile 0, not one that is there already
    inter = (*head, (1, 1), (1, 1), (0, 1), (0, 2), (1, 8), *(((k, 3), (0, 1))[j] for k in range(3) for j in range(2)))
    assert sequences("vp9", bits(*inter, (0, 3), *size), 0) == stated, "no reference has its size"
    assert sequences("vp9", bits(*inter, (0, 1), (1, 1), *size), 0) == set(), "the size of its second reference"
    intra = (*head, (1, 1), (0, 1), (0, 1), (1, 1), (0, 2), (0x498342, 24), (255, 8))
    assert sequences("vp9", bits(*intra, *size), 0) == stated
    assert sequences("vp9", bits((2, 2), (0, 2), (1, 1), (3, 3)), 0) == set(), "a frame shown again"


@pytest.mark.parametrize("name", ["h264", "hevc"])
def test_parameter_sets_stay_in_force_until_one_of_their_number_comes(name: str, clips: dict[str, Path]) -> None:
    codec, extradata, _ = packets_of(clips[name])
    first = ParameterSets(codec, extradata).in_force()
    assert first.count(START_CODE) == (2 if codec == "h264" else 3)
    known = ParameterSets(codec, b"")
    assert known.in_force() == b""
    units = [START_CODE + unit for unit in first.split(START_CODE)[1:]]
    for unit in reversed(units):
        known.see(unit + b"\x00" + START_CODE, 0)  # a zero before a start code belongs to that
    assert known.in_force() == first, "each behind those that it refers to, whenever it came"
    longer = units[-1] + b"\x55"
    known.see(longer, 0)
    assert known.in_force() == b"".join(units[:-1]) + longer
    known.see(units[-1][:5] + b"\x00\x00", 0)
    known.see(b"rubbish", 4)
    assert known.in_force() == b"".join(units[:-1]) + longer, "damaged ones say nothing"


def test_a_sequence_parameter_set_of_hevc_with_sub_layers_has_its_number_behind_them() -> None:
    general, sub_layer = "0" * 88, "1" * 88 + "0" * 8

    def unit(number_bits: str) -> bytes:
        bits = "0000" + "001" + "1" + general + "0" * 8 + "11" + "00" * 7 + sub_layer + number_bits + "1"
        return START_CODE + b"\x42\x01" + int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")

    sets = ParameterSets("hevc", b"")
    sets.see(unit("1") + unit("010"), 0)
    assert sets.in_force().count(START_CODE) == 2
    sets.see(unit("1"), 0)
    assert sets.in_force().count(START_CODE) == 2


def test_length_fields_and_start_codes_turn_into_each_other() -> None:
    stream = START_CODE + b"\x67abc" + START_CODE + b"\x68d"
    for size in (1, 2, 4):
        fields = from_annexb(stream, size)
        assert fields == (4).to_bytes(size, "big") + b"\x67abc" + (2).to_bytes(size, "big") + b"\x68d"
        assert to_annexb(fields, size) == stream
    assert from_annexb(stream, 0) == stream


@pytest.mark.parametrize(
    ("codec", "params", "bframes", "held"),
    [
        ("libx264", "ref=1", 0, (1, 1)),
        ("libx264", "ref=16:bframes=3", 3, (16, 16)),
        ("libx264", "ref=5:nal-hrd=vbr:vbv-maxrate=800:vbv-bufsize=800", 0, (5, 5)),
        ("libx264", "ref=5:cqm=jvt:colorprim=bt709:chromaloc=1:videoformat=pal:overscan=show", 0, (5, 5)),
        ("libx264", "ref=3:interlaced=1:sar=7/5", 0, (3, 3)),
        ("libx264", "keyint=1:level=30", 0, (0, 16)),  # all intra: no bitstream restriction, so the level's 8100 macroblocks
        ("libx265", "ref=3:bframes=0", 0, (4, 16)),
        ("libx265", "ref=5:bframes=3:temporal-layers=1:hrd=1:vbv-maxrate=800:vbv-bufsize=800", 3, (6, 16)),
    ],
)
def test_pictures_that_a_stream_makes_a_decoder_hold(
    codec: str, params: str, bframes: int, held: tuple[int, int], tmp_path: Path
) -> None:
    key = codec.removeprefix("lib") + "-params"
    options = {key: f"{params}:log-level=none", "preset": "medium"}
    path = write_clip(tmp_path / "a.mp4", codec, width=192, height=160, frames=4, bframes=bframes, options=options)
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        name = context.codec.canonical_name
        sets = ParameterSets(name, bytes(context.extradata or b"")).in_force()
    assert pictures_held(name, sets) == held


@pytest.mark.parametrize(("size", "frames"), [((1920, 1080), 4), ((1280, 720), 9), ((640, 360), 16)])
def test_pictures_that_a_level_allows(size: tuple[int, int], frames: int, tmp_path: Path) -> None:
    """H.264 table A-1 at level 4: 32768 macroblocks, rounded down, at most 16 frames."""
    width, height = size
    options = {"x264-params": "keyint=1:level=40:log-level=none", "preset": "medium"}
    path = write_clip(tmp_path / "a.mp4", width=width, height=height, frames=1, bframes=0, options=options)
    with av.open(str(path)) as container:
        sets = ParameterSets("h264", bytes(container.streams.video[0].codec_context.extradata or b"")).in_force()
    assert pictures_held("h264", sets)[1] == frames


@given(st.binary(max_size=80), st.sampled_from(["h264", "hevc"]))
@settings(deadline=None, max_examples=300)
def test_held_pictures_of_rubbish_are_no_error(data: bytes, codec: str) -> None:
    sequence = b"\x67" if codec == "h264" else b"\x42\x01"
    assert len(pictures_held(codec, b"\x00\x00\x00\x01" + sequence + data)) in (0, 2)
