"""Which requests share a batch: known from metadata, before any decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpupipe.config import LoaderConfig
from gpupipe.data.bytes import name
from gpupipe.data.group.base import Group, Grouping, Position
from gpupipe.data.group.cuts import Cut, Rule
from gpupipe.data.group.fixed import Fixed
from gpupipe.data.group.planned import Planned
from gpupipe.data.order import Order
from gpupipe.data.shape import Shape, shapes_for
from gpupipe.errors import ConfigError, SourceError
from gpupipe.telemetry import log
from gpupipe.types import Entry

__all__ = ["Cut", "Fixed", "Group", "Grouping", "Planned", "Position", "Rule", "group"]

_LOOKED_AT = 64
"""Videos that are looked for where they make no full batch: a folder's name that is misspelt stands for one of them."""


def group(
    order: Order, config: LoaderConfig, entries: Sequence[Entry], item_bytes: int, processes: int
) -> tuple[Grouping, list[Shape | None] | None, dict[str, str]]:
    """How a loader groups its samples; the shapes of each video's clips, where batches are planned from these; and the files of
    which no shape can be known, with the reason.

    Args:
        item_bytes: of a number in a batch.
        processes: how many make missing indices side by side.

    Raises:
        ConfigError: when the videos make not one batch, or a shape fits none.
        OpenError: when a file cannot be indexed, and ``on_bad_file`` is ``raise``.
    """
    shapes: list[Shape | None] | None = None
    bad: dict[str, str] = {}
    grouping: Grouping = Fixed(order, config)
    if config.batch.planned:
        shapes, errors = shapes_for(entries, config, processes)
        if errors and config.on_bad_file == "raise":
            raise next(iter(errors.values()))
        for path, error in errors.items():
            bad[path] = str(error)
            log.warning("%s cannot be used and is left out: %s", path, error)
        if not any(shapes):
            path, error = next(iter(errors.items()))
            raise SourceError(
                f"none of {len(entries)} videos can be indexed; the first: {error.message}", fix=error.fix, path=path
            )
        grouping = Planned(order, config, shapes, item_bytes)
    if grouping.count(0) == 0:
        for entry in entries[:_LOOKED_AT]:
            if entry.held is None and name.is_local(entry.path) and not os.path.lexists(entry.path):
                raise SourceError(
                    f"{entry.path} does not exist, and {len(entries)} videos make no full batch of {config.batch.size}",
                    fix="check the path; relative ones start at the working directory",
                    path=entry.path,
                )
        raise ConfigError(
            f"{len(entries)} videos over {order.world_size} rank(s) make no full batch of {config.batch.size}",
            fix="use a smaller batch, more videos, or batch={'size': …, 'last': 'partial'}"
            if len(entries) >= order.world_size
            else "give at least one video for each rank",
        )
    return grouping, shapes, bad
