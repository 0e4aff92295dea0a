"""Opening containers, reading their packets and calling FFmpeg's decoders, through PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from gpupipe.data.bytes import ByteStream, for_ffmpeg, open_file
from gpupipe.data.limit import memory_is_short, no_more_files, no_more_memory, too_many
from gpupipe.errors import OpenError

_WITHOUT_PICTURES = {"skip_frame": "all"}
"""Keeps FFmpeg from decoding pictures while it opens a file, which at 1080p takes ten times as long as the rest."""
_AT_A_GLANCE = {**_WITHOUT_PICTURES, "probesize": "5000"}
"""Keeps it from reading many packets too, for what the header has told."""

_BUFFER_BYTES = 256 << 10
"""Of one read through Python, where FFmpeg cannot open a video by its name."""

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream


def open_video(path: str) -> tuple[InputContainer, VideoStream]:
    """Opens a file and finds its best video stream.

    Raises:
        OpenError: when it cannot be opened or has no video.
        DeviceError: when the process may open no more files.
        DeviceMemoryError: when memory is short.
    """
    tells_all = _tells_all(path)
    container, stream = _opened(path, tells_all, _AT_A_GLANCE if tells_all else {})
    if tells_all and not _told(container, stream):
        container.close()
        container, stream = _opened(path, tells_all, _WITHOUT_PICTURES)
    if stream is None or stream.codec_context is None:
        container.close()
        raise OpenError(f"{path} has no video stream that can be decoded", fix="leave it out of the list", path=path)
    return container, stream


def _opened(path: str, tells_all: bool, options: dict[str, str]) -> tuple[InputContainer, VideoStream | None]:
    """A file and its best video stream, as far as these options let FFmpeg look. Raises as :func:`open_video`."""
    import av

    source = for_ffmpeg(path)
    try:
        container = av.open(source, "r", options=options, buffer_size=_BUFFER_BYTES)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        _raise_failure(source)
        if too_many(error):
            raise no_more_files(f"cannot open {path}", path) from error
        if memory_is_short():
            raise no_more_memory(f"cannot open {path}", error, path) from error
        reason = getattr(error, "strerror", None) or error
        fix = "is the file whole, and a video?"
        if tells_all:
            fix = "is the file whole? An MP4 that was cut, or is still being written, often lacks the index at its end"
        raise OpenError(f"{path} cannot be opened as a video: {reason}", fix=fix, path=path) from error
    return container, cast("VideoStream | None", container.streams.best("video"))


def _told(container: InputContainer, stream: VideoStream | None) -> bool:
    """Whether a glance was enough.

    Which of several streams is best depends on how many packets of each were seen. And where long sound comes first, none was:
    codecs whose configuration is not in the header, such as MPEG-2 of cameras, are no more than a name then.
    """
    if stream is None or stream.codec_context is None:
        return len(container.streams.video) == 0
    context = stream.codec_context
    return len(container.streams.video) == 1 and bool(context.extradata or context.pix_fmt)


def _source(container: InputContainer) -> object:
    """What the container is read from, where that is no name."""
    return getattr(getattr(container, "file", None), "file", None)


def _raise_failure(source: object) -> None:
    """FFmpeg takes a read that failed for the file's end, or for damage: says what it was."""
    if isinstance(source, ByteStream) and source.failure is not None:
        raise source.failure


def _tells_all(path: str) -> bool:
    """True for MP4 and its kin, whose header has all that a look at the pictures could add but the pixel format."""
    with open_file(path) as file:
        return file.read(4, 4) == b"ftyp"


def whole_packets(container: InputContainer, stream: VideoStream, faults: list[str] | None = None) -> Iterator[Packet[Any]]:
    """All whole packets, one at a time; where the file is cut, those before the cut.

    Args:
        faults: gets a line for each packet that is left out because it is damaged, and for what ended the file early.

    Raises:
        MemoryError: when memory is short, which is no fault of the file's.
    """
    import av

    faults = [] if faults is None else faults
    found = False
    while True:
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    faults.append("a damaged packet")
                elif packet.size:
                    found = True
                    yield packet
            _raise_failure(_source(container))
            return
        except IndexError:  # a packet of a stream that the header does not have, which PyAV cannot name: read on behind it
            continue
        except av.error.FFmpegError as error:
            _raise_failure(_source(container))
            if memory_is_short():
                raise MemoryError(str(error)) from error
            if not found:
                raise
            faults.append(str(error.strerror))
            return


def software_name(codec: str) -> str:
    """FFmpeg's name of the decoder that serves a codec on the CPU: its own ``av1`` only steers hardware."""
    return "libdav1d" if codec == "av1" else codec


def decoded(context: Any, packet: Packet[Any] | None, faulty: set[int] | None = None) -> list[Any]:
    """The frames that a software decoder puts out for a packet, or at the end for None; none for a packet that it refuses.

    Args:
        faulty: gets the times, in ticks, of packets that were refused and of frames that FFmpeg patched up.

    Raises:
        MemoryError: when memory is short, which is no fault of the packet's.
    """
    import av

    faulty = set() if faulty is None else faulty
    try:
        frames = list(context.decode(packet))
    except av.error.FFmpegError as error:
        if memory_is_short():
            raise MemoryError(str(error)) from error
        if packet is not None and packet.pts is not None:
            faulty.add(packet.pts)
        return []
    corrupt = [frame.pts for frame in frames if frame.is_corrupt and frame.pts is not None]
    if corrupt and memory_is_short():
        raise MemoryError("a decoder had not enough of it for a whole picture")
    faulty.update(corrupt)
    return frames
