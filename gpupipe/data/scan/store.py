"""Index files: one small file a video in the cache folder, holding its record; written whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.record import record
from gpupipe.data.scan.scan import scan
from gpupipe.data.stop import Stop, never
from gpupipe.device import disk
from gpupipe.errors import OpenError


def file_of(identity: Identity) -> Path:
    digest = hashlib.sha256(identity.path.encode("utf-8", "surrogateescape")).hexdigest()
    return disk.cache_dir() / disk.INDICES / digest[:2] / f"{digest[2:34]}.gpx"


def read(identity: Identity) -> bytes | None:
    """The record that the cache folder holds for a path, whatever version of the file it is of; None when there is none."""
    try:
        return file_of(identity).read_bytes()
    except OSError:
        return None


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
    return made, disk.write(file_of(identity), made)
