"""Asking stores through fsspec: its file systems, attempts with growing pauses, and what is said when all have failed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from gpupipe.data.bytes import name, settings
from gpupipe.data.limit import no_more_files, too_many
from gpupipe.data.stop import Stopped, stop_of_thread
from gpupipe.device.doing import at
from gpupipe.errors import DeviceError, GpupipeError, OpenError
from gpupipe.telemetry import log

T = TypeVar("T")

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
"""Before the second attempt and, doubled each time, before later ones; each shortened at random by up to half."""
_ASK_SECONDS = 0.1
"""Between two looks whether the wait is to be given up."""
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
    return result(url, begin(fs, patiently(lambda: ask(fs, how, path, *arguments))))


def begin(fs: Any, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Starts a coroutine beside the caller, on the event loop of a file system."""
    import fsspec.asyn

    return asyncio.run_coroutine_threadsafe(work, fs.loop if fs.async_impl else fsspec.asyn.get_loop())


async def ask(fs: Any, how: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of a file system, in a thread where that cannot wait as a coroutine does."""
    if fs.async_impl:
        return await getattr(fs, f"_{how}")(*arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(None, partial(getattr(fs, how), *arguments, **options))


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
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


def is_another_version(error: BaseException | None) -> bool:
    """Whether a request failed since the video is no longer the one that was asked for."""
    return _status(error) in _CHANGED


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end the same way."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # which fsspec makes of any failure over HTTP
        return isinstance(error.__cause__, Exception) and _is_final(error.__cause__)
    final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, GpupipeError, TypeError, ImportError)
    return isinstance(error, final) or (400 <= _status(error) < 500 and _status(error) not in _BUSY)


def result(url: str, future: concurrent.futures.Future[T]) -> T:
    """Waits for a request, as long as its attempts take and nobody asks this thread to stop.

    Raises:
        OpenError: naming the URL.
        Stopped: when this thread's work is to be given up.
    """
    stop = stop_of_thread()
    with at("bytes", url):
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
