"""Videos in stores far away, through fsspec: ``s3://``, ``gs://``, ``https://`` and whatever else it has a package for.

Reads are made of blocks. Those that are not at hand are fetched in ranges as large as they lie together, by coroutines on
fsspec's own event loop, so that many are under way at a time; a failure is tried again, with growing pauses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from gpupipe.data.bytes import name, settings
from gpupipe.data.bytes.blocks import BLOCK_BYTES, Blocks
from gpupipe.data.bytes.file import Identity
from gpupipe.data.limit import no_more_files, too_many
from gpupipe.data.stop import Stopped, stop_of_thread
from gpupipe.errors import DeviceError, GpupipeError, OpenError
from gpupipe.telemetry import log

T = TypeVar("T")
_Future = concurrent.futures.Future[dict[int, bytes]]
_Look = concurrent.futures.Future[dict[str, Any]]

_RANGE_BLOCKS = 16
"""Blocks of one request, at most."""
_TRUSTED_SECONDS = 30.0
"""How long a video is taken for unchanged after a look at it."""
_KNOWN = 1 << 16
"""Videos whose identity is kept in memory."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""Before the second attempt and, doubled each time, before later ones; each shortened at random by up to half."""
_ASK_SECONDS = 0.1
"""Between two looks whether the wait is to be given up."""
_TAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "checksum")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated", "created")
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}
_BUSY = (408, 425, 429)
"""Answers of a server that mean: later."""
_CHANGED = (412, 416)
"""… and those that mean: it is another version, or shorter."""


class _Shared:
    """What the threads of this process share; made anew in a forked child, whose locks and loop are nobody's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.systems: dict[str, Any] = {}
        self.known: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self.looks: dict[str, _Look] = {}
        self.flying: dict[tuple[Identity, int], _Future] = {}
        self.blocks = Blocks()
        self.permits: asyncio.Semaphore | None = None
        self.random = random.Random()  # the caller's own generator is left alone


_shared = _Shared()


def _after_fork() -> None:
    global _shared
    _shared = _Shared()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and what it calls the URL's file.

    Raises:
        DeviceError: when a package that it needs is not there.
        OpenError: when fsspec knows no such store.
    """
    protocol = name.scheme(url)
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(protocol)
        options = kind._get_kwargs_from_urls(url)
        key = f"{protocol} {json.dumps(options, sort_keys=True, default=str)}"
        with _shared.lock:
            found = _shared.systems.get(key)
            if found is None:  # listings that it keeps would hide what changes
                found = fsspec.filesystem(protocol, use_listings_cache=False, **options)
                _shared.systems[key] = found
        return found, found._strip_protocol(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        fix = f"pip install {package}" if package else str(error)
        raise DeviceError(f"{url} cannot be read: {error}", fix=fix, path=url) from error
    except ValueError as error:
        fix = "check the URL; fsspec's documentation lists the stores that it knows"
        raise OpenError(f"{url} cannot be read: {error}", fix=fix, path=url) from error


def listing(url: str, how: str, *arguments: Any) -> Any:
    """What a file system's ``info``, ``find`` or ``glob`` says of a URL; tried again where the store fails.

    Raises:
        OpenError: when it is not there, or the store goes on failing.
        DeviceError: as :func:`system`.
    """
    fs, path = system(url)
    asked = _patiently(lambda: _ask(fs, how, path, *arguments))
    return _result(url, asyncio.run_coroutine_threadsafe(asked, _loop(fs)))


def identity(url: str) -> Identity:
    """The identity of a remote video: as it is now, or as it was within the last seconds. Raises as :func:`listing`."""
    found = _known(url)
    return found if found is not None else _identity(url, _result(url, _look(url)))


def look_ahead(url: str) -> None:
    """Begins to ask for the identity of a video, unless it is known. A failure is left for a later look to meet."""
    if _known(url) is None:
        _look(url)


def _known(url: str) -> Identity | None:
    with _shared.lock:
        found = _shared.known.get(url)
    return found[0] if found is not None and time.monotonic() - found[1] < _TRUSTED_SECONDS else None


def _look(url: str) -> _Look:
    """The question for a video's identity that is under way, or a new one."""
    fs, path = system(url)
    with _shared.lock:
        future = _shared.looks.get(url)
        if future is not None:
            return future
        future = asyncio.run_coroutine_threadsafe(_patiently(lambda: _ask(fs, "info", path)), _loop(fs))
        _shared.looks[url] = future
    future.add_done_callback(partial(_looked, url))
    return future


def _looked(url: str, future: _Look) -> None:
    with _shared.lock:
        _shared.looks.pop(url, None)
    if not future.cancelled() and future.exception() is None:
        with suppress(OpenError):
            found = _identity(url, future.result())
            with _shared.lock:
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
        self._system, self._name = system(url)

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
        futures = self._under_way([number for number, data in found.items() if data is None])
        if not ahead:
            for number, future in futures.items():
                found[number] = _result(self.path, future)[number]
        return [(number, data) for number, data in found.items() if data is not None]

    def _under_way(self, numbers: list[int]) -> dict[int, _Future]:
        """What brings blocks: requests that are under way already, and new ones for those that lie together."""
        futures: dict[int, _Future] = {}
        with _shared.lock:
            new: list[int] = []
            for number in numbers:
                future = _shared.flying.get((self._identity, number))
                if future is not None:
                    futures[number] = future
                else:
                    new.append(number)
            while new:
                count = next((place for place in range(1, len(new)) if new[place] != new[0] + place), len(new))
                futures |= self._start(range(new[0], new[0] + count))
                del new[:count]
        for future in dict.fromkeys(futures.values()):  # outside the lock: one that is done calls back at once
            future.add_done_callback(partial(_landed, self._identity))
        return futures

    def _start(self, run: range) -> dict[int, _Future]:
        future = asyncio.run_coroutine_threadsafe(self._fetch(run), _loop(self._system))
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
            data: bytes = await _ask(self._system, "cat_file", self._name, start=begin, end=end, **options)
            if len(data) > end - begin:
                raise OpenError(
                    f"{self.path} is not served in ranges: {len(data)} bytes came for {end - begin}",
                    fix="download it, or serve it by a server that knows range requests",
                    path=self.path,
                )
            if len(data) < end - begin:
                raise OSError(f"{len(data)} bytes came for {end - begin}")
            return data

        data = await _patiently(ask)
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
    if not future.cancelled() and _status(future.exception()) in _CHANGED:
        with _shared.lock:
            _shared.known.pop(identity.path, None)


def _loop(fs: Any) -> asyncio.AbstractEventLoop:
    import fsspec.asyn

    loop: asyncio.AbstractEventLoop = fs.loop if fs.async_impl else fsspec.asyn.get_loop()
    return loop


async def _ask(fs: Any, how: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of a file system, in a thread where that cannot wait as a coroutine does."""
    if fs.async_impl:
        return await getattr(fs, f"_{how}")(*arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(None, partial(getattr(fs, how), *arguments, **options))


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """What ``ask`` gives, at one of several attempts."""
    chosen, pause = settings.current(), _PAUSE_SECONDS
    if _shared.permits is None:
        _shared.permits = asyncio.Semaphore(chosen.connections)
    for left in reversed(range(chosen.attempts)):
        try:
            async with _shared.permits:
                return await asyncio.wait_for(ask(), chosen.timeout_seconds)
        except Exception as error:
            if _is_final(error) or not left:
                raise
            log.debug("tried again in %.1f s: %r", pause, error)
        await asyncio.sleep(pause * _shared.random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    raise AssertionError("there is at least one attempt")


def _status(error: BaseException | None) -> int:
    """The number of a server's answer that an error stands for; 0 where there is none."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else 0


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end the same way."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # which fsspec makes of any failure over HTTP
        return isinstance(error.__cause__, Exception) and _is_final(error.__cause__)
    final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, GpupipeError, TypeError, ImportError)
    return isinstance(error, final) or (400 <= _status(error) < 500 and _status(error) not in _BUSY)


def _result(url: str, future: concurrent.futures.Future[T]) -> T:
    """Waits for a request, as long as its attempts take and nobody asks this thread to stop.

    Raises:
        OpenError: naming the URL.
        Stopped: when this thread's work is to be given up.
    """
    stop = stop_of_thread()
    while not concurrent.futures.wait([future], _ASK_SECONDS).done:
        if stop():
            raise Stopped
    try:
        return future.result()
    except GpupipeError:
        raise
    except Exception as error:
        raise _explained(url, error) from error


def _explained(url: str, error: BaseException) -> GpupipeError:
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    chosen = settings.current()
    if too_many(error):
        return no_more_files(f"{url} cannot be read", url)
    if isinstance(error, FileNotFoundError) or _status(error) in (404, 410):
        return OpenError(f"{url} does not exist", fix="check the URL", path=url)
    if _status(error) in _CHANGED:
        return OpenError(f"{url} was replaced or changed while it was read", fix="is it being written?", path=url)
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return OpenError(f"{url} may not be read: {error}", fix="check the credentials (see fsspec's configuration)", path=url)
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = f"no answer within {chosen.timeout_seconds:g} s"
    tried = "" if isinstance(error, Exception) and _is_final(error) else f", {chosen.attempts} times"
    return OpenError(
        f"{url} cannot be read: {reason}{tried}", fix="is the store there? See remote.attempts and timeout_seconds", path=url
    )
