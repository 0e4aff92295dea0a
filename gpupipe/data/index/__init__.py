"""One video's packets: place, time, keyframes, frames; built once, cached on disk."""

from __future__ import annotations

import threading
from collections import OrderedDict

from gpupipe.data.bytes import Identity
from gpupipe.data.index import build, cache
from gpupipe.data.index.model import VideoIndex

__all__ = ["VideoIndex", "load"]

_KEPT = 4096
_lock = threading.Lock()
_indices: OrderedDict[str, VideoIndex] = OrderedDict()


def load(path: str) -> VideoIndex:
    """The index of a video: from memory, from the cache folder, or made now (and kept in both).

    Raises:
        OpenError: when the file cannot be opened as a video.
    """
    identity = Identity.of(path)
    with _lock:
        index = _indices.get(identity.path)
        if index is not None and index.identity == identity:
            _indices.move_to_end(identity.path)
            return index
    index = cache.read(identity)
    if index is None:
        index = build.build(identity)
        cache.write(index)
    with _lock:
        _indices[identity.path] = index
        while len(_indices) > _KEPT:
            _indices.popitem(last=False)
    return index
