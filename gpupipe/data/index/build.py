"""Makes an index: one demux of the file, and a software decode only where the packets do not tell the frames apart."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpupipe.data.bytes import Identity, LocalFile
from gpupipe.data.index.bitstream.nal import nal_length_size
from gpupipe.data.index.bitstream.reference import unreferenced_layer
from gpupipe.data.index.bitstream.sequence import sequences, sequences_of_extradata
from gpupipe.data.index.bitstream.start import is_start_point
from gpupipe.data.index.model import VideoIndex
from gpupipe.errors import OpenError
from gpupipe.types import Rotation, VideoInfo

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

_DATA_AFTER_POS = {"matroska,webm": 4, "flv": 16}
"""Bytes between a packet's ``pos`` and its data; 0 elsewhere. Every packet is compared before this is relied on."""
_MATRICES = {1: "bt709", 4: "bt601", 5: "bt601", 6: "bt601", 9: "bt2020", 10: "bt2020"}
"""FFmpeg's colour space numbers (ITU-T H.273 table 4); 2 and the rest: not stated or not known here."""
_RANGES = {1: "limited", 2: "full"}
_PROGRESSIVE = (0, 1)
"""FFmpeg's field orders "unknown" and "progressive"."""
_WINDOW_BYTES = 4 << 20
_building = threading.Semaphore(2)
"""Builds in one process at a time: a demux gives up the interpreter lock at each packet, so that many side by side spend
their time winning it back."""


def _after_fork() -> None:
    """A permit that another thread held at the fork would never come back in the child."""
    global _building
    _building = threading.Semaphore(2)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def open_video(path: str) -> tuple[InputContainer, VideoStream]:
    """Opens a file and finds its best video stream.

    Raises:
        OpenError: when it cannot be opened or has no video.
    """
    import av

    try:
        container = av.open(path)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OpenError(
            f"{path} cannot be opened as a video: {reason}", fix="is the file whole, and a video?", path=path
        ) from error
    stream = cast("VideoStream | None", container.streams.best("video"))
    if stream is None or stream.codec_context is None:
        container.close()
        raise OpenError(f"{path} has no video stream that can be decoded", fix="leave it out of the list", path=path)
    return container, stream


def build(identity: Identity) -> VideoIndex:
    """Reads all packets of the best video stream.

    Raises:
        OpenError: when the file cannot be opened, has no video, or its first frame cannot be decoded.
    """
    import av

    path = identity.path
    with _building:
        container, stream = open_video(path)
        with container:
            try:
                return _build(identity, container, stream)
            except av.error.FFmpegError as error:
                message = f"{path} cannot be indexed: {error.strerror}"
                raise OpenError(message, fix="is the file whole?", path=path) from error


def _build(identity: Identity, container: InputContainer, stream: VideoStream) -> VideoIndex:
    context = stream.codec_context
    context.thread_count = 1  # one frame is decoded here: starting a thread a core costs more
    codec = context.codec.canonical_name
    extradata = bytes(context.extradata or b"")
    length_size = nal_length_size(codec, extradata)
    offset = _DATA_AFTER_POS.get(container.format.name, 0)
    rows: list[tuple[int, int, int | None, int | None, bool, bool, bool]] = []
    layers: list[int | None] = []
    faults: list[str] = []
    kinds, uniform = sequences_of_extradata(codec, extradata), True
    first: Any = None
    with LocalFile(identity.path) as file:
        window = _Window(file)
        for packet in whole_packets(container, stream, faults):
            data = bytes(packet)
            at = -1 if packet.pos is None or packet.pos < 0 else packet.pos + offset
            if at >= 0 and not window.holds(at, data):
                at = -1
            start = packet.is_keyframe and is_start_point(codec, data, length_size)
            rows.append((at, len(data), packet.pts, packet.dts, packet.is_keyframe, start, not packet.is_discard))
            layers.append(unreferenced_layer(codec, data, length_size))
            if packet.is_keyframe:
                kinds |= sequences(codec, data, length_size)
                uniform = uniform and not packet.has_sidedata("new_extradata")
            if first is None:
                first = next(iter(_decode(context, packet)), None)
    if not rows:
        raise OpenError(f"{identity.path} holds no video packets", fix="leave it out of the list", path=identity.path)
    if first is None:
        first = next(iter(_decode(context, None)), None)
    position, size = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    key, starts, shown = (np.array([row[i] for row in rows], np.bool_) for i in (4, 5, 6))
    times = [row[2] for row in rows]
    interlaced = context.field_order not in _PROGRESSIVE or bool(first is not None and first.interlaced_frame)
    if None in times or interlaced or len(set(times)) < len(times):
        display = _display_by_decoding(identity.path)
        times = [pts if pts is not None else dts for pts, dts in ((row[2], row[3]) for row in rows)]
        in_order = None not in times and all(np.diff([cast(int, times[p]) for p in display]) >= 0)
        if not in_order:  # no usable clock: count frames at the average rate
            times = _counted(len(rows), display, stream)
    else:
        display = np.flatnonzero(shown)
        display = display[np.argsort(np.array(times, np.int64)[display], kind="stable")]
    if not len(display):
        raise OpenError(f"no frame of {identity.path} can be decoded", fix="is the file whole?", path=identity.path)
    highest = max((layer for layer in layers if layer is not None), default=0)
    droppable = np.array([layer == highest and not interlaced for layer in layers], np.bool_)
    if not starts.any():
        starts[0] = True
    pts = np.array(times, np.int64)
    seconds = pts[display] * float(_time_base(stream))
    info = _info(identity.path, container, stream, first, seconds, interlaced=interlaced, uniform=uniform and len(kinds) <= 1)
    if faults:
        promised = f"{stream.frames} frames promised, " if stream.frames > len(display) else ""
        info = replace(info, damage=f"{promised}{len(display)} found ({', '.join(sorted(set(faults)))})")
    arrays = (position, size, pts, key, starts, droppable, display)
    return VideoIndex(identity, info, stream.index, *arrays, extradata, length_size)


class _Window:
    """A moving piece of a file to compare packets with: one read serves many of them."""

    def __init__(self, file: LocalFile) -> None:
        self._file = file
        self._start = 0
        self._bytes = b""

    def holds(self, position: int, data: bytes) -> bool:
        """True when the file has ``data`` at ``position``."""
        if not self._start <= position <= position + len(data) <= self._start + len(self._bytes):
            self._start = position
            self._bytes = self._file.read(position, max(len(data), _WINDOW_BYTES))
        at = position - self._start
        return self._bytes[at : at + len(data)] == data


def whole_packets(container: InputContainer, stream: VideoStream, faults: list[str] | None = None) -> Iterator[Packet[Any]]:
    """All whole packets, one at a time; where the file is cut, those before the cut.

    Args:
        faults: gets a line for each packet that is left out because it is damaged, and for what ended the file early.
    """
    faults = [] if faults is None else faults
    import av

    found = False
    while True:
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    faults.append("a damaged packet")
                elif packet.size:
                    found = True
                    yield packet
            return
        except IndexError:  # a packet of a stream that the header does not have, which PyAV cannot name: read on behind it
            continue
        except av.error.FFmpegError as error:
            if not found:
                raise
            faults.append(str(error.strerror))
            return


def _decode(context: Any, packet: Packet[Any] | None) -> list[Any]:
    import av

    try:
        return list(context.decode(packet))
    except av.error.FFmpegError:
        return []


def _display_by_decoding(path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The packets that yield frames, in the order in which a sequential software decode puts them out."""
    container, stream = open_video(path)
    with container:
        context = stream.codec_context
        context.thread_count = 1
        found: list[int] = []
        for number, packet in enumerate(whole_packets(container, stream)):
            packet.pts = packet.dts = number
            found += [frame.pts for frame in _decode(context, packet) if frame.pts is not None]
        found += [frame.pts for frame in _decode(context, None) if frame.pts is not None]
    return np.array(list(dict.fromkeys(found)), np.int64)


def _counted(packets: int, display: Any, stream: VideoStream) -> list[int | None]:
    tick = float(_time_base(stream))
    step = 1 / (float(stream.average_rate or 25) * tick)
    times = [0.0] * packets
    for shown, packet in enumerate(display):
        times[packet] = shown * step
    return [round(time) for time in times]


def _time_base(stream: VideoStream) -> Fraction:
    """Seconds a tick; MPEG's own clock where the container does not say."""
    return Fraction(stream.time_base or Fraction(1, 90000))


def _info(
    path: str, container: InputContainer, stream: VideoStream, first: Any, seconds: Any, *, interlaced: bool, uniform: bool
) -> VideoInfo:
    context: Any = stream.codec_context
    if first is None and not context.pix_fmt:
        raise OpenError(f"no frame of {path} can be decoded", fix="is the file whole?", path=path)
    pix_fmt = first.format.name if first is not None else context.pix_fmt
    steps = np.diff(seconds)
    mean_step = float(steps.mean()) if len(steps) else 1 / float(stream.average_rate or 25)
    rotation = (-first.rotation if first is not None else 0) % 360
    sample_format = first.format if first is not None else context.format
    matrix, sample_range = _MATRICES.get(int(context.colorspace)), _RANGES.get(int(context.color_range))
    if pix_fmt.startswith("yuvj"):
        sample_range = "full"
    if sample_format.is_rgb:  # the decoder turns RGB codecs into 4:4:4 with swscale's own matrix and range
        matrix, sample_range = "bt601", "limited"
    return VideoInfo(
        path=path,
        container=container.format.name,
        codec=context.codec.canonical_name,
        pix_fmt=pix_fmt,
        width=first.width if first is not None else context.width,
        height=first.height if first is not None else context.height,
        frames=len(seconds),
        time_base=_time_base(stream),
        fps=1 / mean_step if mean_step > 0 else float(stream.average_rate or 25),
        start_seconds=float(seconds[0]),
        duration_seconds=float(seconds[-1] - seconds[0]) + mean_step,
        rotation=cast(Rotation, rotation if rotation in (90, 180, 270) else 0),
        bit_depth=sample_format.components[0].bits,
        color_matrix=cast(Any, matrix),
        color_range=cast(Any, sample_range),
        chroma_location="center" if context.codec.canonical_name in ("mjpeg", "mpeg1video") else "left",
        pixel_aspect=Fraction(stream.sample_aspect_ratio or 1) or Fraction(1),
        interlaced=interlaced,
        uniform=uniform,
        variable_rate=bool(len(steps) and float(steps.max() - steps.min()) > 0.5 * mean_step),
    )
