"""Index files: one small file a video in the cache folder, holding its record; written whole or not at all.

They lie in 256 folders, by a hash of the path, so that each holds about as much as any other. Now and then the one that is
written to is looked at, whether it is within its share of the bound: the files of a million videos are not counted at once.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.record import record
from gpupipe.data.scan.scan import scan
from gpupipe.data.stop import Stop, never
from gpupipe.device import disk
from gpupipe.errors import ConfigError, OpenError

BOUND = "GPUPIPE_INDEX_GIB"
"""Of the environment: how much all index files may take together."""
_BOUND_GIB = 16.0
_FOLDERS = 256
_A_LOOK = 64
"""Writes of a process for one look at the folder, about."""
_FULL_SECONDS = 3600.0
"""How long a process stores nothing after it found a folder full."""
_full_until = -_FULL_SECONDS


def file_of(identity: Identity) -> Path:
    digest = hashlib.sha256(identity.path.encode("utf-8", "surrogateescape")).hexdigest()
    return Path(f"{disk.cache_dir()}/{disk.INDICES}/{digest[:2]}/{digest[2:34]}.gpx")  # in one step: each costs microseconds


def read(identity: Identity) -> bytes | None:
    """The record that the cache folder holds for a path, whatever version of the file it is of; None when there is none."""
    return disk.read(file_of(identity))


def make(identity: Identity, stop: Stop = never, begun: Callable[[], object] = lambda: None) -> tuple[bytes, str]:
    """Scans a file, as :func:`gpupipe.data.scan.scan.scan` does, and stores its record.

    Returns:
        The record, and why it could not be stored: empty when it was.

    Raises:
        OpenError: when the file cannot be opened, has no video, none of its frames can be decoded, or it changed meanwhile.
        ConfigError: when the environment has no number for the bound on index files.
        Stopped: when ``stop()`` turned true.
    """
    made = record(scan(identity, stop, begun))
    if Identity.of(identity.path) != identity:
        message = f"{identity.path} changed while it was indexed"
        raise OpenError(message, fix="wait until it is written", path=identity.path)
    return made, _store(file_of(identity), made)


def _store(file: Path, made: bytes) -> str:
    """Why a record could not be stored; empty when it was."""
    global _full_until
    gib = bound_gib()
    if not random.randrange(_A_LOOK):
        share = int(gib * 2**30 / _FOLDERS) - len(made)
        if disk.tidied(file.parent, share) > share:
            _full_until = time.monotonic() + _FULL_SECONDS
    if gib == 0:
        return f"{BOUND} is 0"
    if time.monotonic() < _full_until:
        return f"they may take {gib:g} GiB, and do ({BOUND})"
    return disk.write(file, made)


def bound_gib() -> float:
    """GiB that index files may take together.

    Raises:
        ConfigError: when the environment says so in no number.
    """
    text = os.environ.get(BOUND) or str(_BOUND_GIB)
    try:
        bound = float(text)
        if not 0 <= bound < 2**20:
            raise ValueError("it is not within 0 and 2**20")
    except ValueError as error:
        raise ConfigError(
            f"{BOUND}={text!r} is no number of GiB ({error})", fix=f"write {_BOUND_GIB:g}, or leave it out"
        ) from error
    return bound
