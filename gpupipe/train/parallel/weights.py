"""Parameters split between the ranks of a mesh, as DTensors: names stay, ``full_tensor()`` gives the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from gpupipe.errors import ConfigError
from gpupipe.train import arguments


def split_rows(value: torch.Tensor, mesh: DeviceMesh, *, parts: int = 1) -> nn.Parameter:
    """A weight (N, K) or bias (N,) of which each rank has N / ranks rows: a layer whose result is split.

    Args:
        value: the whole, the same on all ranks; nothing is sent. Its memory is let go with it.
        mesh: of one dimension.
        parts: layers that lie one after the other in the rows, such as queries, keys and values: each is split for itself.

    Raises:
        ConfigError: for rows that ``parts`` times the ranks do not divide.
    """
    ranks = line(mesh).size()
    if value.shape[0] % (parts * ranks):
        raise ConfigError(
            f"{value.shape[0]} rows for {ranks} ranks", fix=f"rows must be a multiple of {parts * ranks}, or leave them whole"
        )
    rank = mesh.get_local_rank()
    own = value.detach().reshape(parts, ranks, -1, *value.shape[1:])[:, rank].flatten(0, 1)
    return _parameter(own, value, mesh, Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts))


def split_columns(value: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """A weight (N, K) of which each rank has K / ranks columns: a layer that takes what is split, and ends it.

    Args:
        value: the whole, the same on all ranks.
        mesh: of one dimension.

    Raises:
        ConfigError: for columns that the ranks do not divide.
    """
    ranks = line(mesh).size()
    if value.shape[1] % ranks:
        raise ConfigError(f"{value.shape[1]} columns for {ranks} ranks", fix=f"columns must be a multiple of {ranks}")
    own = value.detach().chunk(ranks, 1)[mesh.get_local_rank()]
    return _parameter(own, value, mesh, Shard(1))


def kept_within(value: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter that each rank has whole and uses on its own heads, so that gradients are to be summed: a norm's of queries
    and keys."""
    return _parameter(value.detach(), value, line(mesh), Replicate())


def fsdp_placement(value: nn.Parameter) -> Shard | None:
    """For ``fully_shard(…, shard_placement_fn=…)`` round what is split: packed rows are sharded by columns, for two ways of
    splitting rows would not come apart again. The columns must be a multiple of the ranks that share them."""
    packed = isinstance(value, DTensor) and any(getattr(one, "split_factor", 1) > 1 for one in value.placements)
    return Shard(1) if packed else None


def data_ranks(mesh: DeviceMesh) -> dict[str, int]:
    """What a loader needs to know of the ranks that get other batches; those that share a model, or a clip, get the same:
    ``VideoLoader(videos, **data_ranks(mesh["dp"]))``.

    Args:
        mesh: of one dimension, that of ranks with other batches.

    Raises:
        ConfigError: for a mesh of several dimensions.
    """
    return {"rank": line(mesh, "dp").get_local_rank(), "world_size": mesh.size()}


_MEANT = {"tp": "whose ranks share a layer", "dp": "whose ranks get other batches", "sp": "whose ranks share a clip"}
"""Which dimension of a mesh is asked for, by its usual name."""


def line(mesh: DeviceMesh, use: str = "tp") -> DeviceMesh:
    """A mesh of one dimension, that one of ``_MEANT``.

    Raises:
        ConfigError: for one of several, and what is no mesh.
    """
    arguments.of(DeviceMesh, mesh, "mesh", "make it by torch.distributed.device_mesh.init_device_mesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        named = f", such as mesh[{use!r}]" if use in names else f": mesh[…] of {', '.join(map(repr, names))}" if names else ""
        raise ConfigError(f"a mesh of {mesh.ndim} dimensions", fix=f"give the one {_MEANT[use]}{named}")
    return mesh


def _parameter(own: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    local = own.clone(memory_format=torch.contiguous_format)
    made: Any = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return nn.Parameter(made, requires_grad=whole.requires_grad)
