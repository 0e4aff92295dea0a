"""Index files: one small file a video in the cache folder, holding its record; written whole or not at all.

Two processes that write the same one write to files of their own and rename: the last one wins, and every reader sees a whole
file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.record import record
from gpupipe.data.scan.scan import scan
from gpupipe.data.stop import Stop, never
from gpupipe.errors import OpenError


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


def read(identity: Identity) -> bytes | None:
    """The record that the cache folder holds for a path, whatever version of the file it is of; None when there is none."""
    try:
        return file_of(identity).read_bytes()
    except OSError:
        return None


def stored() -> dict[Path, int]:
    """The index files of the cache folder, with their bytes; parts that a killed process left included."""
    found = {}
    for pattern in ("*/*.gpx", "*/*.part"):
        for file in (cache_dir() / "index").glob(pattern):
            with contextlib.suppress(OSError):  # gone since
                found[file] = file.stat().st_size
    return found


def clear() -> int:
    """Removes the index files of the cache folder; how many there were.

    Raises:
        OSError: when one cannot be removed.
    """
    files = stored()
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def make(identity: Identity, stop: Stop = never, begun: Callable[[], object] = lambda: None) -> tuple[bytes, str]:
    """Scans a file, as :func:`gpupipe.data.scan.scan.scan` does, and stores its record.

    Returns:
        The record, and why it could not be stored: empty when it was.

    Raises:
        OpenError: when the file cannot be opened, has no video, none of its frames can be decoded, or it changed meanwhile.
        Stopped: when ``stop()`` turned true.
    """
    made = record(scan(identity, stop, begun))
    if Identity.of(identity.path) != identity:
        message = f"{identity.path} changed while it was indexed"
        raise OpenError(message, fix="wait until it is written", path=identity.path)
    return made, _write(file_of(identity), made)


def _write(target: Path, data: bytes) -> str:
    """Stores a file; a folder that cannot be written is no error. Returns what was wrong, or nothing."""
    part = target.with_name(f"{os.urandom(8).hex()}.part")  # known before it is there: an end may come at any moment
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            file.write(data)
        os.replace(part, target)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    return ""
