"""Files kept open, so that the next visit need not open them again.

On a local disk opening a file costs a few microseconds. On a network file system it is a question to a server, and keeping the
file open saves that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from gpupipe.data.bytes import Identity, VideoFile, open_file
from gpupipe.data.bytes.name import HELD
from gpupipe.data.limit import most_open
from gpupipe.errors import DeviceError
from gpupipe.telemetry import Telemetry

_SHARE = 4
"""At most one in so many of the files that this process may open is kept open."""


@dataclass
class _Open:
    file: VideoFile
    users: int = 0
    kept: bool = True
    """False once it is to be closed by its last user."""


class OpenFiles:
    """Lends files that are open, and keeps the most recently lent ones open, by identity. For use by several threads.

    Args:
        limit: files kept open, those in use included; fewer where the process may open few. 0: each is opened for one use.
        telemetry: gets the time of reads (``read``) and their bytes (``bytes_read``).
    """

    def __init__(self, limit: int, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._limit = min(limit, most_open() // _SHARE)
        self._lock = threading.Lock()
        self._open: OrderedDict[Identity, _Open] = OrderedDict()

    def __len__(self) -> int:
        """Files that are kept open."""
        return len(self._open)

    def reading(self, size_bytes: int = 0) -> AbstractContextManager[None]:
        """For the block that opens a file, or reads so many bytes of it."""
        if self._telemetry is None:
            return nullcontext()
        self._telemetry.count("bytes_read", size_bytes)
        return self._telemetry.span("read")

    @contextmanager
    def lend(self, identity: Identity) -> Iterator[VideoFile]:
        """A file, open for the time of the block. It may have changed since ``identity`` was made: ask it.

        Raises:
            OpenError: when it cannot be opened.
            DeviceError: when the process may open no more files.
        """
        if self._limit <= 0 or identity.path.startswith(HELD):  # an open one would keep its bytes in memory
            with open_file(identity.path) as file:
                yield file
            return
        entry = self._take(identity)
        try:
            yield entry.file
        finally:
            self._give_back(entry)

    def _take(self, identity: Identity) -> _Open:
        entry = self._known(identity)
        if entry is not None:
            return entry
        try:
            file = open_file(identity.path)
        except DeviceError:  # too many open files: these are the first to go
            self.close()
            file = open_file(identity.path)
        with self._lock:
            entry = self._open.get(identity)
            if entry is not None:  # another thread was faster
                file.close()
            else:
                entry = self._open[identity] = _Open(file)
                while len(self._open) > self._limit:
                    self._drop(next(iter(self._open)))
            entry.users += 1
        return entry

    def _known(self, identity: Identity) -> _Open | None:
        with self._lock:
            entry = self._open.get(identity)
            if entry is None:
                return None
            if not entry.file.usable:
                self._drop(identity)
                return None
            self._open.move_to_end(identity)
            entry.users += 1
            return entry

    def _give_back(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            if not entry.kept and not entry.users:
                entry.file.close()

    def _drop(self, identity: Identity) -> None:
        entry = self._open.pop(identity)
        entry.kept = False
        if not entry.users:
            entry.file.close()

    def close(self) -> None:
        """Closes all files, those in use when their last user is done; may be used again."""
        with self._lock:
            for identity in list(self._open):
                self._drop(identity)


UNKEPT = OpenFiles(0)
"""Opens each file for one use."""
