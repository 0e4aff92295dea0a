"""One video's packets: place, time, keyframes, frames; built once, cached on disk."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from gpupipe.data.bytes import Identity
from gpupipe.data.index import build, cache
from gpupipe.data.index.model import VideoIndex
from gpupipe.data.scan.scan import Scan, scan
from gpupipe.errors import OpenError

__all__ = ["VideoIndex", "load"]

_KEPT = 4096
_lock = threading.Lock()
_indices: OrderedDict[str, VideoIndex] = OrderedDict()
_being_made: dict[str, threading.Lock] = {}


def _after_fork() -> None:
    """In a forked child no thread is left that would give back a lock which the fork found taken."""
    global _lock
    _lock = threading.Lock()
    _being_made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(path: str, scanner: Callable[[Identity], Scan] = scan) -> VideoIndex:
    """The index of a video: from memory, from the cache folder, or made now (and kept in both).

    Threads that ask for the same video at once wait for one of them to make it.

    Args:
        path: the video.
        scanner: reads a file whose index is in neither.

    Raises:
        OpenError: when the file cannot be opened as a video.
    """
    identity = Identity.of(path)
    index = _remembered(identity)
    if index is not None:
        return index
    with _lock:
        making = _being_made.setdefault(identity.path, threading.Lock())
    try:
        with making:
            return _remembered(identity) or _read_or_make(identity, scanner)
    finally:
        with _lock:
            _being_made.pop(identity.path, None)


def known(path: str) -> bool:
    """True when the index of a video is at hand or can be read from the cache folder, which it then is.

    Raises:
        OpenError: when the file is not there.
    """
    identity = Identity.of(path)
    if _remembered(identity) is None:
        index = cache.read(identity)
        if index is None:
            return False
        _remember(index)
    return True


def _read_or_make(identity: Identity, scanner: Callable[[Identity], Scan]) -> VideoIndex:
    index = cache.read(identity)
    if index is None:
        index = build.build(identity, scanner)
        if Identity.of(identity.path) != identity:
            message = f"{identity.path} changed while it was indexed"
            raise OpenError(message, fix="wait until it is written", path=identity.path)
        cache.write(index)
    _remember(index)
    return index


def _remember(index: VideoIndex) -> None:
    with _lock:
        _indices[index.identity.path] = index
        while len(_indices) > _KEPT:
            _indices.popitem(last=False)


def _remembered(identity: Identity) -> VideoIndex | None:
    with _lock:
        index = _indices.get(identity.path)
        if index is None or index.identity != identity:
            return None
        _indices.move_to_end(identity.path)
        return index
