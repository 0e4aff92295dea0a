"""Files that the file system has.

Reads go through ``pread`` rather than a memory map: a file that is cut while it is read then gives a short read, hence an
error with a name, where a map would end the process with SIGBUS; and from the page cache both cost one copy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from gpupipe.data.bytes.file import Identity
from gpupipe.data.bytes.name import absolute
from gpupipe.data.limit import no_more_files, too_many
from gpupipe.device.doing import at
from gpupipe.errors import GpupipeError, OpenError

_ADVICE_BYTES = 128 << 10
"""Bytes of one piece of advice. Linux reads no more for it than the device's read-ahead window, which is seldom smaller."""


def identity(path: str) -> Identity:
    """Looks at a file now.

    Raises:
        OpenError: when it is missing, not a regular file, or may not be read.
    """
    try:
        facts = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise cannot_open(path, error) from error
    if not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for ever
        kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "not a regular file"
        raise OpenError(f"{path} is {kind}, not a video", fix="name a file, or give a folder to VideoLoader", path=path)
    return Identity(absolute(path), facts.st_size, facts.st_mtime_ns)


class LocalFile:
    """Range reads from one file, safe to use from several threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise cannot_open(path, error) from error

    def is_still(self, identity: Identity) -> bool:
        """True when the file that was opened is the version that ``identity`` tells of.

        Raises:
            OpenError: when it cannot be looked at any more.
        """
        try:
            facts = os.fstat(self._fd)
        except OSError as error:
            raise OpenError(f"{self.path} can no longer be read: {error.strerror}", path=self.path) from error
        return (facts.st_size, facts.st_mtime_ns) == (identity.size_bytes, identity.mtime_ns)

    @property
    def usable(self) -> bool:
        """False where the file system has let go of an open file, as a network's may."""
        try:
            os.fstat(self._fd)
        except OSError:
            return False
        return True

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Asks the kernel to read (position, bytes) in the background, where it can be asked. Does not wait for the reads."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # it is no more than a hint
            for position, size_bytes in ranges:
                for begin in range(position, position + size_bytes, _ADVICE_BYTES):
                    part = min(_ADVICE_BYTES, position + size_bytes - begin)
                    os.posix_fadvise(self._fd, begin, part, os.POSIX_FADV_WILLNEED)

    def read(self, position: int, size_bytes: int) -> bytes:
        """``size_bytes`` bytes from ``position``, fewer where the file ends."""
        parts = []
        while size_bytes > 0:
            part = self._pread(size_bytes, position)
            if not part:
                break
            parts.append(part)
            position += len(part)
            size_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, position: int, memory: memoryview) -> int:
        """Fills ``memory`` from ``position`` on; returns the bytes read, fewer where the file ends."""
        filled = 0
        while filled < len(memory):
            count = self._preadv(memory[filled:], position + filled)
            if not count:
                break
            filled += count
        return filled

    def _preadv(self, memory: memoryview, position: int) -> int:
        if not hasattr(os, "preadv"):
            data = self._pread(len(memory), position)
            memory[: len(data)] = data
            return len(data)
        try:
            with at("bytes", self.path):
                return os.preadv(self._fd, [memory], position)
        except OSError as error:
            raise self._failed(position, error) from error

    def _failed(self, position: int, error: OSError) -> OpenError:
        return OpenError(f"reading {self.path} at byte {position} failed: {error.strerror}", path=self.path)

    def _pread(self, size_bytes: int, position: int) -> bytes:
        try:
            with at("bytes", self.path):
                return os.pread(self._fd, size_bytes, position)
        except OSError as error:
            raise self._failed(position, error) from error

    def close(self) -> None:
        number, self._fd = self._fd, -1
        if number >= 0:
            with suppress(OSError):  # a network's complaint: nothing was written that could be lost
                os.close(number)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def cannot_open(path: str, error: OSError | ValueError) -> GpupipeError:
    """What to say of a file that cannot be opened."""
    if too_many(error):  # no fault of this file
        return no_more_files(f"cannot open {path}", path)
    reason = getattr(error, "strerror", None) or error
    return OpenError(f"cannot open {path}: {reason}", fix="check the path and its permissions", path=path)
