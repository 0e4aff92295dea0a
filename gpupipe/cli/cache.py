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
        The folder, how many indices and tuned launches it has or had, their bytes, how many were removed; JSON types only.

    Raises:
        GpupipeError: when a file cannot be removed.
    """
    from gpupipe.device import disk
    from gpupipe.errors import GpupipeError

    indices, launches = disk.stored(disk.INDICES), disk.stored(disk.LAUNCHES)
    removed = 0
    if config.action == "clear":
        try:
            removed = disk.clear(disk.INDICES) + disk.clear(disk.LAUNCHES)
        except OSError as error:
            raise GpupipeError(
                f"{error.filename} cannot be removed: {error.strerror}", fix="is the folder somebody else's?"
            ) from error
    return {
        "command": "cache",
        "action": config.action,
        "cache": str(disk.cache_dir()),
        "indices": len(indices),
        "launches": len(launches),
        "size_bytes": sum(indices.values()) + sum(launches.values()),
        "removed": removed,
    }


def command(
    action: Annotated[Literal["ls", "clear"], typer.Argument(help="ls: show what is there; clear: remove it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show or clear the indices and the tuned kernel launches that are kept on disk.

    They are made again when they are needed. The folder is GPUPIPE_CACHE, or lies in the user's cache folder.
    """
    report = cache(CacheCommandConfig(action=action))
    if as_json:
        emit_json(report)
        return
    say_facts([
        ("cache", report["cache"]),
        ("indices", f"{report['indices']}"),
        ("launches", f"{report['launches']} tuned"),
        ("size", size_text(report["size_bytes"])),
        ("removed", report["removed"] if action == "clear" else None),
    ])  # fmt: skip
