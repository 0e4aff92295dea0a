"""Parameters that are split between ranks: DTensors, of which only the local shard is read.

A linear layer's weight (N, K) is split by rows (column-parallel, after the columns of its result) or by columns (row-parallel),
as Shoeybi et al. (2019) do it. Weights that hold several layers one after the other (queries, keys and values; the two halves
of a gated activation) are split each for itself, which DTensor calls a strided shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpupipe.errors import ShapeError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Cut:
    """How one weight is split.

    Attributes:
        local: what this rank has of it, with its way back to the parameter's gradient.
        by: ``"rows"``, ``"columns"``, or ``"nothing"`` where each rank has all of it.
        parts: how many layers lie one after the other in its rows, each split for itself.
        group: the ranks that share it.
        ranks: how many.
        rank: which of them this one is.
    """

    local: torch.Tensor
    by: Literal["rows", "columns", "nothing"]
    parts: int
    group: Any
    ranks: int
    rank: int


def is_sharded(value: object) -> bool:
    """True for a DTensor. Costs an eager call nothing to speak of, and imports nothing."""
    return type(value) not in _PLAIN and isinstance(value, torch.Tensor) and hasattr(value, "placements")


def replicated(name: str, value: Any) -> torch.Tensor | None:
    """What is used on all ranks alike: of a DTensor its local value, which must be all of it.

    Raises:
        ShapeError: for one that is split.
    """
    if value is None or not is_sharded(value):
        return value  # type: ignore[no-any-return]
    found = cut(name, value)
    if found.by != "nothing":
        raise ShapeError(f"{name} is split by {found.by}, and is used on what is whole", fix="leave it whole")
    return found.local


def cut(name: str, value: Any) -> Cut:
    """How a DTensor is split, and this rank's part of it.

    Raises:
        ShapeError: for a mesh of several dimensions, partial sums, or sizes that the ranks do not divide.
    """
    mesh = value.device_mesh
    if mesh.ndim != 1:
        raise ShapeError(
            f"{name} is a DTensor on a mesh of {mesh.ndim} dimensions, {value.placements}",
            fix="call the model, not its parts: fully_shard gathers parameters only then; or give a mesh of one dimension",
        )
    (placement,) = value.placements
    ranks = mesh.size()
    dim, parts = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
    if placement.is_partial():
        raise ShapeError(f"{name} is a DTensor of partial sums", fix="redistribute it to a Shard or a Replicate")
    if dim is not None and (value.shape[dim] % (ranks * parts) or dim > 1):
        raise ShapeError(
            f"{name} is a DTensor {tuple(value.shape)}, split in dimension {dim} between {ranks} ranks",
            fix=f"a size that {ranks * parts} divides, in the first or second dimension",
        )
    by: Literal["rows", "columns", "nothing"] = "nothing" if dim is None else ("rows", "columns")[dim]
    return Cut(value.to_local(), by, parts, mesh.get_group(), ranks, mesh.get_local_rank())
