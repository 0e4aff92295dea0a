"""The packets of a clip in another container, or changed: what files are like that no encoder makes by itself."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

Change = Callable[[Path, Path], Path]
"""Makes the second file out of the first one."""

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}


def remux(
    source: Path,
    target: Path,
    *,
    first: Callable[[int, av.Packet], bool] = lambda number, packet: True,
    later: int = 0,
    ahead: Callable[[av.Packet], bytes] = lambda packet: b"",
    sound_seconds: float = 0.0,
    **options: Any,
) -> Path:
    """Copies packets without decoding them.

    Args:
        first: whether the copy may begin at this packet (its number and itself).
        later: frames by which all times are moved; negative ones hide frames behind an edit list.
        ahead: bytes put before a packet's own.
        sound_seconds: length of a sound track to add.
        options: of the container that is written.
    """
    with av.open(str(source)) as container, av.open(str(target), "w", **options) as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        sound = out.add_stream("aac", rate=16000) if sound_seconds else None
        packets = [packet for packet in container.demux(stream) if packet.size]
        begin = next(number for number, packet in enumerate(packets) if first(number, packet))
        step = int(1 / (stream.average_rate or Fraction(25)) / (stream.time_base or Fraction(1)))
        for packet in packets[begin:]:
            data = ahead(packet) + bytes(packet)
            changed = av.Packet(len(data))
            changed.update(data)
            changed.pts = None if packet.pts is None else packet.pts + later * step
            changed.dts = None if packet.dts is None else packet.dts + later * step
            changed.duration, changed.is_keyframe = packet.duration, packet.is_keyframe
            changed.time_base, changed.stream = packet.time_base, copy
            out.mux(changed)
        if sound is not None:
            silence = np.zeros((1, int(16000 * sound_seconds)), np.float32)
            frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, 0
            out.mux(sound.encode(frame))
            out.mux(sound.encode(None))
    return target


def with_options(**options: Any) -> Change:
    return lambda source, target: remux(source, target, **options)


def hidden_start(source: Path, target: Path) -> Path:
    """The first seven frames lie before an edit list's start: decoded, never shown."""
    return remux(source, target, later=-7, options={"avoid_negative_ts": "disabled", "use_editlist": "1"})


def late_start(source: Path, target: Path) -> Path:
    """Begins at the second keyframe, which is none that clears the buffers when groups are open."""
    return remux(source, target, first=lambda number, packet: number > 0 and packet.is_keyframe)


def cut_start(source: Path, target: Path) -> Path:
    """Begins amid a group of pictures, as a recording of a broadcast does."""
    return remux(source, target, first=lambda number, packet: number == 10)


def ended_sequences(source: Path, target: Path) -> Path:
    """HEVC with the NAL units "end of sequence" (36) and "end of bitstream" (37) before each keyframe but the first."""
    ends = b"".join((2).to_bytes(4, "big") + bytes([kind << 1, 1]) for kind in (36, 37))
    return remux(source, target, ahead=lambda packet: ends if packet.is_keyframe and packet.pts else b"")


def longer_sound(source: Path, target: Path) -> Path:
    return remux(source, target, sound_seconds=6.0)


def without_sync_samples(source: Path, target: Path) -> Path:
    """An MP4 whose list of keyframes is gone, so that every packet counts as one."""
    data = source.read_bytes()
    assert b"stss" in data
    target.write_bytes(data.replace(b"stss", b"free", 1))
    return target


def ended_and_bare(source: Path, target: Path) -> Path:
    """:func:`ended_sequences` without a container, hence without times."""
    return remux(ended_sequences(source, target.with_suffix(".mp4")), target, format="hevc")


def one_time(source: Path, target: Path) -> Path:
    """Presentation times that are decoding times, as writers make that have one time for a packet."""
    with av.open(str(source)) as container, av.open(str(target), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for packet in container.demux(stream):
            if packet.size:
                packet.pts, packet.stream = packet.dts, copy
                out.mux(packet)
    return target


def with_empty_packets(source: Path, target: Path) -> Path:
    """H.264 with packets that hold no more than an access unit delimiter."""
    with av.open(str(source)) as container, av.open(str(target), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for number, packet in enumerate(packet for packet in container.demux(stream) if packet.size):
            assert packet.pts is not None
            assert packet.dts is not None
            packet.pts, packet.dts, packet.stream = 2 * packet.pts, 2 * packet.dts, copy
            pts, dts, base = packet.pts, packet.dts, packet.time_base
            out.mux(packet)
            if number % 20 == 10:
                delimiter = (2).to_bytes(4, "big") + b"\x09\xf0"
                extra = av.Packet(len(delimiter))
                extra.update(delimiter)
                extra.pts, extra.dts, extra.time_base, extra.stream = pts + 1, dts + 1, base, copy
                out.mux(extra)
    return target


def joined(*later: int) -> Change:
    """The same MPEG-TS recording several times over, each with its times moved by so many frames."""

    def change(source: Path, target: Path) -> Path:
        counters: dict[int, int] = {}
        whole = bytearray()
        for part, frames in enumerate(later):
            data = bytearray(remux(source, target.with_name(f"{part}.ts"), later=frames).read_bytes())
            for at in range(0, len(data), 188):  # continuity counters go on, or the last packet of each part counts as damaged
                stream = (data[at + 1] & 31) << 8 | data[at + 2]
                if data[at + 3] & 16:
                    counters[stream] = (counters.get(stream, -1) + 1) & 15
                data[at + 3] = data[at + 3] & 0xF0 | counters.get(stream, 0)
            whole += data
        target.write_bytes(whole)
        return target

    return change


def followed_by(other: Callable[[Path], Path]) -> Change:
    """FLV of a sender that stopped and began anew, with another configuration: the tags of both files."""

    def change(source: Path, target: Path) -> Path:
        first = remux(source, target.with_name("1.flv"))
        rest = remux(other(target.with_name("other.mp4")), target.with_name("2.flv")).read_bytes()[13:]
        moved, at = bytearray(), 0
        while at + 11 <= len(rest):
            size = int.from_bytes(rest[at + 1 : at + 4], "big")
            tag = bytearray(rest[at : at + 11 + size + 4])
            time = (int.from_bytes(tag[4:7], "big") | tag[7] << 24) + 10_000
            tag[4:7], tag[7] = (time & 0xFFFFFF).to_bytes(3, "big"), time >> 24
            moved += tag
            at += 11 + size + 4
        target.write_bytes(first.read_bytes() + moved)
        return target

    return change
