"""One video's packets: place, time, keyframes, frames; built once, cached on disk."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from gpupipe.data.bytes import Identity
from gpupipe.data.index.model import VideoIndex
from gpupipe.data.scan import store
from gpupipe.device import disk
from gpupipe.errors import OpenError
from gpupipe.telemetry import log

__all__ = ["VideoIndex", "at_hand", "cached", "in_memory", "known", "load", "take"]

Maker = Callable[[Identity], tuple[bytes, str]]
"""Scans a file and stores its record: returns the record, and why it could not be stored."""

_KEPT = 4096
_lock = threading.Lock()
_indices: OrderedDict[str, VideoIndex] = OrderedDict()
_told: set[str] = set()
"""Cache folders that cannot be written."""
_being_made: dict[str, threading.Lock] = {}


def _after_fork() -> None:
    """In a forked child no thread is left that would give back a lock which the fork found taken."""
    global _lock
    _lock = threading.Lock()
    _being_made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(path: str, maker: Maker = store.make) -> VideoIndex:
    """The index of a video: from memory, from the cache folder, or made now (and kept in both).

    Threads that ask for the same video at once wait for one of them to make it.

    Args:
        path: the video.
        maker: scans a file whose index is in neither.

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
            return _remembered(identity) or _read_or_make(identity, maker)
    finally:
        with _lock:
            _being_made.pop(identity.path, None)


def in_memory(path: str) -> bool:
    """True when the index of a video is at hand; False as well when the file is not there."""
    try:
        return _remembered(Identity.of(path)) is not None
    except OpenError:
        return False


def known(path: str) -> bool:
    """True when the index of a video is at hand or can be read from the cache folder, which it then is.

    Raises:
        OpenError: when the file is not there.
    """
    return at_hand(path) is not None


def at_hand(path: str) -> VideoIndex | None:
    """The index of a video from memory or from the cache folder; None when it would have to be made.

    Raises:
        OpenError: when the file is not there.
    """
    identity = Identity.of(path)
    index = _remembered(identity)
    if index is None:
        index = cached(identity)
        if index is not None:
            _remember(index)
    return index


def cached(identity: Identity) -> VideoIndex | None:
    """The index that the cache folder holds for this very file; None when it has none, an outdated one or a damaged one."""
    record = store.read(identity)
    if record is None:
        return None
    try:
        return VideoIndex.parse(record, identity)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the cached index of %s is damaged and is made again: %s", identity.path, error)
        return None


def _read_or_make(identity: Identity, maker: Maker) -> VideoIndex:
    index = cached(identity)
    if index is None:
        return take(identity, *maker(identity))
    _remember(index)
    return index


def take(identity: Identity, record: bytes, not_stored: str) -> VideoIndex:
    """The index of what a maker has returned for a file, kept in memory."""
    if not_stored:
        _tell_once(str(disk.cache_dir()), not_stored)
    index = VideoIndex.parse(record, identity)
    assert index is not None
    _remember(index)
    return index


def _tell_once(folder: str, why: str) -> None:
    if folder in _told:
        return
    _told.add(folder)
    log.warning("indices are not kept in %s, so each run reads all packets again: %s (see GPUPIPE_CACHE)", folder, why)


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
