"""The cache folder, and files in it that are written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

INDICES, SHARDS, REMOTE, LAUNCHES = "index", "shards", "remote", "autotune"
"""Kinds of files, each in a folder of its own."""
KINDS = (INDICES, SHARDS, REMOTE, LAUNCHES)
_IDLE_SECONDS = 24 * 3600.0
_TOUCH_SECONDS = 3600.0
"""How old the mark of a file's last use may get."""


def cache_dir() -> Path:
    """``GPUPIPE_CACHE``, else a folder in the user's cache folder, or in the temporary folder where that is read-only."""
    chosen = os.environ.get("GPUPIPE_CACHE")
    if chosen:
        return _folder(os.path.expanduser(chosen) if chosen.startswith("~") else chosen)
    # Path.home() fails for a user without a home, Path.exists() for a home that is somebody else's: os.path does not.
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home) and os.access(home if os.path.exists(home) else os.path.dirname(home), os.W_OK):
        return Path(home) / "gpupipe"
    return Path(tempfile.gettempdir()) / f"gpupipe-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


@functools.lru_cache(maxsize=4)
def _folder(name: str) -> Path:
    return Path(name)


def stored(kind: str) -> dict[Path, int]:
    """Files of one kind in the cache folder, with their bytes; parts that a killed process left included."""
    return {file: facts.st_size for file, facts in _files(cache_dir() / kind)}


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, _, names in os.walk(folder):  # folders that are gone by then are left out
        for name in names:
            file = Path(parent, name)
            with contextlib.suppress(OSError):  # gone since
                facts = file.stat()
                if stat.S_ISREG(facts.st_mode):
                    yield file, facts


def read(file: Path) -> bytes | None:
    """The bytes of a file, which is marked as used; None where there is none."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # gone since, or not ours to mark
        if time.time() - file.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(file)
    return data


def tidied(folder: Path, bound: int) -> int:
    """Bytes in a folder, after files that nobody has used for a day were removed, as far as ``bound`` bytes ask for it.

    What has been used of late stays, over the bound too: an epoch visits each sample once, so that throwing out what was used
    least recently would throw out almost everything just before its next use (see :mod:`gpupipe.data.cache`).
    """
    found = sorted((facts.st_mtime, facts.st_size, file) for file, facts in _files(folder))
    total, idle = sum(size for _, size, _ in found), time.time() - _IDLE_SECONDS
    for used, size, file in found:
        if total <= bound or used > idle:
            break
        with contextlib.suppress(OSError):
            file.unlink()
            total -= size
    return total


def clear(kind: str) -> int:
    """Removes the files of one kind; how many there were.

    Raises:
        OSError: when one cannot be removed.
    """
    files = stored(kind)
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def write(target: Path, data: bytes) -> str:
    """Stores a file; a folder that cannot be written is no error. Returns what was wrong, or nothing.

    Two processes that write the same file write to files of their own and rename: the last one wins, and every reader sees a
    whole file.
    """
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


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``target`` when the block ends well; else ``target`` stays as it was.

    The new content is on the disk before it has the name, so that neither a kill nor a power cut leaves half a file. What a
    killed process left of it, ``<name>.part``, the next write takes over: one process writes a target at a time.

    Raises:
        OSError: when it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    with contextlib.suppress(OSError, AttributeError):  # not every system opens folders
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
