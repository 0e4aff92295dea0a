"""Videos in stores far away: single ones, folders and patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterable

from gpupipe.config import SourceConfig
from gpupipe.data.bytes import name, store
from gpupipe.data.source.inside import check_inside
from gpupipe.errors import OpenError, SourceError
from gpupipe.types import Entry


def videos_at(url: str, config: SourceConfig, *, must_exist: bool) -> list[str]:
    """The URLs that a URL stands for, sorted: itself, what lies in its folder, or what matches its pattern.

    A folder is known by its last ``/``, or, where ``must_exist``, by asking the store.

    Raises:
        SourceError: when there are none, the store cannot be asked, or they lie outside of ``config.root``.
        DeviceError: when a package that the store needs is not there.
    """
    if config.root is not None:  # before anybody is asked
        check_inside([Entry(f"{url.rstrip('/')}/")], config.root)
    try:
        if _has_magic(url):
            found = _urls(url, store.listing(url, "glob"))
            if not found:
                raise SourceError(f"no file matches {url!r}", fix="check the pattern; ** descends into folders")
            return found
        if url.endswith("/") or (must_exist and store.listing(url, "info").get("type") == "directory"):
            return _folder(url, config)
    except OpenError as error:
        raise SourceError(error.message, fix=error.fix, path=error.path) from error
    return [url]


def _has_magic(url: str) -> bool:
    """Over HTTP a question mark begins a query, and brackets are part of addresses."""
    return "*" in url if name.scheme(url) in ("http", "https") else glob.has_magic(url)


def _folder(url: str, config: SourceConfig) -> list[str]:
    depth = () if config.recursive else (1,)
    endings = (*(ending.lower() for ending in config.extensions), ".tar")
    found = [file for file in _urls(url, store.listing(url, "find", *depth)) if file.lower().endswith(endings)]
    if not found:
        raise SourceError(
            f"no videos in the folder {url} (looked for {', '.join(config.extensions)})",
            fix="check the folder, or set SourceConfig.extensions",
        )
    return found


def _urls(url: str, paths: Iterable[str]) -> list[str]:
    """What a file system calls its files, as URLs."""
    fs, _ = store.system(url)
    return sorted(path if name.scheme(path) else str(fs.unstrip_protocol(path)) for path in paths)
