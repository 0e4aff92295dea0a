"""What one demux of a file tells; with a software decode only where the packets do not tell the frames apart."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, cast

from gpupipe.data.bytes import Identity, VideoFile, open_file
from gpupipe.data.limit import memory_is_short, no_more_memory
from gpupipe.data.scan.bitstream.nal import nal_length_size, parameter_sets
from gpupipe.data.scan.bitstream.reference import Picture, opening, picture_of
from gpupipe.data.scan.bitstream.sequence import sequences, sequences_of_extradata
from gpupipe.data.scan.bitstream.sets import HEADERS, ParameterSets
from gpupipe.data.scan.bitstream.start import is_start_point
from gpupipe.data.scan.demux import decoded, open_video, whole_packets
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.errors import OpenError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

    from gpupipe.types import Rotation

_DATA_AFTER_POS = {"matroska,webm": 4, "flv": 16}
"""Bytes between a packet's ``pos`` and its data; 0 elsewhere. Every packet is compared before this is relied on."""
_MATRICES = {1: "bt709", 4: "bt601", 5: "bt601", 6: "bt601", 9: "bt2020", 10: "bt2020"}
"""FFmpeg's colour space numbers (ITU-T H.273 table 4); 2 and the rest: not stated or not known here."""
_TRANSFERS = {
    1: "bt709", 4: "gamma22", 5: "gamma28", 6: "smpte170m", 7: "smpte240m", 8: "linear", 11: "iec61966-2-4", 13: "iec61966-2-1",
    14: "bt2020-10", 15: "bt2020-12", 16: "smpte2084", 18: "arib-std-b67",
}  # fmt: skip
"""FFmpeg's names of the transfer characteristics of ITU-T H.273 table 3."""
_RANGES = {1: "limited", 2: "full"}
_PROGRESSIVE = (0, 1)
"""FFmpeg's field orders "unknown" and "progressive"."""
_CONFIGURED = ("h264", "hevc")
"""Codecs of which a new configuration is a set of parameter sets."""
_TELLING = (*_CONFIGURED, *HEADERS, "vp8", "vp9", "av1")
"""Codecs whose pictures say what they are, so that keyframe flags are not just believed."""
_PROBED = 120
"""Packets that are decoded to see whether their order is that of showing."""
_HEADER_BYTES = 512
"""A slice's header is shorter."""
_WINDOW_BYTES = 4 << 20
_scanning = threading.Semaphore(2)
"""Scans in one process at a time: a demux gives up the interpreter lock at each packet, so that many side by side spend their
time winning it back."""


_PATIENCE_SECONDS = 30.0


def _after_fork() -> None:
    """A permit that another thread held at the fork would never come back in the child."""
    global _scanning
    _scanning = threading.Semaphore(2)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass
class PacketRows:
    """One entry a packet, in file order."""

    position: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    pts: list[int | None] = field(default_factory=list)
    dts: list[int | None] = field(default_factory=list)
    key: list[bool] = field(default_factory=list)
    start: list[bool] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    """False for what an edit list cuts away, and for pictures that refer to what the stream has not got."""
    layer: list[int] = field(default_factory=list)
    """Temporal layer of the picture; 0 in codecs without layers."""
    unreferenced: list[bool] = field(default_factory=list)
    """No picture of the same layer refers to it."""


@dataclass
class Scan:
    """The packets and facts of one video stream. Fields that :class:`gpupipe.types.VideoInfo` has too mean the same."""

    identity: Identity
    stream: int
    extradata: bytes
    length_size: int
    packets: PacketRows
    display: list[int] | None
    """The packets that yield frames, in the order of showing, where times do not tell; None where they do."""
    in_force: list[tuple[int, bytes]]
    """(first packet, the parameter sets in force from there on, in Annex B form), ascending from packet 0."""
    container: str
    codec: str
    pix_fmt: str
    bit_depth: int
    width: int
    height: int
    time_base: Fraction
    average_rate: float
    rotation: Rotation
    color_matrix: str | None
    color_range: str | None
    transfer: str | None
    coded_size: tuple[int, int]
    chroma_location: str
    pixel_aspect: Fraction
    interlaced: bool
    uniform: bool
    promised: int
    """Frames that the container says it has; 0 where it does not say."""
    faults: list[str]


def scan(identity: Identity, stop: Stop = never, begun: Callable[[], object] = lambda: None) -> Scan:
    """Reads all packets of the best video stream, and decodes its first frame.

    Args:
        stop: asked at each packet.
        begun: called while the scan waits for its turn and when that has come: what went before is no fault of the file.

    Raises:
        OpenError: when the file cannot be opened, has no video, or its first frame cannot be decoded.
        DeviceMemoryError: when memory is short.
        Stopped: when ``stop()`` turned true.
    """
    import av

    path = identity.path
    with _turn(stop, begun):
        container, stream = open_video(path)
        with container:
            try:
                return _scan(identity, container, stream, stop)
            except (av.error.FFmpegError, MemoryError) as error:
                if not isinstance(error, av.error.FFmpegError) or memory_is_short():
                    raise no_more_memory(f"{path} cannot be indexed", error, path) from error
                message = f"{path} cannot be indexed: {error.strerror}"
                raise OpenError(message, fix="is the file whole?", path=path) from error


@contextmanager
def _turn(stop: Stop, begun: Callable[[], object]) -> Iterator[None]:
    """Waits for one of the permits; for so long only, since a thread that is stuck in a file keeps its own."""
    permits = _scanning
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (held := permits.acquire(timeout=0.1)) and time.monotonic() < deadline:
        begun()
        if stop():
            raise Stopped
    try:
        begun()
        yield
    finally:
        if held:
            permits.release()


def _scan(identity: Identity, container: InputContainer, stream: VideoStream, stop: Stop) -> Scan:
    context: Any = stream.codec_context
    context.thread_count = 1  # one frame is decoded here: starting a thread a core costs more
    context.options = {"ec": "0"}  # and nobody looks at it: what it lacks need not be made up
    codec = context.codec.canonical_name
    extradata = bytes(context.extradata or b"")
    length_size = nal_length_size(codec, extradata)
    offset = _DATA_AFTER_POS.get(container.format.name, 0)
    rows, faults = PacketRows(), list[str]()
    kinds = sequences_of_extradata(codec, extradata)
    sets = ParameterSets(codec, extradata)
    in_force = [(0, sets.in_force())]
    leading = _LeadingPictures()
    first: Any = None
    with open_file(identity.path) as file:
        window = _Window(file)
        for packet in whole_packets(container, stream, faults):
            if stop():
                raise Stopped
            data = bytes(packet)
            if next(packet.iter_sidedata(), None) is not None and packet.has_sidedata("new_extradata"):
                changed = bytes(packet.get_sidedata("new_extradata"))
                if nal_length_size(codec, changed) != length_size or codec not in _CONFIGURED:
                    faults.append("its codec is configured anew, of which only the part before is read")
                    break
                sets.see(parameter_sets(codec, changed), 0)
                kinds |= sequences_of_extradata(codec, changed)
                in_force.append((len(rows.size), sets.in_force()))
            at, key = packet.pos, packet.is_keyframe
            rows.position.append(at + offset if at is not None and at >= 0 and window.holds(at + offset, data) else -1)
            rows.size.append(len(data))
            rows.pts.append(packet.pts)
            rows.dts.append(packet.dts)
            rows.key.append(key)
            rows.start.append(key and is_start_point(codec, data, length_size))
            picture = picture_of(codec, data, length_size)
            lost = codec == "hevc" and leading.is_lost(picture)
            rows.shown.append(not (lost or packet.is_discard or picture.empty))
            if picture.has_sets or (key and codec in HEADERS):
                sets.see(data, length_size)
                if sets.in_force() != in_force[-1][1]:
                    in_force.append((len(rows.size) - 1, sets.in_force()))
            rows.layer.append(picture.layer)
            rows.unreferenced.append(picture.unreferenced)
            if key or codec == "vp9":  # VP9 may change its size at any frame
                kinds |= sequences(codec, data, length_size)
            if first is None and len(rows.size) == 1:
                first = _without_picture(context, codec, data, length_size) or _alone(context, packet)
            if first is None:
                first = next(iter(decoded(context, packet)), None)
    path = identity.path
    if not rows.size:
        raise OpenError(f"{path} holds no video packets", fix="leave it out of the list", path=path)
    if first is None:
        first = next(iter(decoded(context, None)), None)
    if first is None and not context.pix_fmt:
        raise OpenError(f"no frame of {path} can be decoded", fix="is the file whole?", path=path)
    interlaced = context.field_order not in _PROGRESSIVE or bool(first is not None and first.interlaced_frame)
    if all(rows.key) and codec not in _TELLING and not context.codec.intra_only:  # no container knows better than that
        rows.start = [True] + [False] * (len(rows.key) - 1)
    cut = leading.cut_short or not rows.start[0] or not _times_tell(rows, codec)
    told = not interlaced and not cut and not (context.has_b_frames and _out_of_order(path, rows, stop))
    source = first if first is not None else context
    matrix, sample_range = _colour(context, source.format)
    rotation = (-first.rotation if first is not None and not _mirrored(first) else 0) % 360
    return Scan(
        identity,
        stream.index,
        extradata,
        length_size,
        rows,
        None if told else _display_by_decoding(path, stop, len(rows.size)),
        in_force,
        container=container.format.name,
        codec=codec,
        pix_fmt=source.format.name,
        bit_depth=source.format.components[0].bits,
        width=source.width,
        height=source.height,
        time_base=Fraction(stream.time_base or Fraction(1, 90000)),  # MPEG's own clock where the container does not say
        average_rate=float(stream.average_rate or 25),
        rotation=cast("Rotation", rotation if rotation in (90, 180, 270) else 0),
        color_matrix=matrix,
        color_range=sample_range,
        transfer=_TRANSFERS.get(int(context.color_trc)),
        coded_size=(context.coded_height or source.height, context.coded_width or source.width),
        chroma_location="center" if codec in ("mjpeg", "mpeg1video") else "left",
        pixel_aspect=Fraction(stream.sample_aspect_ratio or context.sample_aspect_ratio or 1),
        interlaced=interlaced,
        uniform=len(kinds) <= 1,
        promised=stream.frames,
        faults=faults,
    )


def _times_tell(rows: PacketRows, codec: str) -> bool:
    """Whether presentation times are there, and give the order of showing.

    Not when they jump back, as where recordings are joined: then a start point is no later than what came before it. Nor when a
    picture is shown before the first one, which it may refer to without all of what else it needs; HEVC names such pictures.
    """
    pts = [time for time in rows.pts if time is not None]
    if not len(pts) == len(rows.pts) == len(set(pts)):
        return False
    latest = pts[0] - 1
    for shown_at, start in zip(pts, rows.start, strict=True):
        if start and shown_at <= latest:
            return False
        latest = max(latest, shown_at)
    return codec == "hevc" or min(pts) == pts[0]


def _out_of_order(path: str, rows: PacketRows, stop: Stop) -> bool:
    """Whether ascending times are no more than the order of the packets, as in containers that have no other times.

    Told by a decode of the first ones.
    """
    pts = [time for time in rows.pts if time is not None]
    if any(later < earlier for earlier, later in pairwise(pts)):
        return False
    shown = _display_by_decoding(path, stop, _PROBED)
    return any(later < earlier for earlier, later in pairwise(shown))


def _mirrored(frame: Any) -> bool:
    """Whether the display matrix mirrors the picture. It is not an angle then, and a turn by it would be wrong."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False
    a, b, _, c, d, *_ = struct.unpack("<9i", bytes(matrix)[:36])
    return bool(a * d - b * c < 0)


class _LeadingPictures:
    """Which leading pictures of HEVC are never put out.

    RASL pictures refer to pictures before their random access point. Where the stream begins there, or begins anew, these are
    lost, and the pictures are skipped (H.265 clause 8.1.3, NoRaslOutputFlag).
    """

    def __init__(self) -> None:
        self.cut_short = False
        """A CRA picture began the stream anew: pictures before it that had yet to be shown are lost (clause C.5.2.2)."""
        self._anew = True
        self._begun = False
        self._lost = False

    def is_lost(self, picture: Picture) -> bool:
        """Takes the pictures in decoding order."""
        kind = picture.kind
        if kind in range(16, 24):
            self._lost = self._anew or picture.ended or kind <= 18  # BLA: broken links by name
            self.cut_short = self.cut_short or (kind == 21 and self._lost and self._begun)
        if kind >= 0:
            self._anew, self._begun = False, True
        self._anew = self._anew or picture.ends
        return self._lost and kind in (8, 9)


def _without_picture(context: Any, codec: str, data: bytes, length_size: int) -> Any:
    """The frame of a packet of H.264 or HEVC as far as headers tell it, its pixels left out; or None.

    Decoding the pixels would take as long as all else that a scan does.
    """
    import av

    head = opening(codec, data, length_size, _HEADER_BYTES)
    return _alone(context, av.Packet(head)) if len(head) < len(data) else None


def _alone(context: Any, packet: Any) -> Any:
    """The frame of a packet without those after it, for which a decoder that reorders frames would wait; or None."""
    frames = decoded(context, packet) or decoded(context, None)
    context.flush_buffers()
    return frames[0] if frames else None


def _colour(context: Any, sample_format: Any) -> tuple[str | None, str | None]:
    """(matrix, range) as far as the stream states them."""
    if sample_format.is_rgb:  # the decoder turns RGB codecs into 4:4:4 of this matrix and range
        return "bt601", "limited"
    full = sample_format.name.startswith("yuvj")
    return _MATRICES.get(int(context.colorspace)), "full" if full else _RANGES.get(int(context.color_range))


class _Window:
    """A moving piece of a file to compare packets with: one read serves many of them."""

    def __init__(self, file: VideoFile) -> None:
        self._file = file
        self._start = 0
        self._bytes = b""

    def holds(self, position: int, data: bytes) -> bool:
        """True when the file has ``data`` at ``position``."""
        if not self._start <= position <= position + len(data) <= self._start + len(self._bytes):
            self._start = position
            self._bytes = self._file.read(position, max(len(data), _WINDOW_BYTES))
        return self._bytes.startswith(data, position - self._start)


def _display_by_decoding(path: str, stop: Stop, most: int) -> list[int]:
    """Which of the first ``most`` packets yield frames, in the order in which a sequential software decode puts them out."""
    container, stream = open_video(path)
    with container:
        context: Any = stream.codec_context
        context.thread_count = 1
        found: list[int] = []
        for number, packet in enumerate(islice(whole_packets(container, stream), most)):
            if stop():
                raise Stopped
            packet.pts = packet.dts = number
            found += [frame.pts for frame in decoded(context, packet) if frame.pts is not None]
        found += [frame.pts for frame in decoded(context, None) if frame.pts is not None]
    return list(dict.fromkeys(found))
