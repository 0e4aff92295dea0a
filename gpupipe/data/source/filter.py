"""Videos left out by what their indices tell: length, size, rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

from gpupipe.config import FilterConfig
from gpupipe.data.index.fill import survey
from gpupipe.errors import GpupipeError, SourceError
from gpupipe.telemetry import log
from gpupipe.types import Entry, VideoInfo


def left_out(entries: list[Entry], config: FilterConfig, processes: int, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """The paths of the videos that do not pass, in source order, with the reason. Indices that are missing are made.

    A file that cannot be indexed passes: it is a bad file, met when its turn comes.

    Args:
        processes: how many make indices side by side.
        share: (rank, ranks) of those that do this at the same time.

    Raises:
        SourceError: when no video passes.
    """
    rules = config.model_dump(exclude_none=True)
    if not rules:
        return {}
    paths = list(dict.fromkeys(entry.path for entry in entries))
    found: dict[str, tuple[str, str]] = {}
    with closing(survey(entries, processes, share)) as outcomes:
        for path, outcome in outcomes:
            fault = None if isinstance(outcome, GpupipeError) else next(_faults(outcome.info, config), None)
            if fault is not None:
                found[path] = fault
    reasons = {path: found[path][1] for path in paths if path in found}
    if len(reasons) == len(paths):
        path, why = next(iter(reasons.items()))
        raise SourceError(
            f"source.filter leaves none of {len(paths)} videos; the first, {path}, {why}", fix="loosen it, or check its units"
        )
    if reasons:
        by = ", ".join(f"{count} by {rule}" for rule, count in Counter(rule for rule, _ in found.values()).most_common())
        log.warning("source.filter leaves out %d of %d videos: %s (see VideoLoader.left_out)", len(reasons), len(paths), by)
    return reasons


def _faults(info: VideoInfo, config: FilterConfig) -> Iterator[tuple[str, str]]:
    """(rule, reason) of each rule that a video does not pass."""
    facts = {
        "frames": (info.frames, f"has {info.frames} frames"),
        "seconds": (info.duration_seconds, f"lasts {info.duration_seconds:.3f} s"),
        "size": (min(info.display_size), f"has a shorter side of {min(info.display_size)} pixels"),
    }
    for fact, (value, words) in facts.items():
        least, most = getattr(config, f"min_{fact}"), getattr(config, f"max_{fact}")
        if least is not None and value < least:
            yield f"min_{fact}", f"{words}, less than min_{fact}={least:g}"
        if most is not None and value > most:
            yield f"max_{fact}", f"{words}, more than max_{fact}={most:g}"
    if config.fps is not None and not config.fps[0] <= info.fps <= config.fps[1]:
        yield "fps", f"has {info.fps:.3f} frames a second, not fps=({config.fps[0]:g}, {config.fps[1]:g})"
