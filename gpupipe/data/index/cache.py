"""Index files: one small file a video in the cache folder; written whole or not at all, checked when read.

Form: magic and version, length of a JSON header, the header, then the arrays one after the other. Two processes that write the
same index write to files of their own and rename: the last one wins, and every reader sees a whole file.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gpupipe.data.bytes import Identity
from gpupipe.data.index.model import VideoIndex
from gpupipe.telemetry import log
from gpupipe.types import VideoInfo

_MAGIC = b"gpupipe-index-1\n"
_CHECKSUM_BYTES = 4
_ARRAYS = ("position", "size", "pts", "key", "start", "droppable", "display")


def cache_dir() -> Path:
    """``GPUPIPE_CACHE``, else a folder in the user's cache folder, or in the temporary folder where that is read-only."""
    chosen = os.environ.get("GPUPIPE_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen))
    # Path.home() fails for a user without a home, Path.exists() for a home that is somebody else's: os.path does not.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home) and os.access(home if os.path.exists(home) else os.path.dirname(home), os.W_OK):
        return Path(home) / "gpupipe"
    return Path(tempfile.gettempdir()) / f"gpupipe-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def file_of(identity: Identity) -> Path:
    digest = hashlib.sha256(identity.path.encode("utf-8", "surrogateescape")).hexdigest()
    return cache_dir() / "index" / digest[:2] / f"{digest[2:34]}.gpx"


def read(identity: Identity) -> VideoIndex | None:
    """The index of this very file, None when there is none, it is of another version of the file, or it is damaged."""
    try:
        data = file_of(identity).read_bytes()
    except OSError:
        return None
    try:
        return parse(data, identity)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the cached index of %s is damaged and is made again: %s", identity.path, error)
        return None


def parse(data: bytes, identity: Identity) -> VideoIndex | None:
    """The index in an index file's bytes; None when it is of another version of the file.

    Raises:
        ValueError, KeyError, TypeError: when the bytes are damaged.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("wrong magic or version")
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    if zlib.crc32(body) != int.from_bytes(data[-_CHECKSUM_BYTES:], "little"):
        raise ValueError("wrong checksum")
    at = len(_MAGIC) + 4
    end = at + int.from_bytes(body[len(_MAGIC) : at], "little")
    header = json.loads(bytes(body[at:end]))
    if header["identity"] != asdict(identity):
        return None
    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        dtype, count = header["arrays"][name]
        stored = np.frombuffer(body, dtype, count, end)
        arrays[name] = stored.astype(np.int64) if stored.dtype.kind == "i" else stored
        end += stored.nbytes
    facts = header["info"]
    info = VideoInfo(**{**facts, "time_base": Fraction(facts["time_base"]), "pixel_aspect": Fraction(facts["pixel_aspect"])})
    extradata = base64.b64decode(header["extradata"])
    return VideoIndex(identity, info, header["stream"], extradata=extradata, length_size=header["length_size"], **arrays)


def serialise(index: VideoIndex) -> bytes:
    """The bytes of an index file."""
    arrays = [_narrow(getattr(index, name)) for name in _ARRAYS]
    facts = asdict(index.info)
    header = {
        "identity": asdict(index.identity),
        "info": {**facts, "time_base": str(facts["time_base"]), "pixel_aspect": str(facts["pixel_aspect"])},
        "stream": index.stream,
        "extradata": base64.b64encode(index.extradata).decode(),
        "length_size": index.length_size,
        "arrays": {name: (array.dtype.str, len(array)) for name, array in zip(_ARRAYS, arrays, strict=True)},
    }
    text = json.dumps(header).encode()
    body = b"".join([_MAGIC, len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")


def _narrow(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers as 32 bits where all of them fit."""
    fits = array.dtype == np.int64 and (not len(array) or np.abs(array).max() <= np.iinfo(np.int32).max)
    return array.astype(np.int32) if fits else array


@functools.cache
def _tell_once(folder: str, why: str) -> None:
    log.warning("indices are not kept in %s, so each run reads all packets again: %s (see GPUPIPE_CACHE)", folder, why)


def write(index: VideoIndex) -> None:
    """Stores the index; a cache that cannot be written is no error."""
    target = file_of(index.identity)
    part = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=target.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(serialise(index))
        os.replace(part, target)
    except OSError as error:
        _tell_once(str(cache_dir()), str(error))
        log.debug("the index of %s is not cached: %s", index.identity.path, error)
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
