"""``gpupipe cache``: what lies in the cache folder on disk, and how to be rid of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from gpupipe.cli.console import emit_json, say_facts, size_text
from gpupipe.config import StageConfig


class CacheCommandConfig(StageConfig):
    """What to do with the cache folder."""

    action: Literal["ls", "clear"]


def cache(config: CacheCommandConfig) -> dict[str, Any]:
    """Counts the files of the cache folder, and with ``clear`` removes them.

    Returns:
        The folder, how many indices, lists of shards, blocks of remote videos and tuned launches it has or had, their bytes,
        and how many were removed; JSON types only.

    Raises:
        GpupipeError: when a file cannot be removed.
    """
    from gpupipe.device import disk
    from gpupipe.errors import GpupipeError

    found = {kind: disk.stored(kind) for kind in disk.KINDS}
    removed = 0
    if config.action == "clear":
        try:
            removed = sum(disk.clear(kind) for kind in disk.KINDS)
        except OSError as error:
            raise GpupipeError(
                f"{error.filename} cannot be removed: {error.strerror}", fix="is the folder somebody else's?"
            ) from error
    return {
        "command": "cache",
        "action": config.action,
        "cache": str(disk.cache_dir()),
        "indices": len(found[disk.INDICES]),
        "shards": len(found[disk.SHARDS]),
        "blocks": len(found[disk.REMOTE]),
        "block_bytes": sum(found[disk.REMOTE].values()),
        "launches": len(found[disk.LAUNCHES]),
        "size_bytes": sum(sum(files.values()) for files in found.values()),
        "removed": removed,
    }


def command(
    action: Annotated[Literal["ls", "clear"], typer.Argument(help="ls: show what is there; clear: remove it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show or clear what is kept on disk: indices, lists of shards, blocks of remote videos and tuned kernel launches.

    They are made again when they are needed. The folder is GPUPIPE_CACHE, or lies in the user's cache folder.
    """
    report = cache(CacheCommandConfig(action=action))
    if as_json:
        emit_json(report)
        return
    say_facts([
        ("cache", report["cache"]),
        ("indices", f"{report['indices']}"),
        ("shards", f"{report['shards']} listed"),
        ("remote", f"{report['blocks']} blocks, {size_text(report['block_bytes'])}"),
        ("launches", f"{report['launches']} tuned"),
        ("size", size_text(report["size_bytes"])),
        ("removed", report["removed"] if action == "clear" else None),
    ])  # fmt: skip
