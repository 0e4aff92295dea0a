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
