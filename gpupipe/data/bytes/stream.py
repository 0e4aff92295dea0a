"""A video that is read from front to back, as libraries want files: FFmpeg's demuxers and Python's tarfile."""

from __future__ import annotations

import io
import os

from gpupipe.data.bytes.file import VideoFile

_FIRST_BYTES, _MOST_BYTES = 64 << 10, 8 << 20
"""Bytes of one read after a seek, and of one after many that followed each other."""


class ByteStream(io.RawIOBase):
    """Reads in pieces that double as long as each follows the one before: a store far away answers few large questions faster.

    For use by one thread.
    """

    def __init__(self, file: VideoFile, size_bytes: int | None = None) -> None:
        self.name = file.path
        self.failure: BaseException | None = None
        """What a read failed with. Who reads through FFmpeg must ask: it may take an error for the file's end."""
        self._file = file
        self._size = size_bytes
        self._at = 0
        self._begin = 0
        self._held = b""
        self._ahead = _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence)
        self._at = offset + (self._end() if base is None else base)
        return self._at

    def _end(self) -> int:
        if self._size is None:
            from gpupipe.data.bytes.file import Identity

            self._size = Identity.of(self.name).size_bytes
        return self._size

    def read(self, size: int = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, self._end() - self._at)
        try:
            data = self._read(size)
        except BaseException as error:
            self.failure = error
            raise
        self._at += len(data)
        return data

    def _read(self, size: int) -> bytes:
        skip = self._at - self._begin
        if skip >= 0 and skip + size <= len(self._held):
            return self._held[skip : skip + size]
        head = self._held[skip:] if 0 <= skip <= len(self._held) else b""
        follows = 0 <= skip <= len(self._held) and bool(self._held)
        self._ahead = min(2 * self._ahead, _MOST_BYTES) if follows else _FIRST_BYTES
        self._held = head + self._file.read(self._at + len(head), max(size - len(head), self._ahead))
        self._begin = self._at
        return self._held[:size]

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
