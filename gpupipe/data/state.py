"""Where a run stands: what its trainer has received, as plain data that a checkpoint holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from gpupipe.config.stage import StageConfig
from gpupipe.data.group import Cut, Planned, Position
from gpupipe.data.job import Job
from gpupipe.data.mixture import Mixture
from gpupipe.errors import ConfigError

VERSION = 1
"""Of the form of a state. One of another version is refused."""
_TOLD = {"videos": "{} videos", "digest": "a list of videos with the digest {}", "seed": "seed={}", "shuffle": "shuffle={}"}
"""What a state must have in common with the loader that goes on from it, and what an error calls it."""
_Count = Annotated[int, Field(ge=0)]


class State(StageConfig):
    """The form of a state."""

    version: int = VERSION
    seed: _Count
    shuffle: bool | int
    videos: _Count
    digest: str
    epoch: _Count
    samples: _Count
    step: Annotated[int, Field(ge=1)]
    """Samples of one batch of each rank, together."""
    ahead: tuple[_Count, ...]
    world_size: Annotated[int, Field(ge=1)] = 1
    rank: _Count | None = None
    """Whose batches ``ahead`` names."""
    cuts: tuple[Cut, ...] = ()
    """How planned batches were cut so far."""
    shapes: str = ""
    """What tells the shapes of the videos' clips, where batches are planned."""
    bad_files: dict[str, str]
    stuck: tuple[str, ...]


def digest(paths: Sequence[str], mixture: Mixture | None = None) -> str:
    """What tells one list of videos, and how they are mixed, from another; the folder that holds all of them may move."""
    common = os.path.commonprefix([min(paths), max(paths)])  # noqa: RUF071  commonpath() refuses relative beside absolute
    start = common.rfind(os.sep) + 1
    joined = "\0".join([*(path[start:] for path in paths), repr(mixture)])
    return hashlib.sha256(joined.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def to_dict(job: Job, position: Position) -> dict[str, Any]:
    """The state of a run at a position: JSON can write it, and :func:`from_dict` reads it."""
    return {
        "version": VERSION,
        "seed": job.order.seed,
        "shuffle": job.order.shuffle,
        "videos": job.order.entries,
        "digest": job.digest,
        "epoch": position.epoch,
        "samples": position.samples,
        "step": job.grouping.step,
        "ahead": sorted(position.ahead),
        "world_size": job.order.world_size,
        "rank": job.order.rank if position.ahead else None,
        "cuts": [cut.model_dump() for cut in position.cuts],
        "shapes": job.shapes,
        "bad_files": dict(job.bad_files),
        "stuck": sorted(job.stuck_in),
    }


def from_dict(job: Job, values: Mapping[str, Any]) -> Position:
    """The position of a state, once it is found to be of a run like this one; the bad files that it knows of are known here.

    Raises:
        ConfigError: for what is no state, or one of another version, list of videos, seed or order.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"a state is a mapping, not a {type(values).__name__}", fix="give what state_dict() returned")
    if values.get("version") != VERSION:
        raise ConfigError(
            f"this state has version {values.get('version')!r}, this gpupipe reads {VERSION}",
            fix="go on with the gpupipe that wrote it, or begin the epoch anew with set_epoch()",
        )
    state = State.parse(dict(values))
    ours = to_dict(job, Position())
    for name, theirs in _TOLD.items():
        if getattr(state, name) != ours[name]:
            raise ConfigError(
                f"this state is of a run with {theirs.format(values[name])}, this loader has {theirs.format(ours[name])}",
                fix="make the loader as it was made there, or begin the epoch anew with set_epoch()",
            )
    position = Position(state.epoch, state.samples, frozenset(state.ahead), state.cuts)
    if bool(state.shapes) != bool(job.shapes) and position.within:
        raise ConfigError(
            "this state is amid an epoch whose batches were" + (" planned from shapes" if state.shapes else " all of one size"),
            fix="keep batch.buckets, layout and budgets as they were there, or begin the epoch anew with set_epoch()",
        )
    if state.shapes != job.shapes and position.within:
        raise ConfigError(
            "this state is of a run in which clips had other shapes, or another file could not be indexed",
            fix="keep batch.buckets, clip, size and the files (see bad_files), or begin the epoch anew with set_epoch()",
        )
    fits = job.grouping.fits(position) if isinstance(job.grouping, Planned) else state.step == job.grouping.step
    if state.ahead and not (fits and (state.rank, state.world_size) == (job.order.rank, job.order.world_size)):
        raise ConfigError(
            f"this state has batches received out of order, by rank {state.rank} of {state.world_size}, {state.step} samples a "
            f"step; this is rank {job.order.rank} of {job.order.world_size}, with {job.grouping.step}",
            fix="give each rank its own state, and keep their number and the batch size; or keep jitter.in_order",
        )
    job.grouping.check(position)
    job.bad_files.update(state.bad_files)
    job.stuck_in.update(state.stuck)
    return position if position.within else Position(state.epoch)
