"""The cache folder, and files in it that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

INDICES, SHARDS, REMOTE, LAUNCHES = "index", "shards", "remote", "autotune"
"""Kinds of files, each in a folder of its own."""
KINDS = (INDICES, SHARDS, REMOTE, LAUNCHES)


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


def stored(kind: str) -> dict[Path, int]:
    """Files of one kind in the cache folder, with their bytes; parts that a killed process left included."""
    found = {}
    for file in (cache_dir() / kind).rglob("*"):
        with contextlib.suppress(OSError):  # gone since
            if file.is_file():
                found[file] = file.stat().st_size
    return found


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
