"""Videos whose bytes the program has itself, or can get: those of a dataset, an upload, a test.

:func:`hold` gives them a name that stands wherever a path may stand. Helper processes get the bytes through memory that both
map, see :func:`shared`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Self

from gpupipe.data.bytes.file import Identity
from gpupipe.data.bytes.name import HELD
from gpupipe.errors import OpenError

Fetch = Callable[[], Any]
"""Gives the bytes of a video, as bytes or as a binary file to be read from its start."""
_MOST_BYTES = 256 << 20
"""Bytes of fetched videos that are kept until they are asked for again; one that is larger is kept alone."""


class Held:
    """A video by the name ``name``, for as long as this object lives: whoever keeps the name keeps this too."""

    def __init__(self, name: str, fetch: Fetch) -> None:
        self.name = name
        self.fetch = fetch


_lock = threading.RLock()  # garbage collection may end a Held in a thread that is in here
_held: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
_fetched: OrderedDict[str, tuple[Identity, bytes]] = OrderedDict()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def hold(video: bytes | bytearray | memoryview | IO[bytes] | Fetch, label: str = "") -> Held:
    """Gives a video a name.

    Args:
        video: its bytes, a binary file with them, or a function that gives either when they are needed. It is called by the
            pipeline's threads, again for each visit that finds the bytes no longer in memory; bytes that differ are another
            video.
        label: what errors and indices call it; the same in each run, so that the index is found again. By default a digest of
            the bytes.

    Raises:
        OpenError: when there is neither a label nor bytes that can be read now.
    """
    fetch: Fetch
    if callable(video):
        fetch = video
    else:
        data = _bytes_of(video, label or "the video")
        fetch = lambda: data  # noqa: E731
        label = label or hashlib.blake2b(data, digest_size=8).hexdigest()
    if not label:
        raise OpenError("a function that gives bytes needs a label", fix="name it, as in hold(fetch, 'clips/17')")
    with _lock:
        path, number = f"{HELD}{label}", 1
        while path in _held:
            number += 1
            path = f"{HELD}{label}~{number}"
        made = _held[path] = Held(path, fetch)
    weakref.finalize(made, _forget, path).atexit = False
    return made


def holds_bytes(video: object) -> bool:
    """Whether this is a video's bytes, or a file of them, rather than what names one."""
    return isinstance(video, bytes | bytearray | memoryview) or callable(getattr(video, "read", None))


def _forget(path: str) -> None:
    with _lock:
        _fetched.pop(path, None)


def _bytes_of(video: Any, path: str) -> bytes:
    try:
        if hasattr(video, "read"):
            if hasattr(video, "seek"):
                video.seek(0)
            video = video.read()
        if isinstance(video, bytes | bytearray | memoryview):
            return bytes(video)
    except Exception as error:  # a user's own file or function, which may fail in any way
        raise OpenError(f"{path} cannot be read: {type(error).__name__}: {error}", path=path) from error
    raise OpenError(f"{path} is {type(video).__name__}, not bytes", fix="give bytes or a binary file", path=path)


def _get(path: str) -> tuple[Identity, bytes]:
    with _lock:
        found = _fetched.get(path)
        if found is not None:
            _fetched.move_to_end(path)
            return found
        held = _held.get(path)
    if held is None:
        raise OpenError(f"{path} is held no more", fix="keep what hold() gave for as long as its name is used", path=path)
    try:
        video = held.fetch()
    except Exception as error:
        raise OpenError(f"{path} cannot be had: {type(error).__name__}: {error}", path=path) from error
    data = _bytes_of(video, path)
    found = Identity(path, len(data), 0, hashlib.blake2b(data, digest_size=16).hexdigest()), data
    with _lock:
        _fetched[path] = found
        while len(_fetched) > 1 and sum(len(kept) for _, kept in _fetched.values()) > _MOST_BYTES:
            _fetched.popitem(last=False)
    return found


def identity(path: str) -> Identity:
    """The identity of a held video, by its content.

    Raises:
        OpenError: when its bytes cannot be had.
    """
    return _get(path)[0]


def open_held(path: str) -> HeldFile:
    """Opens one. Raises as :func:`identity`."""
    return HeldFile(*_get(path))


@contextmanager
def shared(path: str) -> Iterator[str | None]:
    """A path under which a process that this one has started finds the bytes, for the time of the block; None for a video that
    it finds by its name. Raises as :func:`identity`."""
    if not path.startswith(HELD):
        yield None
        return
    data = _get(path)[1]
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("gpupipe-video")
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{handle}"
        return
    with tempfile.TemporaryDirectory(prefix="gpupipe-video-") as folder:
        place = os.path.join(folder, "video")
        with open(place, "wb") as file:
            file.write(data)
        yield place


@contextmanager
def lent(path: str, place: str | None) -> Iterator[None]:
    """In the other process: ``path`` names the bytes that lie at ``place``, for the time of the block."""
    if place is None:
        yield
        return

    def fetch() -> bytes:
        with open(place, "rb") as file:
            return file.read()

    with _lock:
        held = _held[path] = Held(path, fetch)
    try:
        yield
    finally:
        _forget(path)
        del held


class HeldFile:
    """Range reads from bytes in memory."""

    def __init__(self, identity: Identity, data: bytes) -> None:
        self.path = identity.path
        self._identity = identity
        self._data = memoryview(data)

    def is_still(self, identity: Identity) -> bool:
        return identity == self._identity

    @property
    def usable(self) -> bool:
        return True

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """They are there."""

    def read(self, position: int, size_bytes: int) -> bytes:
        return bytes(self._data[position : position + size_bytes])

    def read_into(self, position: int, memory: memoryview) -> int:
        part = self._data[position : position + len(memory)]
        memory[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """The bytes stay with who holds them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
