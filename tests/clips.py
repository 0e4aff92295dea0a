"""Small videos whose frames tell their own number, so that a test can say which frame it was given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from gpupipe.data import index as indices
from gpupipe.data.scan.bitstream.nal import from_annexb, parameter_sets

_BITS = 8
_LOW, _HIGH = 50, 200
_CODE_SHARE = 0.2
"""Share of the height, from the top, that the code takes."""


def luma(number: int, width: int, height: int) -> np.ndarray:
    """(height, width) uint8: a row of blocks, bright for 1 and dark for 0, above a picture that moves.

    The blocks are wide and far apart in value, so that no codec at a sane rate changes what they say.
    """
    assert 0 <= number < 2**_BITS
    rows = np.arange(height)[:, None]
    columns = np.arange(width)[None, :]
    wave = np.sin((columns + 3 * number) / 9.0) * np.cos((rows - 2 * number) / 13.0)
    picture = (120 + 70 * wave).astype(np.uint8)
    edges = np.linspace(0, width, _BITS + 1).round().astype(int)
    for bit in range(_BITS):
        picture[: code_rows(height), edges[bit] : edges[bit + 1]] = _HIGH if number >> bit & 1 else _LOW
    return picture


def spoilt(source: Path, target: Path, packet: int) -> Path:
    """A copy of a video with some bits turned amid the packet of this number: the container is whole, the picture not."""
    index = indices.load(str(source))
    data = bytearray(source.read_bytes())
    begin, size = int(index.position[packet]), int(index.size[packet])
    middle = slice(begin + size * 2 // 3, begin + size * 2 // 3 + 8)
    data[middle] = bytes(byte ^ 0x5A for byte in data[middle])
    target.write_bytes(data)
    return target


def code_rows(height: int) -> int:
    return max(8, round(height * _CODE_SHARE))


def frame_number(frame: Any) -> int:
    """The number coded in a frame: a luma plane (H, W) or an RGB picture (3, H, W), 8 bits, as tensor or array.

    Raises:
        ValueError: when a block is neither clearly bright nor clearly dark: the frame was not decoded right.
    """
    picture = torch.as_tensor(frame).to("cpu", torch.float32)
    if picture.ndim == 3:
        picture = picture.mean(dim=0)
    height, width = picture.shape
    edges = np.linspace(0, width, _BITS + 1).round().astype(int)
    number = 0
    for bit in range(_BITS):
        margin = max(1, (edges[bit + 1] - edges[bit]) // 4)
        rows = code_rows(height)
        block = picture[rows // 4 : rows - rows // 4, edges[bit] + margin : edges[bit + 1] - margin]
        level = float(block.mean())
        if 105 < level < 145:
            raise ValueError(f"block {bit} has the level {level:.0f}: neither bright nor dark")
        number |= (level > 125) << bit
    return number


def write_clip(
    path: Path,
    codec: str = "libx264",
    *,
    width: int = 320,
    height: int = 240,
    frames: int = 60,
    fps: int = 30,
    gop: int = 30,
    bframes: int = 2,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    coloured: bool = False,
) -> Path:
    """Writes a clip in which ``frame_number`` of display frame k is k (modulo 256); grey, or with chroma that moves."""
    with scheduled_as_before(), av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options={**_OPTIONS.get(codec, {}), **(options or {})})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.gop_size = gop
        stream.codec_context.max_b_frames = bframes
        stream.time_base = stream.codec_context.time_base = Fraction(1, fps)
        for number in range(frames):
            gray = av.VideoFrame.from_ndarray(luma(number % 2**_BITS, width, height), format="gray")
            frame = gray.reformat(format=pix_fmt, src_color_range="MPEG", dst_color_range="MPEG")
            if coloured:
                _paint(frame, number)
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@contextmanager
def scheduled_as_before() -> Iterator[None]:
    """SVT-AV1 makes the thread that opens it one of real time, where root does: from then on it gives way to no other, nor do
    the threads and processes that it starts."""
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != before[0]:
            os.sched_setscheduler(0, *before)


def _paint(frame: av.VideoFrame, number: int) -> None:
    """Writes chroma of steep edges and of slopes into a frame of an 8-bit planar format."""
    for which in (1, 2):
        plane = frame.planes[which]
        rows, columns = np.mgrid[: plane.height, : plane.line_size]
        waves = np.sin((columns + 2 * number) / (5.0 + which)) + np.sign(np.cos((rows - number) / (3.0 + which)))
        plane.update((128 + 40 * waves).astype(np.uint8).tobytes())


def write_changing_sets(folder: Path, codec: str = "libx264") -> Path:
    """A clip of 80 frames whose second half needs other parameter sets, which come once, with its first keyframe of four."""
    settings = ("cabac=1:8x8dct=0", "cabac=0:8x8dct=0") if codec == "libx264" else ("signhide=1", "signhide=0")
    name = codec.removeprefix("lib")
    halves = []
    for number, setting in enumerate(settings):
        options = {f"{name}-params": f"scenecut=0:log-level=none:bframes=2:keyint=10:min-keyint=10:open-gop=0:{setting}"}
        halves.append(write_clip(folder / f"{name}-{number}.mp4", codec, frames=40, gop=10, options=options))
    whole = folder / f"{name}-sets.mp4"
    with av.open(str(whole), "w") as out, av.open(str(halves[0])) as one, av.open(str(halves[1])) as other:
        target = out.add_stream_from_template(one.streams.video[0])
        shift = 0
        for container in (one, other):
            stream = container.streams.video[0]
            extradata = bytes(stream.codec_context.extradata or b"")
            packets = [packet for packet in container.demux(stream) if packet.size]
            step = packets[0].duration or 1
            for number, packet in enumerate(packets):
                data = bytes(packet)
                if container is other and number == 0:
                    sets = parameter_sets(stream.codec_context.codec.canonical_name, extradata)
                    data = from_annexb(sets, 4) + data
                copy = av.Packet(len(data))
                copy.update(data)
                assert packet.pts is not None
                assert packet.dts is not None
                copy.pts, copy.dts = packet.pts + shift, packet.dts + shift
                copy.duration, copy.is_keyframe = packet.duration, packet.is_keyframe
                copy.time_base, copy.stream = packet.time_base, target
                out.mux(copy)
            shift = len(packets) * step
    return whole


_OPTIONS = {
    "libx264": {"preset": "veryfast", "crf": "20", "x264-params": "scenecut=0:log-level=none"},
    "libx265": {"preset": "ultrafast", "crf": "20", "x265-params": "scenecut=0:bframes=2:log-level=none"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "crf": "20", "b": "0"},
    "mpeg4": {"qscale": "3"},
}


def write_set(folder: Path) -> dict[str, Path]:
    """The clips of the ``clips`` fixture, 60 frames each, by name."""
    return {
        "h264": write_clip(folder / "h264.mp4"),
        "h264_odd": write_clip(folder / "h264_odd.mp4", width=178, height=146),
        "hevc": write_clip(folder / "hevc.mp4", "libx265"),
        "vp9": write_clip(folder / "vp9.webm", "libvpx-vp9", bframes=0),
        "vp9_odd": write_clip(folder / "vp9_odd.webm", "libvpx-vp9", width=175, height=143, bframes=0),
        "mpeg4": write_clip(folder / "mpeg4.avi", "mpeg4"),
    }
