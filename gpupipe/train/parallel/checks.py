"""What must hold before a model is split, and when it loads: looked at by all ranks, so that all of them hear of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded
from gpupipe.train.forwards import Standing, replaced
from gpupipe.train.loading import taken_by

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def untouched(model: nn.Module) -> None:
    """Refuses a model whose parameters somebody has taken already, who would go on with the former ones.

    Raises:
        ConfigError: for one in DistributedDataParallel, with graphs installed, or that was prepared.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is in DistributedDataParallel, which does not take DTensors",
                fix="split the model itself; for other batches use fully_shard, or master_weights with Precision(…, group=…)",
            )
        if any(isinstance(each, Standing) for each in replaced(module)):
            raise ConfigError(f"{name or 'the model'} has graphs installed", fix="call tensor_parallel before AdaptiveGraph")
    for name, value in model.named_parameters():
        by = taken_by(value)
        if by is not None:
            raise ConfigError(
                f"{by} has been given {name!r} already, and would go on with what the model had before the split",
                fix=f"make the model anew, and call tensor_parallel before {by} and before the optimizer",
            )


def same_on_all(model: nn.Module, mesh: DeviceMesh) -> None:
    """Holds names, shapes and sums of the bits of all parameters against those of the other ranks.

    Raises:
        ConfigError: naming the first that differs, on all ranks.
    """
    own = [(name, str(value.dtype), tuple(value.shape)) for name, value in model.named_parameters()]
    sums = _sums(value.detach() for value in model.parameters())
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, list(zip(own, sums, strict=True)), group=mesh.get_group())
    for rank, theirs in enumerate(found):
        if len(theirs) != len(found[0]):
            raise ConfigError(
                f"rank {rank} of the mesh has a model of {len(theirs)} parameters, rank 0 one of {len(found[0])}",
                fix="make the same model on all ranks that share it",
            )
        for (what, bits), (first, theirs_bits) in zip(theirs, found[0], strict=True):
            if what != first:
                raise ConfigError(
                    f"rank {rank} of the mesh has {what[0]!r} {what[1:]} where rank 0 has {first[0]!r} {first[1:]}",
                    fix="make the same model on all ranks that share it",
                )
            if bits != theirs_bits:
                raise ConfigError(
                    f"{what[0]!r} has other values on rank {rank} of the mesh than on rank 0",
                    fix="seed all ranks alike before the model is made, by torch.manual_seed, or load a checkpoint first",
                )


def _sums(values: Iterable[torch.Tensor]) -> list[int]:
    """Of each tensor the sum of its elements' bits, as whole numbers: in any order the same. One wait for the device."""
    made: list[torch.Tensor] = []
    for value in values:
        parts = torch.view_as_real(value) if value.is_complex() else value
        if value.is_meta:
            made.append(torch.zeros((), dtype=torch.int64))
        else:
            made.append(parts.contiguous().view(_BITS[parts.element_size()]).sum(dtype=torch.int64))
    devices = {one.device for one in made}
    return torch.stack([one.cpu() for one in made] if len(devices) > 1 else made).tolist() if made else []


def other_ranks(one: Any, other: Any) -> bool:
    """Whether two groups have no more than one rank in common."""
    return len({*dist.get_process_group_ranks(one)} & {*dist.get_process_group_ranks(other)}) < 2


def refuse_plain(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict`` of a model that is split: a whole tensor does not go into a shard.

    Raises:
        ConfigError: naming the parameter.
    """
    for name, value in model.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if is_sharded(value) and isinstance(given, torch.Tensor) and not is_sharded(given):
            raise ConfigError(
                f"the model has a part of {prefix + name!r} on this rank, and the state has it whole",
                fix="load it by gpupipe.train.parallel.load_whole(model, state), on all ranks",
            )
