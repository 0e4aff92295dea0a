"""Where a run stands: what its trainer has received, as plain data that a checkpoint holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from gpupipe.config import LoaderConfig
from gpupipe.config.stage import StageConfig
from gpupipe.data.group import Cut, Planned, Position
from gpupipe.data.job import Job
from gpupipe.data.mixture import Mixture
from gpupipe.errors import ConfigError
from gpupipe.telemetry import log
from gpupipe.types import Entry

VERSION = 1
"""Of the form of a state. One of another version is refused."""
_TOLD = {"videos": "{} videos", "digest": "a list of videos with the digest {}", "seed": "seed={}", "shuffle": "shuffle={}"}
"""What a state must have in common with the loader that goes on from it, and what an error calls it."""
_NAMED = 4
"""Settings that a warning names."""
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
    classes: str = ""
    """What tells the classes' names and numbers; empty where they have no names, and in states of before there was this."""
    labels: str | None = None
    """What tells the videos' labels, empty where there are none; None in such states."""
    made: dict[str, Any] | None = None
    """How clips are made, as :func:`made_by` has it; None in such states."""


def digest(paths: Sequence[str], mixture: Mixture | None = None) -> str:
    """What tells one list of videos, and how they are mixed, from another; the folder that holds all of them may move."""
    common = os.path.commonprefix([min(paths), max(paths)])  # noqa: RUF071  commonpath() refuses relative beside absolute
    start = common.rfind(os.sep) + 1
    return _digest("\0".join([*(path[start:] for path in paths), repr(mixture)]).encode("utf-8", "surrogatepass"))


def digest_of_labels(entries: Sequence[Entry]) -> str:
    """What tells the labels of one list of videos from those of another; empty where none has one."""
    if not any("label" in entry.columns for entry in entries):
        return ""
    return _digest("\0".join(_said(entry.columns.get("label")) for entry in entries).encode("utf-8", "surrogatepass"))


def _said(label: Any) -> str:
    """A label as text, the same for one number whatever its type."""
    if label is None or isinstance(label, str):
        return repr(label)
    if isinstance(label, int):
        return str(int(label))
    try:
        values = np.asarray(label)
    except ValueError:  # lists of unlike lengths
        return repr(label)
    if values.dtype.kind not in "biuf":
        return repr(label)
    if values.ndim:
        return f"{values.shape} {_digest(values.astype(np.float64).tobytes())}"
    return repr(float(values)) if values.dtype.kind == "f" else str(int(values))


def digest_of_classes(names: Sequence[str]) -> str:
    """What tells the names of classes in the order of their numbers; empty where they have none."""
    return _digest("\0".join(names).encode("utf-8", "surrogatepass")) if names else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def made_by(config: LoaderConfig) -> dict[str, Any]:
    """The settings by which clips are made, as far as they are not the defaults, by their dotted names; JSON types only."""
    found: dict[str, Any] = {}
    for name in ("clip", "transform"):
        _flatten(getattr(config, name).model_dump(mode="json", exclude_defaults=True), name, found)
    found.pop("transform.preset", None)  # its fields are there
    return found


def _flatten(value: Any, name: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}", into)
    else:
        into[name] = value


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
        "classes": job.classes,
        "labels": job.labels,
        "made": dict(job.made),
    }


def from_dict(job: Job, values: Mapping[str, Any]) -> Position:
    """The position of a state, once it is found to be of a run like this one; the bad files that it knows of are known here.

    Where labels, or the settings by which clips are made, are others than there, the log says so.

    Raises:
        ConfigError: for what is no state, or one of another version, list of videos, seed, order or classes.
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
    if state.classes and job.classes and state.classes != job.classes:
        raise ConfigError(
            "this state is of a run whose classes had other names or another order: labels would mean other classes now",
            fix="keep the names, or give source={'classes': [...]} in the order that VideoLoader.classes had there",
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
    for change in _changes(state, job):
        log.warning("the run that this state is of had %s; the order of samples goes on all the same", change)
    job.bad_files.update(state.bad_files)
    job.stuck_in.update(state.stuck)
    return position if position.within else Position(state.epoch)


def _changes(state: State, job: Job) -> Iterator[str]:
    """What is no longer as it was in the run of a state, and is no reason to refuse it."""
    if state.labels is not None and state.labels != job.labels:
        yield "no labels" if not state.labels else "labels, and there are none now" if not job.labels else "other labels"
    if state.made is not None and state.made != job.made:
        names = sorted(name for name in {*state.made, *job.made} if state.made.get(name) != job.made.get(name))
        yield (
            "other clips: "
            + ", ".join(f"{name} {_setting(state.made, name)}, now {_setting(job.made, name)}" for name in names[:_NAMED])
            + (", …" if len(names) > _NAMED else "")
        )


def _setting(made: Mapping[str, Any], name: str) -> str:
    return repr(made[name]) if name in made else "by default"
