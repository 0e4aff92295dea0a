"""Gradients of which this rank may have a shard alone: their norm over all ranks, clipping, scaling, averages.

Work is done on local shards, plain tensors and DTensors in one launch, with one small collective for each way of being split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded

MARGIN = 1e-6
"""What torch's clipping adds to a norm before it divides by it."""
_BUCKET_BYTES = 64 << 20
"""Gradients that are reduced together: few enough to need little memory, enough for the network's full rate."""


def local(value: Any) -> torch.Tensor:
    """What this rank has of a tensor, in the same memory."""
    if not is_sharded(value):  # without a context: there may be thousands in each step
        return value  # type: ignore[no-any-return]
    with torch.no_grad():
        return value.to_local()  # type: ignore[no-any-return]


def locals_of(values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same of several."""
    return [local(value) for value in values]


def like(value: Any, own: Any) -> Any:
    """A whole tensor, the same on all ranks, as this rank has its own: its shard, if that is a DTensor. Others as they are."""
    if not is_sharded(own) or not isinstance(value, torch.Tensor) or is_sharded(value) or value.shape != own.shape:
        return value  # who loads a wrong shape names it
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach().to(own.device), own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def total_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm over all of them, whole: a float32 scalar, the same on all ranks that share them."""
    if not any(map(is_sharded, grads)):
        return torch.nn.utils.get_total_norm(grads).float()
    kinds: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault(_split_over(grad), []).append(local(grad))
    squares = []
    for (mesh, dims), shards in kinds.items():
        square = torch.nn.utils.get_total_norm(shards).float().square()
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def clip(grads: Sequence[torch.Tensor], most: float, norm: torch.Tensor) -> None:
    """Shrinks gradients of that norm to at most ``most``, as ``torch.nn.utils.clip_grads_with_norm_`` does."""
    torch._foreach_mul_(locals_of(grads), (most / (norm + MARGIN)).clamp(max=1.0))


@torch.no_grad()
def average(values: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Gradients become their means over the ranks of a group, all by default, in buckets.

    One that a rank does not have counts as zero there, and where no rank has it there is none: ranks may take other ways
    through a model. The host waits only on a rank that lacks some, to know whether others have them.

    Args:
        values: the same on all ranks, in the same order, whether they have gradients or not.

    Raises:
        ConfigError: for tensors that are split among all ranks where no group is given.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1):
        return
    split = [value for value in values if is_sharded(value)]
    if split and group is None:
        sizes = {value.device_mesh.size() for value in split}  # type: ignore[attr-defined]
        if sizes == {dist.get_world_size()}:
            return  # all ranks share one model: they have the same gradients
        raise ConfigError(
            "parameters are split between some of the ranks, and it is not said which ranks have other batches",
            fix='give Precision(…, group=mesh["dp"].get_group())',
        )
    missing = [number for number, value in enumerate(values) if value.grad is None]
    there = torch.ones(len(values), device=values[0].device)
    if missing:
        there[torch.tensor(missing, device=there.device)] = 0.0
        for number in missing:
            values[number].grad = torch.zeros_like(values[number])
    shards = [*locals_of(value.grad for value in values if value.grad is not None), there]
    bucket: list[torch.Tensor] = []
    for number, grad in enumerate(shards):
        bucket.append(grad)
        if number + 1 == len(shards) or sum(each.nbytes for each in bucket) >= _BUCKET_BYTES:
            flat = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size(group))
            parts = torch.split(flat, [each.numel() for each in bucket])
            torch._foreach_copy_(bucket, [part.view_as(each) for part, each in zip(parts, bucket, strict=True)])
            bucket = []
    if missing:
        anywhere = there.tolist()
        for number in missing:
            if not anywhere[number]:
                values[number].grad = None


class Scaler(torch.amp.GradScaler):
    """torch's, for gradients of which some are DTensors: what is not finite on one rank is found by all that share them."""

    def forget(self) -> None:
        """What a step left behind that an error ended: the next one is not the second half of it."""
        self._per_optimizer_states.clear()

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        grads = [value.grad for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
        if not any(map(is_sharded, grads)):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found: dict[torch.device, torch.Tensor] = {}
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for shard in locals_of(grads):
            if not allow_fp16 and shard.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            kinds.setdefault((shard.device, shard.dtype), []).append(shard)
        for (device, _), shards in kinds.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(shards, flag, inv_scale.to(device))
        for mesh, dims in {_split_over(grad) for grad in grads}:
            for dim in dims:
                for flag in found.values():
                    dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return found


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """True for a model of which something is under ``fully_shard``, which averages gradients by itself."""
    return any(base.__name__ == "FSDPModule" for one in model.modules() for base in type(one).__mro__)


def _split_over(grad: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a gradient, and the dimensions of it over which it is split: none where each rank has all."""
    if not is_sharded(grad):
        return None, ()
    dims = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    if any(grad.placements[dim].is_partial() for dim in dims):
        raise ConfigError("a gradient is a DTensor of partial sums", fix="redistribute it before the step")
    return (grad.device_mesh, dims) if dims else (None, ())
