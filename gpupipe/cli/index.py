"""``gpupipe index``: makes the indices of a whole set, so that no training run has to."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from pydantic import Field

from gpupipe.cli.console import Progress, emit_json, existing, say, say_facts, size_text
from gpupipe.config import StageConfig


class IndexConfig(StageConfig):
    """Which videos, and by how many processes."""

    videos: tuple[str, ...]
    processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """None: one for each core that this process may use."""


def index(config: IndexConfig) -> dict[str, Any]:
    """Loads or makes the index of every video.

    Returns:
        What was found: counts, hours, bytes, time, what cannot be used with its error, be it a file or one of ``videos``, and
        how many indices were made, were there already and could not be kept; JSON types only.
    """
    from contextlib import closing

    from gpupipe.config import SourceConfig
    from gpupipe.data.index.fill import survey
    from gpupipe.data.scan.store import file_of
    from gpupipe.data.source import collect
    from gpupipe.device.disk import cache_dir
    from gpupipe.device.inventory import cpu_quota
    from gpupipe.errors import GpupipeError
    from gpupipe.types import Entry

    entries: list[Entry] = []
    bad: dict[str, str] = {}
    for video in config.videos:
        try:
            entries += collect(existing([video]), SourceConfig())
        except GpupipeError as error:
            bad[video] = str(error)
    paths = list(dict.fromkeys(entry.path for entry in entries))
    made: set[str] = set()
    cut: dict[str, str] = {}
    videos = frames = packets = size_bytes = not_kept = 0
    seconds = 0.0
    began = time.perf_counter()
    outcomes = survey(entries, config.processes or cpu_quota(), made=made)
    with closing(outcomes), Progress(f"indexing {len(paths)} videos", len(paths)) as bar:
        for done, (path, outcome) in enumerate(outcomes, 1):
            if isinstance(outcome, GpupipeError):
                bad[path] = str(outcome)
            else:
                videos += 1
                not_kept += not file_of(outcome.identity).is_file()
                frames += outcome.info.frames
                packets += len(outcome.pts)
                size_bytes += outcome.identity.size_bytes
                seconds += outcome.info.duration_seconds
                if outcome.info.damage is not None:
                    cut[path] = outcome.info.damage
            bar.update(done, f"{done / max(time.perf_counter() - began, 1e-9):.0f} videos/s")
    return {
        "command": "index",
        "videos": videos,
        "made": len(made),
        "there_already": videos - len(made),
        "frames": frames,
        "packets": packets,
        "video_seconds": seconds,
        "size_bytes": size_bytes,
        "seconds": time.perf_counter() - began,
        "bad_files": bad,
        "cut_files": cut,
        "cache": str(cache_dir()),
        "not_kept": not_kept,
    }


def command(
    videos: Annotated[list[str], typer.Argument(help="Videos: files, folders, patterns, tables, shards or URLs.")],
    processes: Annotated[int | None, typer.Option(help="Processes side by side.", show_default="one for each core")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Make the indices of a whole set of videos.

    A loader makes them by itself when it first meets a video; this does it ahead, and names what cannot be used, or is not
    there; the exit status is 1 when there is any such, or when the indices cannot be kept.
    """
    report = index(IndexConfig(videos=tuple(videos), processes=processes))
    if as_json:
        emit_json(report)
        raise typer.Exit(1 if report["bad_files"] or report["not_kept"] else 0)
    say_facts([
        ("videos", f"{report['videos']}, {report['video_seconds'] / 3600:.2f} hours, {size_text(report['size_bytes'])}"),
        ("frames", report["frames"]),
        ("indices", f"{report['made']} made, {report['there_already']} there already"),
        ("time", f"{report['seconds']:.2f} s"),
        ("cache", report["cache"]),
        *([("not kept", f"{report['not_kept']} indices: set GPUPIPE_CACHE to a folder that can be written")]
          if report["not_kept"] else []),
    ])  # fmt: skip
    for title, files in (("cannot be used", report["bad_files"]), ("cut or damaged", report["cut_files"])):
        if files:
            say(f"\n{len(files)} {title}:")
            for path, why in files.items():
                say("\n  ".join(f"  {path}: {why}".splitlines()))
    if report["bad_files"] or report["not_kept"]:
        raise typer.Exit(1)
