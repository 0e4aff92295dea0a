"""What goes from rank to rank where a model is split, with its gradient: one collective at each boundary.

Copies into a split part become sums of gradients on the way back, sums behind it become copies; an exchange of one split for
another is one the other way round. On NCCL and gloo alike; on the current stream. A second derivative is refused, as by all
ops: what a backward sends, no graph knows of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x, which all ranks have alike, into a part that is split: gradients are summed over the ranks."""
    return _Copied.apply(group, x)[0]  # type: ignore[no-any-return, no-untyped-call]


def all_copied(values: Sequence[torch.Tensor], group: Any) -> tuple[torch.Tensor, ...]:
    """The same for several tensors, whose gradients go in one collective: small parameters inside a split part."""
    return _Copied.apply(group, *values)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the ranks, on each of them. They go on alike: gradients are taken as they come."""
    return _Summed.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' columns, on each of them. They go on alike: each takes its own columns' gradients."""
    return _Gathered.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def all_gathered(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    """All ranks' parts along a dimension, on each of them. They need not go on alike: gradients are summed."""
    return _AllGathered.apply(x, group, dim)  # type: ignore[no-any-return, no-untyped-call]


def picked(value: torch.Tensor, parts: int, group: Any) -> torch.Tensor:
    """This rank's rows of each of ``parts`` equal parts of a tensor that all ranks have; gradients are put together again."""
    return _Picked.apply(value, parts, group)  # type: ignore[no-any-return, no-untyped-call]


def exchanged(x: torch.Tensor, group: Any, *, split: int, gather: int) -> torch.Tensor:
    """A tensor of which each rank has a part along ``gather``, to one of which it has a part along ``split`` (all-to-all).

    Args:
        x: the dimension ``split`` whole and divisible by the ranks; ``gather`` this rank's part, in the order of ranks.
        group: the ranks.
        split, gather: two dimensions, counted from 0.

    Returns:
        ``split`` this rank's part, ``gather`` whole.
    """
    return _Exchanged.apply(x, group, split, gather)  # type: ignore[no-any-return, no-untyped-call]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if len(grads) == 1:
            return None, _sum(grads[0], ctx.group)
        flat = torch.cat([grad.reshape(-1).float() for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        sides = flat.split([grad.numel() for grad in grads])
        return None, *(side.view_as(grad).to(grad.dtype) for side, grad in zip(sides, grads, strict=True))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        own = x.contiguous()
        whole = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(whole, own, group=group)
        return torch.cat(whole, -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None


class _AllGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        own = x.contiguous()
        whole = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(whole, own, group=group)
        return torch.cat(whole, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _sum(grad, ctx.group).chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parts: int, group: Any) -> torch.Tensor:
        ctx.parts, ctx.group, ctx.shape = parts, group, value.shape
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        own: torch.Tensor = value.unflatten(0, (parts, ranks, -1))[:, rank]
        return own.flatten(0, 1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        own = grad.contiguous()
        whole = [torch.empty_like(own) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(whole, own, group=ctx.group)
        return torch.stack([side.unflatten(0, (ctx.parts, -1)) for side in whole], 1).reshape(ctx.shape), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, split: int, gather: int) -> torch.Tensor:
        ctx.group, ctx.split, ctx.gather = group, split, gather
        return _exchange(x, group, split, gather)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _exchange(grad, ctx.group, ctx.gather, ctx.split), None, None, None


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


def _exchange(x: torch.Tensor, group: Any, split: int, gather: int) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    given = torch.stack(x.chunk(ranks, split))
    found = torch.empty_like(given)
    dist.all_to_all_single(found, given, group=group)
    return torch.cat(found.unbind(0), gather)
