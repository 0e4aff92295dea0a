"""Where the bytes are: identity, size and range reads of videos, wherever they lie.

A video is named by text: a path, a URL, a member of a shard (``SHARD.tar::MEMBER``), or bytes that the program holds. So what
names it can go to another process, into an index and into an error.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import BinaryIO

from gpupipe.data.bytes import name
from gpupipe.data.bytes.file import Identity, VideoFile
from gpupipe.data.bytes.local import LocalFile
from gpupipe.data.bytes.place import place_of
from gpupipe.data.bytes.stream import ByteStream
from gpupipe.errors import GpupipeError

__all__ = ["ByteStream", "Identity", "LocalFile", "VideoFile", "for_ffmpeg", "look_ahead", "open_file", "open_stream"]


def open_file(path: str) -> VideoFile:
    """Opens a video by its name.

    Raises:
        OpenError: when it is not there or may not be read.
        DeviceError: when a package that the store needs is not there, or the process may open no more files.
    """
    return place_of(path).open()


def open_stream(path: str) -> BinaryIO:
    """Opens a file by its name, wherever it lies, to be read from front to back.

    Raises:
        OSError: when a local file cannot be opened.
        OpenError, DeviceError: as :func:`open_file`, for any other.
    """
    path = name.plain(path)
    if name.is_local(path):
        return open(path, "rb")
    return io.BufferedReader(ByteStream(open_file(path)))


def look_ahead(path: str) -> bool:
    """Begins to ask for the identity of a video in a store far away. Returns whether it lies in one."""
    part = name.member_of(path)
    url = path if part is None else part[0]
    if not name.is_remote(url):
        return False
    from gpupipe.data.bytes import remote

    with suppress(GpupipeError):
        remote.look_ahead(url)
    return True


def for_ffmpeg(path: str) -> str | ByteStream:
    """What FFmpeg opens for a video: a name that it can read by itself where there is one, as that costs no interpreter lock.

    Raises:
        As :func:`open_file`.
    """
    path = name.plain(path)
    if name.is_local(path):
        return path
    part = name.member_of(path)
    if part is not None and name.is_local(part[0]):
        from gpupipe.data.bytes import shard

        begin, size = shard.place(path)
        return f"subfile,,start,{begin},end,{begin + size},,:{name.absolute(part[0])}"
    return ByteStream(open_file(path))
