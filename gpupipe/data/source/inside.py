"""Paths that may not leave a folder: what a list names is opened only if it lies inside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from gpupipe.data.bytes import name
from gpupipe.errors import SourceError
from gpupipe.types import Entry


def check_inside(entries: Iterable[Entry], root: str, columns: Sequence[str] = ()) -> None:
    """Makes sure that every path lies inside of ``root`` once all links are followed, whether there is a file or not.

    A member of a shard lies where the shard does. Where ``root`` is a URL, so is every path, and it begins with that; what a
    store follows by itself, a link or a redirection, is not known here. Bytes that the program holds lie nowhere.

    Args:
        columns: those that hold paths too.

    Raises:
        SourceError: naming the row of a path that leads out of the folder; or when the folder is not there.
    """
    root = name.plain(root)
    is_inside = _Remote(root) if name.scheme(root) else _Folder(root)
    for entry in entries:
        named = [entry.columns.get(column) for column in columns]
        paths = [os.fspath(path) for path in named if isinstance(path, str | os.PathLike)]
        for path in paths if entry.held is not None else [entry.path, *paths]:
            target = is_inside.target(path)
            if target is None or not target.startswith(is_inside.within):
                leads = f", which is {target}," if target not in (None, path) else ""
                raise SourceError(
                    f"{entry.named}: {path!r}{leads} does not lie inside source.root={root!r}",
                    fix="leave the row out, or name a folder that holds all files",
                    path=path,
                )


class _Folder:
    """Paths inside a folder here."""

    def __init__(self, root: str) -> None:
        if not os.path.isdir(root):
            raise SourceError(f"source.root={root!r} is no folder", fix="name the folder that all videos lie in")
        self.within = os.path.realpath(root).rstrip(os.sep) + os.sep
        self._folders: dict[str, str] = {}
        self._shard: tuple[str, str | None] = ("", None)
        """The last one, and where it lies."""

    def target(self, path: str) -> str | None:
        """The path without links; None for what is no path of a file here. Folders are looked at once."""
        part = name.member_of(path)
        if part is None:
            return self._target(path)
        if part[0] != self._shard[0]:
            self._shard = part[0], self._target(part[0])
        return self._shard[1]

    def _target(self, path: str) -> str | None:
        if name.scheme(path) or not _can_be(path):
            return None
        folder, last = os.path.split(path)
        if last in ("", os.curdir, os.pardir) or os.path.islink(path):
            return os.path.realpath(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], last)


def _can_be(path: str) -> bool:
    """Whether a file system can have a file of this name at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON can write it
        return False


class _Remote:
    """URLs that begin as one does."""

    def __init__(self, root: str) -> None:
        self.within = root.rstrip("/") + "/"

    def target(self, path: str) -> str | None:
        """The URL; None for one with ``..`` or control characters in it, which stores read in ways of their own."""
        part = name.member_of(path)
        url = path if part is None else part[0]
        steps = re.split(r"[/\\]", unquote(url))
        odd = any(step in (os.curdir, os.pardir) for step in steps) or any(sign < " " for sign in url)
        return None if odd else url
