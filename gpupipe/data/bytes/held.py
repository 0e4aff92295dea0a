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
from gpupipe.data.stop import Stopped
from gpupipe.device.doing import at
from gpupipe.errors import DeviceError, GpupipeError, OpenError

Fetch = Callable[[], Any]
"""Gives the bytes of a video, as bytes or as a binary file to be read from its start."""
_Version = tuple[int, str]
_MOST_BYTES = 256 << 20
"""Bytes of fetched videos that are kept until they are asked for again; one that is larger is kept alone."""


class Held:
    """A video by the name ``name``, for as long as this object lives: whoever keeps the name keeps this too.

    Attributes:
        name: by which it is opened, in this process.
        label: what people call it; the same in each run.
        fetch: gives its bytes.
        version: (bytes, digest) that they are known to have; None: those that ``fetch`` gives.
        data: the bytes, where they are in memory anyway.
    """

    def __init__(self, name: str, label: str, fetch: Fetch, version: _Version | None = None, data: bytes | None = None) -> None:
        self.name = name
        self.label = label
        self.fetch = fetch
        self.version = version
        self.data = data

    def __reduce__(self) -> tuple[Callable[..., Held], tuple[Any, ...]]:
        """In another process it gets a name there; a function is pickled as any is."""
        return _register, (self.label, None if self.data is not None else self.fetch, self.version, self.data)


_lock = threading.RLock()  # garbage collection may end a Held in a thread that is in here
_held: dict[str, list[weakref.ref[Held]]] = {}
_fetched: OrderedDict[str, tuple[Identity, bytes]] = OrderedDict()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def hold(video: bytes | bytearray | memoryview | IO[bytes] | Fetch | Held, label: str = "", *, like: object = None) -> Held:
    """Gives a video a name.

    Args:
        video: its bytes, a binary file with them, or a function that gives either when they are needed. It is called by the
            pipeline's threads, again for each visit that finds the bytes no longer in memory; bytes that differ are another
            video. What this has returned before comes back as it is.
        label: what errors and indices call it; the same in each run, so that the index is found again. By default a digest of
            the bytes.
        like: what a function has given before. The video is then known without a call, and other bytes are an error.

    Raises:
        OpenError: when there is neither a label nor bytes that can be read now.
    """
    if isinstance(video, Held):
        return video
    if callable(video):
        if not label:
            raise OpenError("a function that gives bytes needs a label", fix="name it, as in hold(fetch, 'clips/17')")
        return _register(label, video, None if like is None else _version(_bytes_of(like, label)), None)
    data = _bytes_of(video, label or "the video")
    version = _version(data)
    return _register(label or f"{HELD}{version[1]}", None, version, data)


def _register(label: str, fetch: Fetch | None, version: _Version | None, data: bytes | None) -> Held:
    """One more of a name where it is known to be of the same bytes, so that a name depends on no loader that lives beside."""
    with _lock:
        path = first = f"{HELD}{label.removeprefix(HELD)}"
        number = 1
        while (other := _newest(path)) is not None and (version is None or other.version != version):
            number += 1
            path = f"{first}~{number}"
        if other is not None and other.data is not None and data is not None:
            return other
        made = Held(path, label, fetch or (lambda: data), version, data)
        _held.setdefault(path, []).append(weakref.ref(made))
    weakref.finalize(made, _forget, path).atexit = False
    return made


def _newest(path: str) -> Held | None:
    """The last of those that have a name."""
    with _lock:
        return next((held for one in reversed(_held.get(path, ())) if (held := one()) is not None), None)


def holds_bytes(video: object) -> bool:
    """Whether this is a video's bytes, a file of them, or what :func:`hold` has returned, rather than what names a video."""
    return isinstance(video, bytes | bytearray | memoryview | Held) or callable(getattr(video, "read", None))


def _forget(path: str) -> None:
    """After the end of one that had a name."""
    with _lock:
        left = [one for one in _held.pop(path, ()) if one() is not None]
        if left:
            _held[path] = left
        else:
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


def _version(data: bytes) -> _Version:
    return len(data), hashlib.blake2b(data, digest_size=16).hexdigest()


def _get(path: str) -> tuple[Identity, bytes]:
    with _lock:
        found = _fetched.get(path)
        if found is not None:
            _fetched.move_to_end(path)
            return found
    held = _living(path)
    if held.data is not None and held.version is not None:
        return _identity(path, held.version), held.data
    try:
        with at("bytes", path):
            video = held.fetch()
    except (Stopped, DeviceError):  # no fault of the video's
        raise
    except Exception as error:
        reason = error.message if isinstance(error, GpupipeError) else f"{type(error).__name__}: {error}"
        raise OpenError(f"{path} cannot be had: {reason}", path=path) from error
    data = _bytes_of(video, path)
    version = _version(data)
    if held.version not in (None, version):
        raise OpenError(f"{path} gives other bytes than before", fix="let it give the same each time", path=path)
    found = _identity(path, version), data
    with _lock:
        _fetched[path] = found
        while len(_fetched) > 1 and sum(len(kept) for _, kept in _fetched.values()) > _MOST_BYTES:
            _fetched.popitem(last=False)
    return found


def _living(path: str) -> Held:
    held = _newest(path)
    if held is None:
        raise OpenError(f"{path} is held no more", fix="keep what hold() gave for as long as its name is used", path=path)
    return held


def _identity(path: str, version: _Version) -> Identity:
    return Identity(path, version[0], 0, version[1])


def identity(path: str) -> Identity:
    """The identity of a held video, by its content: as it is known to be, or as it is now.

    Raises:
        OpenError: when its bytes cannot be had.
    """
    held = _living(path)
    return _get(path)[0] if held.version is None else _identity(path, held.version)


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

    held = Held(path, path, fetch)
    with _lock:
        _held[path] = [weakref.ref(held)]
    try:
        yield
    finally:
        del held
        _forget(path)


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
