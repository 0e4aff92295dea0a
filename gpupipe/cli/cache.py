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
    """Counts the index files of the cache folder, and with ``clear`` removes them.

    Returns:
        The folder, how many index files it has or had and their bytes, how many were removed; JSON types only.

    Raises:
        GpupipeError: when a file cannot be removed.
    """
    from gpupipe.data.scan.store import cache_dir, clear, stored
    from gpupipe.errors import GpupipeError

    files = stored()
    removed = 0
    if config.action == "clear":
        try:
            removed = clear()
        except OSError as error:
            raise GpupipeError(
                f"{error.filename} cannot be removed: {error.strerror}", fix="is the folder somebody else's?"
            ) from error
    return {
        "command": "cache",
        "action": config.action,
        "cache": str(cache_dir()),
        "indices": len(files),
        "size_bytes": sum(files.values()),
        "removed": removed,
    }


def command(
    action: Annotated[Literal["ls", "clear"], typer.Argument(help="ls: show what is there; clear: remove it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Show or clear the indices that are kept on disk.

    They are made again when they are needed. The folder is GPUPIPE_CACHE, or lies in the user's cache folder.
    """
    report = cache(CacheCommandConfig(action=action))
    if as_json:
        emit_json(report)
        return
    say_facts([
        ("cache", report["cache"]),
        ("indices", f"{report['indices']}, {size_text(report['size_bytes'])}"),
        ("removed", report["removed"] if action == "clear" else None),
    ])  # fmt: skip
