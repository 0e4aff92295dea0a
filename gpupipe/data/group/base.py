"""What all ways of grouping have in common: batches by position, and positions between batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpupipe.data.group.cuts import Cut
from gpupipe.errors import ConfigError
from gpupipe.types import ClipRequest


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one batch of one rank."""

    index: int
    """Position of the batch in its epoch, from 0."""
    requests: list[ClipRequest]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the run, between two batches."""

    epoch: int = 0
    samples: int = 0
    """Samples of the epoch that all ranks together have received; the first ones, unless batches are planned."""
    ahead: frozenset[int] = frozenset()
    """Positions of batches beyond these that this rank has received too, where batches come as they are completed."""
    cuts: tuple[Cut, ...] = ()
    """How planned batches were cut so far, by one rule after the other."""

    @property
    def within(self) -> bool:
        """Whether the epoch has begun."""
        return self.samples > 0 or bool(self.ahead)


def bad_position(why: str) -> ConfigError:
    """What to say of a state that no run can have come to."""
    return ConfigError(f"this state is damaged: {why}", fix="load another one, or begin the epoch anew with set_epoch()")


def parts_of(visits: list[int], clips: int, size: int) -> int:
    """Into how many parts of at most ``size`` clips a step is cut: as many for all ranks, each with a clip in it.

    Args:
        visits: of each rank's batch.
        clips: of a visit.
    """
    return min(-(-max(visits) * clips // size), min(visits) * clips)


class Grouping(Protocol):
    """Groups the samples of an epoch into batches."""

    @property
    def step(self) -> int:
        """Samples that a batch of each rank has, together, where that is always the same; else 1."""
        ...

    def count(self, epoch: int) -> int:
        """Batches that each rank has in a whole epoch: the same number for all."""
        ...

    def groups(self, position: Position) -> list[Group]:
        """This rank's batches of what is left of an epoch."""
        ...

    def after(self, position: Position, index: int) -> Position:
        """The position once the batch at ``index`` is received too."""
        ...

    def visits(self, position: Position, index: int) -> list[int]:
        """Visits of the batch at ``index`` for each rank; none: as many for all."""
        ...

    def check(self, position: Position) -> None:
        """Raises: ConfigError: for a position that no run can have come to."""
        ...

    def substitute(self, request: ClipRequest) -> ClipRequest:
        """The request that stands in when ``request`` cannot be served, of the same shape."""
        ...
