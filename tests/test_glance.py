"""MP4 files are opened with a look at few packets: that tells no other facts than a look at many."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from gpupipe.data import index
from gpupipe.data.scan.demux import open_video

_FRAMES = 8


def encoded(stream: av.VideoStream) -> list[av.Packet]:
    """Noise, of which each picture takes more bytes than a glance reads."""
    random = np.random.default_rng(0)
    packets: list[av.Packet] = []
    for number in range(_FRAMES):
        noise = random.integers(0, 256, (stream.height, stream.width, 3), np.uint8)
        frame = av.VideoFrame.from_ndarray(noise, format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = number + 2, Fraction(1, 25)  # sound that begins at 0 comes first
        packets += stream.encode(frame)
    return packets + stream.encode(None)


def add_video(container: av.container.OutputContainer, codec: str, width: int, options: dict[str, str]) -> av.VideoStream:
    stream = container.add_stream(codec, rate=25, options=options)
    assert isinstance(stream, av.VideoStream)
    stream.width, stream.height, stream.pix_fmt = width, 128, "yuv420p"
    return stream


def second_is_best(folder: Path) -> Path:
    """Two tracks that are both switched on, of which the second one has more bits."""
    path = folder / "two.mp4"
    with av.open(str(path), "w") as container:
        streams = [add_video(container, "libx264", width, {"qp": "10"}) for width in (192, 320)]
        for packet in sorted((p for s in streams for p in encoded(s)), key=lambda p: float((p.dts or 0) * p.time_base)):
            container.mux(packet)
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"tkhd", at + 1)) >= 0:
        data[at + 7] = 3  # enabled, in the movie
    path.write_bytes(data)
    return path


def sound_first(folder: Path) -> Path:
    """MPEG-2 whose sequence header comes with its pictures alone, behind a packet of sound that is all that a glance reads."""
    path = folder / "sound.mov"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("pcm_s24le", rate=48000, layout="stereo")
        stream = add_video(container, "mpeg2video", 192, {})
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 2 * 48000), np.int32), format="s32", layout="stereo")
        silence.sample_rate, silence.pts = 48000, 0
        for packet in [*sound.encode(silence), *encoded(stream)]:
            container.mux(packet)
    path.write_bytes(path.read_bytes().replace(b"esds", b"free"))
    return path


def test_of_several_streams_that_with_most_bits_is_taken(tmp_path: Path, fresh_cache: Path) -> None:
    found = index.load(str(second_is_best(tmp_path)))
    assert (found.stream, found.info.width) == (1, 320)


def test_the_header_of_a_sequence_is_found_behind_long_sound(tmp_path: Path, fresh_cache: Path) -> None:
    found = index.load(str(sound_first(tmp_path)))
    assert found.extradata[:4] == b"\x00\x00\x01\xb3"
    assert found.sets_at(0) == (found.extradata, False)


def test_a_plain_file_is_opened_once(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, str]] = []
    original = av.open

    def watched(*args: object, options: dict[str, str], **others: object) -> object:
        opened.append(options)
        return original(*args, options=options, **others)

    monkeypatch.setattr(av, "open", watched)
    container, _ = open_video(str(clips["h264"]))
    container.close()
    assert [options.get("probesize") for options in opened] == ["5000"]
