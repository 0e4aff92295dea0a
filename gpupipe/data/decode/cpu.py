"""Software decode through PyAV: everything that FFmpeg reads, as the codec's own planes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupipe.data.decode.feed import PacketFeed
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan
from gpupipe.data.scan.bitstream.nal import from_annexb
from gpupipe.data.scan.demux import decoded, open_video, software_name, whole_packets
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.errors import DecodeError
from gpupipe.types import PlaneFormat, Planes

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.frame import VideoFrame

_SELF_CONTAINED = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg1video", "mpeg2video", "mpeg4", "mjpeg", "png", "ffv1")
"""Codecs whose stream and extradata say all; others need what only the container has, such as a tag or the bits of a pixel."""
Allocate = Callable[[tuple[int, ...], Any], np.ndarray]
_SUBSAMPLING = {"420": (2, 2), "422": (2, 1), "444": (1, 1)}


def decode(
    index: VideoIndex, plan: Plan, stop: Stop = never, files: OpenFiles = UNKEPT, damaged: list[int] | None = None
) -> Planes:
    """Decodes a plan's frames with one thread, as :func:`decode_arrays` does.

    Returns:
        Planes on the CPU, one frame for each of ``plan.frames``.
    """
    import torch

    data, layout = decode_arrays(index, plan, stop, files=files, damaged=damaged)
    return Planes(torch.from_numpy(data), layout)


def decode_arrays(
    index: VideoIndex,
    plan: Plan,
    stop: Stop = never,
    allocate: Allocate = np.empty,
    files: OpenFiles = UNKEPT,
    damaged: list[int] | None = None,
) -> tuple[np.ndarray, PlaneFormat]:
    """Decodes a plan's frames with one thread, and without torch.

    Args:
        allocate: makes the memory of a shape and dtype that the frames are written to.
        files: lends the file.
        damaged: gets the display positions of frames that FFmpeg could not decode whole and patched up, and of those that may
            be predicted from such a picture: all behind it up to the next place where decoding may start.

    Returns:
        (N, rows, row samples), one frame for each of ``plan.frames``, samples right-aligned, chroma in planes of its own; and
        the layout of a frame.

    Raises:
        OpenError: when the file can no longer be read.
        DecodeError: when a wanted frame does not come out, or frames differ in size.
        Stopped: when ``stop()`` turned true.
    """
    import av

    collected = _Collected(index, plan, allocate)
    if index.info.pix_fmt == "pal8":
        _decode_with_palettes(index, plan, collected, stop)
        return collected.result(damaged)
    with PacketFeed(index, files) as feed:
        for run in plan.passes:
            context = _context(index)
            sets, are_others = index.sets_at(run.first)
            head = from_annexb(sets, index.length_size) if are_others else b""  # the first ones are in the context already
            for number, data in feed.packets(run):
                if stop():
                    raise Stopped
                if number != run.first and number in index.set_changes:
                    head = from_annexb(index.set_changes[number], index.length_size)
                if head:
                    data, head = head + bytes(data), b""
                packet = av.Packet(len(data))  # a packet of FFmpeg's own has the padding that decoders read into
                packet.update(data)  # type: ignore[arg-type]  # any bytes-like object will do
                packet.pts = packet.dts = number
                packet.is_keyframe = bool(index.key[number])  # PNG adds a frame without it to the one before
                collected.decode(context, packet)
            collected.decode(context, None)
    return collected.result(damaged)


def _decode_with_palettes(index: VideoIndex, plan: Plan, collected: _Collected, stop: Stop) -> None:
    """From the start, with the demuxer's own packets: palettes come beside their data, and stay until the next one."""
    container, stream = open_video(index.identity.path)
    with container:
        context: Any = stream.codec_context
        context.thread_count = 1
        for number, packet in enumerate(whole_packets(container, stream)):
            if stop():
                raise Stopped
            packet.pts = packet.dts = number
            collected.decode(context, packet)
            if number >= plan.passes[-1].last:
                break
        collected.decode(context, None)


def _context(index: VideoIndex) -> Any:
    import av

    extradata: bytes | None = index.extradata
    tag = None
    if not index.mapped or index.info.codec not in _SELF_CONTAINED:  # the demuxer may tell the codec more than its extradata
        container, stream = open_video(index.identity.path)
        with container:
            if index.info.codec not in _SELF_CONTAINED:
                context: Any = stream.codec_context
                context.thread_count = 1
                return context
            extradata, tag = stream.codec_context.extradata, stream.codec_context.codec_tag
    context = av.CodecContext.create(software_name(index.info.codec), "r")
    if extradata:
        context.extradata = bytes(extradata)
    if tag is not None:
        context.codec_tag = tag
    context.width, context.height = index.info.width, index.info.height
    context.pix_fmt = index.info.pix_fmt
    context.thread_count = 1
    # Without this, H.264 that does not state its reordering delay loses its first frames after each start.
    context.options = {"strict": "1"} if index.info.codec == "h264" else {}
    return context


class _Collected:
    """Copies wanted frames into one array as they come, so that the decoder's own buffers are free at once."""

    def __init__(self, index: VideoIndex, plan: Plan, allocate: Allocate) -> None:
        self._index = index
        self._plan = plan
        self._allocate = allocate
        self._format: PlaneFormat | None = None
        self._data: np.ndarray | None = None
        self._found = [False] * len(plan.frames)
        self._faulty: set[int] = set()
        """Packets of pictures that came out damaged, or did not come out."""

    def decode(self, context: Any, packet: Packet[Any] | None) -> None:
        """Takes the frames that a decoder puts out for a packet, or at the end for None."""
        for frame in decoded(context, packet, self._faulty):
            slot = self._plan.slots.get(frame.pts) if frame.pts is not None else None
            if slot is None or self._found[slot]:
                continue
            layout, planes = frame_planes(frame)
            info = self._index.info
            if (layout.width, layout.height) != (info.width, info.height):
                raise self._error(
                    slot, f"is {layout.width}x{layout.height}, but the video began with {info.width}x{info.height}"
                )
            if self._data is None or self._format is None:
                self._format = layout
                shape = (len(self._found), layout.rows, layout.row_samples)
                self._data = self._allocate(shape, np.dtype(np.uint8 if layout.sample_bytes == 1 else np.uint16))
            elif layout != self._format:
                raise self._error(slot, f"has samples of another format ({frame.format.name}) than others of the clip")
            row = 0
            for plane in planes:
                self._data[slot, row : row + plane.shape[0], : plane.shape[1]] = plane
                row += plane.shape[0]
            self._found[slot] = True

    def result(self, damaged: list[int] | None) -> tuple[np.ndarray, PlaneFormat]:
        if self._data is None or self._format is None or not all(self._found):
            raise self._error(self._found.index(False), "could not be decoded")
        if damaged is not None and self._faulty:
            damaged += [frame for frame in self._plan.frames if self._shows_damage(frame)]
        return self._data, self._format

    def _shows_damage(self, frame: int) -> bool:
        """Whether a frame came out damaged, or comes behind a picture that did, which it may be predicted from."""
        index = self._index
        packet, start = int(index.display[frame]), index.start_for(frame)
        leading = index.pts[packet] < index.pts[start]

        def spoils(faulty: int) -> bool:
            if not start <= faulty < packet or index.droppable[faulty] or faulty in index.unshown:
                return False
            return leading or bool(index.pts[faulty] >= index.pts[start])  # no others are predicted from leading pictures

        return packet in self._faulty or any(map(spoils, self._faulty))

    def _error(self, slot: int, what: str) -> DecodeError:
        frame = self._plan.frames[slot]
        path = self._index.info.path
        return DecodeError(
            f"{path}: frame {frame} {what}",
            fix="the stream is damaged or changes there: ask for other frames, or leave the file out",
            path=path,
            time_seconds=float(self._index.seconds[frame]),
        )


def frame_planes(frame: VideoFrame) -> tuple[PlaneFormat, list[np.ndarray]]:
    """Layout and planes (Y, U, V) of a decoded frame, views of its memory.

    Planar 4:2:0, 4:2:2 and 4:4:4 of 8 to 16 bits come as they are; other formats (RGB, grey, 4:1:1 …) as 4:4:4 of 8 or 16 bits.
    """
    name = frame.format.name
    subsampling = _SUBSAMPLING.get(name.removeprefix("yuvj").removeprefix("yuva").removeprefix("yuv")[:3])
    bits = frame.format.components[0].bits
    if subsampling is None or not name.startswith("yuv") or name.endswith("be"):
        # Colour for RGB is what the index says of it, whatever range the stream claims; other formats keep their own.
        color: dict[str, Any] = {"dst_color_range": "MPEG", "dst_colorspace": "ITU601"} if frame.format.is_rgb else {}
        frame = frame.reformat(format="yuv444p16le" if bits > 8 else "yuv444p", **color)
        subsampling, bits = (1, 1), 16 if bits > 8 else 8
    width, height = frame.width, frame.height
    chroma_width, chroma_height = -(-width // subsampling[0]), -(-height // subsampling[1])
    layout = PlaneFormat(width, height, chroma_width, chroma_height, bits)
    dtype = np.dtype(np.uint8 if layout.sample_bytes == 1 else np.uint16)
    sizes = ((height, width), (chroma_height, chroma_width), (chroma_height, chroma_width))
    planes = []
    for plane, (rows, columns) in zip(frame.planes[:3], sizes, strict=True):
        samples = np.frombuffer(memoryview(plane), dtype)  # type: ignore[call-overload]
        planes.append(samples.reshape(-1, plane.line_size // dtype.itemsize)[:rows, :columns])
    return layout, planes
