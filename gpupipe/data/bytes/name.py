"""How videos are named: paths, URLs, members of shards, and bytes that the program holds itself."""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from gpupipe.types import Entry

HELD = "held://"
"""Begins the name of a video whose bytes the program holds: see :mod:`gpupipe.data.bytes.held`."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_MEMBER = re.compile(r"\.tar::", re.IGNORECASE)


def scheme(name: str) -> str:
    """What stands before ``://``, in lower case; empty for a path."""
    found = _URL.match(name)
    return found[1].lower() if found else ""


def plain(name: str) -> str:
    """The name with a ``file://`` URL as the path that it stands for; a member's name behind it is no part of the URL."""
    if scheme(name) != "file":
        return name
    url, mark, member = _in_parts(name)
    path = url[len("file://") :]
    if path.lower().startswith("localhost/"):
        path = path[len("localhost") :]
    return unquote(path, errors="surrogateescape") + mark + member  # bytes that are no UTF-8 as os.fsdecode() has them


def member_of(name: str) -> tuple[str, str] | None:
    """(shard, member) for ``SHARD.tar::MEMBER``; None for a file of its own."""
    shard, mark, member = _in_parts(name)
    return (shard, member) if mark else None


def _in_parts(name: str) -> tuple[str, str, str]:
    """(shard, ``::``, member); (name, "", "") for a file of its own."""
    found = _MEMBER.search(name)
    return (name[: found.end() - 2], "::", name[found.end() :]) if found else (name, "", "")


def is_local(name: str) -> bool:
    """True for a file of its own that the file system has."""
    return not scheme(name) and member_of(name) is None


def is_remote(name: str) -> bool:
    """True for what lies in a store far away, members of shards there included."""
    return scheme(plain(name)) not in ("", HELD.removesuffix("://"))


def join(folder: str, name: str) -> str:
    """A name that is relative to a folder, as it is from anywhere. URLs and paths from the root stay as they are."""
    name = plain(name)
    if scheme(name):
        return name
    return posixpath.join(folder, name) if scheme(folder) else os.path.join(folder, name)


def of_entry(entry: Entry, folder: str) -> str:
    """The name by which the video of a row is opened; relative paths start at ``folder``."""
    return entry.held.name if entry.held is not None else join(folder, entry.path)


def working_folder() -> str:
    """The working directory; empty where it is no more: a relative path is then told of by its name."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def absolute(path: str) -> str:
    """The path from the root. After a linked folder ``..`` leads elsewhere than the text says, so there the links go first."""
    folder, name = os.path.split(path)
    if os.pardir in folder.split(os.sep):
        path = os.path.join(os.path.realpath(folder), name)
    return os.path.abspath(path)
