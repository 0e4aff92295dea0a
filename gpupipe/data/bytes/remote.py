"""Videos in stores far away, through fsspec: ``s3://``, ``gs://``, ``https://`` and whatever else it has a package for.

Reads are made of blocks. Those that are not at hand are fetched in ranges as large as they lie together, by coroutines on
fsspec's own event loop, so that many are under way at a time; a failure is tried again, with growing pauses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from gpupipe.data.bytes import name, store
from gpupipe.data.bytes.blocks import BLOCK_BYTES, Blocks
from gpupipe.data.bytes.file import Identity
from gpupipe.errors import OpenError

_Future = concurrent.futures.Future[dict[int, bytes]]
_Look = concurrent.futures.Future[dict[str, Any]]

_RANGE_BLOCKS = 16
"""Blocks of one request, at most."""
_TRUSTED_SECONDS = 30.0
"""How long a video is taken for unchanged after a look at it."""
_KNOWN = 1 << 16
"""Videos whose identity is kept in memory."""
_TAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "checksum")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated", "created")


class _Shared:
    """What the threads of this process share; made anew in a forked child, whose locks and loop are nobody's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self.looks: dict[str, _Look] = {}
        self.flying: dict[tuple[Identity, int], _Future] = {}
        self.blocks = Blocks()


_shared = _Shared()


def _after_fork() -> None:
    global _shared
    _shared = _Shared()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def identity(url: str) -> Identity:
    """The identity of a remote video: as it is now, or as it was within the last seconds.

    Raises:
        As :func:`gpupipe.data.bytes.store.listing`.
    """
    found = _look(url)
    return found if isinstance(found, Identity) else _identity(url, store.result(url, found))


def look_ahead(url: str) -> None:
    """Begins to ask for the identity of a video, unless it is known. A failure is left for a later look to meet."""
    _look(url)


def _look(url: str) -> Identity | _Look:
    """A video's identity where it is known, else the question for it: that which is under way, or a new one."""
    fs, path = store.system(url)
    with _shared.lock:
        found = _shared.known.get(url)
        if found is not None and time.monotonic() - found[1] < _TRUSTED_SECONDS:
            return found[0]
        future = _shared.looks.get(url)
        if future is not None:
            return future
        future = store.begin(fs, store.patiently(lambda: store.ask(fs, "info", path)))
        _shared.looks[url] = future
    future.add_done_callback(partial(_looked, url))
    return future


def _looked(url: str, future: _Look) -> None:
    found = None
    if not future.cancelled() and future.exception() is None:
        with suppress(OpenError):
            found = _identity(url, future.result())
    with _shared.lock:  # both at once, so that nobody finds neither
        _shared.looks.pop(url, None)
        if found is not None:
            _shared.known[url] = found, time.monotonic()
            _shared.known.move_to_end(url)
            while len(_shared.known) > _KNOWN:
                _shared.known.popitem(last=False)


def _identity(url: str, told: dict[str, Any]) -> Identity:
    if told.get("type") == "directory":
        raise OpenError(f"{url} is a folder, not a video", fix="name a file, or give a folder to VideoLoader", path=url)
    if told.get("size") is None:
        raise OpenError(f"{url} has no size that the server tells, so parts of it cannot be read", fix="download it", path=url)
    tag = next((str(told[key]) for key in (*_TAGS, *_TIMES) if told.get(key)), "")
    return Identity(url, int(told["size"]), 0, tag)


class RemoteFile:
    """Range reads from a remote video, safe to use from several threads. Nothing is open: there is nothing to close.

    Raises:
        As :func:`identity`.
    """

    def __init__(self, url: str) -> None:
        self.path = url
        self._identity = identity(url)
        self._system, self._name = store.system(url)

    def is_still(self, identity: Identity) -> bool:
        return self._identity == identity

    @property
    def usable(self) -> bool:
        return True

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begins to fetch what is not at hand. Nobody hears of a failure, which a read will meet again."""
        for position, size in ranges:
            for begin in range(position, position + size, _RANGE_BLOCKS * BLOCK_BYTES):
                self._get(begin, min(size - (begin - position), _RANGE_BLOCKS * BLOCK_BYTES), ahead=True)

    def read(self, position: int, size_bytes: int) -> bytes:
        size_bytes = max(0, min(size_bytes, self._identity.size_bytes - position))
        memory = bytearray(size_bytes)
        return bytes(memory[: self.read_into(position, memoryview(memory))])

    def read_into(self, position: int, memory: memoryview) -> int:
        size = max(0, min(len(memory), self._identity.size_bytes - position))
        for begin in range(position, position + size, _RANGE_BLOCKS * BLOCK_BYTES):
            part = min(position + size - begin, _RANGE_BLOCKS * BLOCK_BYTES)
            for number, data in self._get(begin, part):
                low, high = max(begin, number * BLOCK_BYTES), min(begin + part, number * BLOCK_BYTES + len(data))
                memory[low - position : high - position] = data[low - number * BLOCK_BYTES : high - number * BLOCK_BYTES]
        return size

    def _get(self, position: int, size: int, *, ahead: bool = False) -> list[tuple[int, bytes]]:
        """The blocks of a range. ``ahead``: none, but those that are not at hand begin to be fetched."""
        size = min(size, self._identity.size_bytes - position)
        wanted = range(position // BLOCK_BYTES, -(-(position + size) // BLOCK_BYTES)) if size > 0 else range(0)
        found = {number: _shared.blocks.get(self._identity, number) for number in wanted}
        futures = self._under_way(found)
        if not ahead:
            for number, future in futures.items():
                found[number] = store.result(self.path, future)[number]
        return [(number, data) for number, data in found.items() if data is not None]

    def _under_way(self, found: dict[int, bytes | None]) -> dict[int, _Future]:
        """What brings the blocks that are None: requests that are under way already, and new ones for those that lie together.
        Blocks that have come since they were looked for are filled in."""
        futures: dict[int, _Future] = {}
        with _shared.lock:
            new: list[int] = []
            for number in [number for number, data in found.items() if data is None]:
                future = _shared.flying.get((self._identity, number))
                if future is not None:
                    futures[number] = future
                    continue
                found[number] = _shared.blocks.recent(self._identity, number)
                if found[number] is None:
                    new.append(number)
            while new:
                count = next((place for place in range(1, len(new)) if new[place] != new[0] + place), len(new))
                futures |= self._start(range(new[0], new[0] + count))
                del new[:count]
        for future in dict.fromkeys(futures.values()):  # outside the lock: one that is done calls back at once
            future.add_done_callback(partial(_landed, self._identity))
        return futures

    def _start(self, run: range) -> dict[int, _Future]:
        future = store.begin(self._system, self._fetch(run))
        futures = dict.fromkeys(run, future)
        _shared.flying.update({(self._identity, number): future for number in run})
        return futures

    async def _fetch(self, run: range) -> dict[int, bytes]:
        begin, end = run.start * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, self._identity.size_bytes)
        options = {}
        if name.scheme(self.path) in ("http", "https"):
            options = {"headers": {"Accept-Encoding": "identity"}}
            if self._identity.tag.startswith('"'):  # the mark of one exact version
                options["headers"]["If-Match"] = self._identity.tag

        async def ask() -> bytes:
            data: bytes = await store.ask(self._system, "cat_file", self._name, start=begin, end=end, **options)
            if len(data) > end - begin:
                raise OpenError(
                    f"{self.path} is not served in ranges: {len(data)} bytes came for {end - begin}",
                    fix="download it, or serve it by a server that knows range requests",
                    path=self.path,
                )
            if len(data) < end - begin:
                raise OSError(f"{len(data)} bytes came for {end - begin}")
            return data

        data = await store.patiently(ask)
        blocks = {number: data[(number - run.start) * BLOCK_BYTES :][:BLOCK_BYTES] for number in run}
        await asyncio.get_running_loop().run_in_executor(None, self._store, blocks)
        return blocks

    def _store(self, blocks: dict[int, bytes]) -> None:
        for number, data in blocks.items():
            _shared.blocks.put(self._identity, number, data)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        pass


def _landed(identity: Identity, future: _Future) -> None:
    """A request has come to its end: it is no longer under way, and nobody need have waited for how it ended."""
    with _shared.lock:
        for key in [key for key, other in _shared.flying.items() if other is future]:
            del _shared.flying[key]
    if not future.cancelled() and store.is_another_version(future.exception()):
        with _shared.lock:
            _shared.known.pop(identity.path, None)
