"""Videos in WebDataset shards: uncompressed tar files, with columns in the files beside each video."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpupipe.config import SourceConfig
from gpupipe.data.bytes import shard as shards
from gpupipe.data.source.arrays import ArrayFile
from gpupipe.data.source.inside import check_inside
from gpupipe.errors import OpenError, SourceError
from gpupipe.telemetry import log
from gpupipe.types import Entry

_AT_A_TIME = 8
"""Shards that are listed at a time: most of it is waiting, for a disk or a store."""
_ARRAYS = ".npy"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.lz4", ".tar.zstd")


def is_shard(path: str) -> bool:
    """Whether a name is that of a shard.

    Raises:
        SourceError: when it is that of a compressed one.
    """
    lower = path.lower()
    if lower.endswith(_COMPRESSED):
        raise SourceError(f"{path} is compressed, and a shard is read in place", fix="write an uncompressed .tar", path=path)
    return lower.endswith(".tar")


def in_shards(paths: Sequence[str], config: SourceConfig) -> list[list[Entry]]:
    """The videos of each shard, in the order in which they lie there.

    Raises:
        SourceError: when a shard cannot be read, has no videos, or a file beside a video cannot be understood; or lies outside
            of ``config.root``.
    """
    if config.root is not None:
        check_inside(map(Entry, paths), config.root)
    if len(paths) == 1:
        return [_in_shard(paths[0], config)]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(paths)) or 1, "gpupipe-shards") as pool:
        return list(pool.map(lambda path: _in_shard(path, config), paths))


def _in_shard(path: str, config: SourceConfig) -> list[Entry]:
    try:
        shard = shards.load(path)
    except OpenError as error:
        raise SourceError(error.message, fix=error.fix, path=error.path) from error
    endings = tuple(ending.lower() for ending in config.extensions)
    videos = [member for member in shard.members if member.lower().endswith(endings)]
    if shard.damage:
        what = f"{path} is cut or damaged, {shard.damage}"
        if not videos:
            raise SourceError(f"{what}; no video comes before that", fix="fetch it anew", path=path)
        log.warning("%s: the %d videos before that are used", what, len(videos))
    if not videos:
        raise SourceError(
            f"no videos in the shard {path} (looked for {', '.join(config.extensions)})",
            fix="check the shard, or set SourceConfig.extensions",
            path=path,
        )
    videos.sort(key=lambda member: shard.members[member])
    arrays = _arrays(path, shard)
    keys = map(shards.key_of, videos)
    columns = (dict(shard.columns.get(key, {})) | arrays.get(key, {}) for key in keys)
    return [Entry(f"{path}::{member}", row) for member, row in zip(videos, columns, strict=True)]


def _arrays(path: str, shard: shards.Shard) -> dict[str, dict[str, Any]]:
    """Columns of the .npy files beside videos, by key: ``17.npy`` is column ``npy``, ``17.pose.npy`` column ``pose``.

    Raises:
        SourceError: when another file of the key gives the same column.
    """
    found: dict[str, dict[str, Any]] = {}
    for member in shard.members:
        key = shards.key_of(member)
        ending = member[len(key) :]
        if not ending.lower().endswith(_ARRAYS):
            continue
        column = ending[1 : -len(_ARRAYS)] or _ARRAYS[1:]
        row = found.setdefault(key, {})
        if column in row or column in shard.columns.get(key, {}):
            raise SourceError(
                f"{path}::{member} gives {column!r}, which another file of the same key has given",
                fix="name it differently, or leave it out of the shard",
                path=f"{path}::{member}",
            )
        row[column] = ArrayFile(f"{path}::{member}")
    return found
