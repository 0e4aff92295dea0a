"""Paths that may not leave a folder: what a list names is opened only if it lies inside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from gpupipe.errors import SourceError
from gpupipe.types import Entry

URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def check_inside(entries: Iterable[Entry], root: str, columns: Sequence[str] = ()) -> None:
    """Makes sure that every path lies inside of ``root`` once all links are followed, whether there is a file or not.

    Args:
        columns: those that hold paths too.

    Raises:
        SourceError: naming the row of a path that leads out of the folder; or when the folder is not there.
    """
    if not os.path.isdir(root):
        raise SourceError(f"source.root={root!r} is no folder", fix="name the folder that all videos lie in")
    real = os.path.realpath(root)
    within = real.rstrip(os.sep) + os.sep
    folders: dict[str, str] = {}
    for entry in entries:
        if entry.file:  # bytes that came with the list, in a file of this loader's own
            continue
        named = (entry.columns.get(column) for column in columns)
        for path in (entry.path, *(os.fspath(path) for path in named if isinstance(path, str | os.PathLike))):
            target = _target(path, folders)
            if target is None or not target.startswith(within):
                leads = f", which is {target}," if target not in (None, path) else ""
                raise SourceError(
                    f"{entry.named}: {path!r}{leads} does not lie inside source.root={root!r}",
                    fix="leave the row out, or name a folder that holds all files",
                    path=path,
                )


def _target(path: str, folders: dict[str, str]) -> str | None:
    """The path without links; None for what is no path of a file here. Folders are looked at once."""
    if URL.match(path) or "\0" in path:
        return None
    folder, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir) or os.path.islink(path):
        return os.path.realpath(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)
