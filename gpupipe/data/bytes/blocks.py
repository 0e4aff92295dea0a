"""Blocks of remote videos that are at hand: the last ones in memory, more of them on disk within a bound.

What came first stays on disk; only what nobody has used for a day makes room (see :func:`gpupipe.device.disk.tidied`).
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path

from gpupipe.data.bytes import settings
from gpupipe.data.bytes.file import Identity
from gpupipe.device import disk
from gpupipe.telemetry import log

BLOCK_BYTES = 512 << 10
"""Bytes of a block, but for the last one of a video."""
_MEMORY_BYTES = 256 << 20
_CHECKSUM_BYTES = 4
_SHARE = 32
"""The folder is counted anew whenever this process has written so small a part of the bound: others write there too."""
_FULL_SECONDS = 60.0
"""How long a full folder is left alone before it is looked at again."""


class Blocks:
    """Blocks by (identity of the video, number); safe to use from several threads, and beside other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._memory: OrderedDict[tuple[Identity, int], bytes] = OrderedDict()
        self._memory_bytes = 0
        self._counted: Path | None = None
        self._there = 0
        """Bytes in the folder when they were counted, and those written since."""
        self._written = 0
        self._full_until = 0.0
        self._told = False

    def get(self, identity: Identity, number: int) -> bytes | None:
        """The block, or None."""
        data = self.recent(identity, number)
        if data is None:
            data = self._read(self._file(identity, number))
            if data is not None:
                self._remember((identity, number), data)
        return data

    def recent(self, identity: Identity, number: int) -> bytes | None:
        """The block where it is in memory, or None."""
        key = (identity, number)
        with self._lock:
            data = self._memory.get(key)
            if data is not None:
                self._memory.move_to_end(key)
        return data

    def put(self, identity: Identity, number: int, data: bytes) -> None:
        """Keeps a block, on disk where there is room for it. A disk that is full or cannot be written is told once."""
        self._remember((identity, number), data)
        if not self._has_room(len(data)):
            return
        failed = disk.write(self._file(identity, number), data + zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little"))
        if failed:
            with self._lock:
                self._full_until = time.monotonic() + _FULL_SECONDS
                told, self._told = self._told, True
            if not told:
                log.warning(
                    "remote videos are not kept in %s, so each epoch reads them again: %s (see GPUPIPE_CACHE)",
                    disk.cache_dir(),
                    failed,
                )

    def _remember(self, key: tuple[Identity, int], data: bytes) -> None:
        with self._lock:
            self._memory_bytes += len(data) - len(self._memory.pop(key, b""))
            self._memory[key] = data
            while self._memory_bytes > _MEMORY_BYTES and len(self._memory) > 1:
                self._memory_bytes -= len(self._memory.popitem(last=False)[1])

    def _file(self, identity: Identity, number: int) -> Path:
        digest = hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()
        return disk.cache_dir() / disk.REMOTE / digest[:2] / digest[2:34] / f"{number}.blk"

    def _read(self, file: Path) -> bytes | None:
        stored = disk.read(file)
        if stored is None:
            return None
        data = stored[:-_CHECKSUM_BYTES]
        if zlib.crc32(data) != int.from_bytes(stored[-_CHECKSUM_BYTES:], "little"):
            log.warning("%s is damaged and is fetched again", file)
            return None
        return data

    def _has_room(self, size_bytes: int) -> bool:
        """Whether a block may be written; it then counts as written. While one thread counts the folder, nobody writes."""
        bound, folder, now = int(settings.current().cache_gib * 2**30), disk.cache_dir(), time.monotonic()
        if not bound or (folder == self._counted and now < self._full_until):
            return False
        if folder != self._counted or self._written > bound // _SHARE or self._there + size_bytes > bound:
            if not self._counting.acquire(blocking=False):
                return False
            try:
                there = disk.tidied(folder / disk.REMOTE, bound - size_bytes)
            finally:
                self._counting.release()
            with self._lock:
                self._counted, self._there, self._written = folder, there, 0
        with self._lock:
            if self._there + size_bytes > bound:
                self._full_until = now + _FULL_SECONDS
                return False
            self._there += size_bytes
            self._written += size_bytes
        return True
