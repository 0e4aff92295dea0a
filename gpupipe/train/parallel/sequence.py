"""Tokens split between ranks along time or rows, with an exchange before and behind attention that needs the whole axis.

DeepSpeed-Ulysses (Jacobs et al. 2023): an all-to-all turns a split along tokens into one along heads, for attention as ever,
and another turns it back. Where attention stays within what a rank has (frames by themselves, split along time) nothing is
sent.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpupipe import ops
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.grid_attention import Axis
from gpupipe.ops.packed import Packed, unpack
from gpupipe.ops.rope import Rope
from gpupipe.ops.rotary import Norm
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import is_sharded
from gpupipe.ops.sharded.collectives import all_gathered, exchanged
from gpupipe.telemetry import log
from gpupipe.train import arguments
from gpupipe.train.parallel.checks import other_ranks
from gpupipe.train.parallel.plans import attends
from gpupipe.train.parallel.weights import line
from gpupipe.train.shards import is_fully_sharded

Along = Literal["time", "rows"]
_ATTEND = "attend"
"""The attribute by which modules over our ops call attention on a token grid."""


def sequence_parallel(model: nn.Module, mesh: DeviceMesh, *, along: Along = "time") -> SequenceParallel:
    """Lets a model's attention reach over the tokens of all ranks of a mesh, each of which works on a part of every clip.

    Parameters stay whole on every rank. What they get of gradients are those of its tokens: have them averaged over these ranks
    as over those with other batches, by DistributedDataParallel or ``fully_shard``, with the mean over its own tokens for loss.
    The rest of the model must take each token, or each frame, for itself::

        sequence = sequence_parallel(model, mesh["sp"])
        loss = loss_of(model(sequence.own(video, 2), time), sequence.own(target, 2))  # frames are dimension 2

    Args:
        model: one whose attention is called as ``attend``: :class:`gpupipe.train.GridAttention`, and modules of yours that have
            ``attend = staticmethod(gpupipe.ops.attention)`` and call that.
        mesh: of one dimension, such as ``mesh["sp"]``: ranks with the same batches.
        along: what of the token grid is split: ``"time"`` or ``"rows"``.

    Returns:
        What cuts tensors for a rank, and puts them together.

    Raises:
        ConfigError: for a model with attention that would see a rank's tokens alone, or none, and one whose layers are split
            between the same ranks.
    """
    arguments.a_model(model)
    made, found = SequenceParallel(mesh, along=along), []
    for name, module in model.named_modules():
        if hasattr(module, _ATTEND):
            found.append(module)
        elif attends(module):
            raise ConfigError(
                f"the attention {name or type(module).__name__!r} would see the tokens of its rank alone",
                fix="use gpupipe.train.GridAttention, or call attention as self.attend",
            )
    if not found:
        raise ConfigError(f"nothing in this {type(model).__name__} calls attention as self.attend", fix="see the documentation")
    sharded = is_fully_sharded(model)  # which may be between these: it gathers them
    for name, value in model.named_parameters():
        if is_sharded(value) and made.ranks > 1 and not sharded and _layers_of_these(value, made):
            raise ConfigError(
                f"tensor_parallel has split {name!r} between the same ranks, which need the same tokens for it",
                fix='give each a dimension of its own, mesh["tp"] and mesh["sp"]',
            )
    for module in found:
        setattr(module, _ATTEND, made.attention)
    return made


def group_of(module: nn.Module) -> Any:
    """The ranks between which tokens of a module's attention are split; None where they are not."""
    bound = getattr(module.__dict__.get(_ATTEND), "__self__", None)
    return bound._group if isinstance(bound, SequenceParallel) else None


def _layers_of_these(value: Any, sequence: SequenceParallel) -> bool:
    """Whether a parameter is split between a sequence's ranks."""
    return any(not other_ranks(value.device_mesh.get_group(dim), sequence._group) for dim in range(value.device_mesh.ndim))


class SequenceParallel:
    """Tokens of a grid (T, H, W) split between the ranks of a mesh: rank r has the r-th of equal parts, in order.

    Args:
        mesh: of one dimension.
        along: see :func:`sequence_parallel`.

    Attributes:
        ranks: how many share a clip.
        rank: which of them this one is.
    """

    def __init__(self, mesh: DeviceMesh, *, along: Along = "time") -> None:
        if along not in ("time", "rows"):
            raise ConfigError(f"along is {along!r}", fix="choose 'time' or 'rows'")
        self._group = line(mesh, "sp").get_group()
        self._axis = 0 if along == "time" else 1
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self._told = self.ranks == 1
        """Whether somebody has called :meth:`own`, or has been asked whether they forgot it."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # copies of a model are split between the same ranks

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that all have: a view.

        Raises:
            ShapeError: for a size that the ranks do not divide.
        """
        if x.shape[dim] % self.ranks:
            raise ShapeError(
                f"dimension {dim} of {tuple(x.shape)} for {self.ranks} ranks", fix=f"a size that is a multiple of {self.ranks}"
            )
        self._told = True
        return x.chunk(self.ranks, dim)[self.rank]

    def whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' parts, on each of them. Gradients that come to it on any rank reach the part that they are of."""
        return all_gathered(x, self._group, dim % x.dim())

    def attention(
        self,
        qkv: Packed,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        rope: Rope | None = None,
        *,
        grid: tuple[int, int, int],
        axis: Axis = "full",
        norm: Norm | None = None,
        scale: float | None = None,
        eps: float = 1e-6,
        precision: Precision | None = None,
    ) -> torch.Tensor:
        """:func:`gpupipe.ops.attention` of this rank's tokens to those of all.

        Heads are shared out if the ranks divide them, before norm and turn; else what of the grid attention does not look
        across, behind them. One all-to-all each way.

        Args:
            qkv: of this rank's tokens, (B, N, 3, heads, dim), or (q, k, v), each (B, N, heads, dim).
            grid: of all tokens, or of this rank's.
            rope: tables for the grid of all tokens.
            q_weight, k_weight, axis, norm, scale, eps, precision: as there.

        Returns:
            (B, N, heads, dim), contiguous.

        Raises:
            ShapeError: for a grid that does not fit, and where the ranks divide neither heads nor the rest of the grid.
            ConfigError: as there.
        """
        own, every = self._grids(grid, unpack(qkv)[0].shape[1])
        settings: dict[str, Any] = {"eps": eps, "precision": precision}
        if rope is not None and rope.pairs[self._axis] and rope.lengths[self._axis] < every[self._axis]:
            dim = ("frames", "rows")[self._axis]
            raise ShapeError(  # on all ranks: the last one alone would see it in its tables, and the others wait for it
                f"{self.ranks} ranks have {own[self._axis]} {dim} each, and rope has {rope.lengths[self._axis]} positions",
                fix="did you forget own(x, dim) round what the model gets? Else make tables for the tokens of all ranks",
            )
        if not self._told and own == tuple(grid):
            self._told = True
            log.warning("each of %d ranks has all tokens of the grid %s: did you forget own(x, dim)?", self.ranks, own)
        across = ("temporal", "spatial")[self._axis]
        if axis not in (across, "full"):  # each rank has all that its tokens look at
            return ops.attention(
                qkv, q_weight, k_weight, self._part(rope, own), grid=own, axis=axis, norm=norm, scale=scale, **settings
            )  # fmt: skip
        heads, gather = unpack(qkv)[0].shape[2], 1 + self._axis
        shared = heads % self.ranks == 0
        if not shared or norm == "full":  # the norm goes over heads that will be elsewhere, or places are other ones then
            if norm is not None or rope is not None:
                qkv = ops.qk_norm_rope(qkv, q_weight, k_weight, self._part(rope, own), grid=own, norm=norm, **settings)
            q_weight = k_weight = rope = norm = None
        x = qkv if isinstance(qkv, torch.Tensor) else torch.stack(qkv, 2)
        if shared:
            x = self._exchange(x, own, -2, gather).flatten(1, 3)
            made = ops.attention(x, q_weight, k_weight, rope, grid=every, axis=axis, norm=norm, scale=scale, **settings)
            return self._exchange(made, every, gather, -2).flatten(1, 3).contiguous()
        rest = (every[0], own[1] * own[2]) if axis == "temporal" else (own[0], every[1])
        if axis == "full" or rest[self._axis == 0] % self.ranks:
            raise ShapeError(
                f"{heads} heads for {self.ranks} ranks, and axis {axis!r} of the grid {every}",
                fix=f"heads{'' if axis == 'full' else ', or the rest of the grid,'} must be a multiple of the ranks",
            )
        if axis == "temporal":  # (B, t, pixels) to (B, T, pixels / ranks)
            own, every = (own[0], 1, own[1] * own[2]), (every[0], 1, own[1] * own[2])
            split, turned = 3, (every[0], 1, every[2] // self.ranks)
        else:  # (B, T, h, W) to (B, T / ranks, H, W)
            split, turned = 1, (own[0] // self.ranks, *every[1:])
        x = self._exchange(x, own, split, gather).flatten(1, 3)
        made = ops.attention(x, grid=turned, axis=axis, scale=scale, **settings)
        return self._exchange(made, turned, gather, split).flatten(1, 3).contiguous()

    def _grids(self, grid: tuple[int, ...], tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The grid of this rank's tokens, and that of all."""
        if len(grid) == 3:
            own = list(grid)
            if math.prod(grid) != tokens and grid[self._axis] % self.ranks == 0:
                own[self._axis] //= self.ranks
            if math.prod(own) == tokens:
                every = list(own)
                every[self._axis] *= self.ranks
                return (own[0], own[1], own[2]), (every[0], every[1], every[2])
        raise ShapeError(
            f"grid is {tuple(grid)} for {tokens} tokens of each of {self.ranks} ranks",
            fix="give (T, H, W) of all tokens, of which each rank has an equal part",
        )

    def _part(self, rope: Rope | None, own: tuple[int, int, int]) -> Rope | None:
        """The tables of this rank's places."""
        return None if rope is None else rope.part(self._axis, self.rank * own[self._axis], own[self._axis])

    def _exchange(self, x: torch.Tensor, grid: tuple[int, int, int], split: int, gather: int) -> torch.Tensor:
        apart = x.reshape(x.shape[0], *grid, *x.shape[2:])
        return exchanged(apart, self._group, split=split % apart.dim(), gather=gather % apart.dim())
