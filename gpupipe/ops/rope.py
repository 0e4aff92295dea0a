"""Rotary tables of a token grid, one an axis, so that a kernel reads kilobytes of them and not a row for each token."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gpupipe.device.inventory import resolve_device
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.checks import floating, refuse, said

Layout = Literal["interleaved", "half"]
AXES = 3


class Rope:
    """Cosines and sines by which queries and keys are turned (Su et al. 2021), for a grid of one to three axes.

    A head's ``dim`` values are ``dim / 2`` pairs. The first pairs turn with the token's place on the first axis, the next with
    that on the second, and so on. Pairs that shall not turn have cosine 1 and sine 0.

    Args:
        axes: for each axis (cos, sin), each (positions, pairs). One axis: a plain sequence. Three: frames, rows, columns.
            Tables may be longer than the grid that they serve. They are kept in float32 and get no gradient.
        layout: ``"interleaved"``: a pair is columns 2j and 2j + 1; ``"half"``: columns j and j + dim / 2.

    Raises:
        ShapeError: for tables that do not fit each other.
        ConfigError: for another ``layout``, or another number of axes.
    """

    def __init__(self, *axes: tuple[torch.Tensor, torch.Tensor], layout: Layout = "interleaved") -> None:
        if layout not in ("interleaved", "half"):
            raise ConfigError(f"layout is {layout!r}", fix="choose 'interleaved' or 'half'")
        if not 1 <= len(axes) <= AXES:
            raise ConfigError(f"{len(axes)} axes of rotary tables", fix="give one (cos, sin) for each of one to three axes")
        for number, (cos, sin) in enumerate(axes):
            for name, value in ((f"cos of axis {number}", cos), (f"sin of axis {number}", sin)):
                floating(name, value, like=axes[0][0])
                if value.dim() != 2:
                    raise refuse(name, value, "(positions, pairs)")
            if cos.shape != sin.shape:
                raise ShapeError(f"axis {number} has cos {said(cos)} and sin {said(sin)}", fix="give both the same shape")
        missing = [0] * (AXES - len(axes))
        self.axes = len(axes)
        self.interleaved = layout == "interleaved"
        self.lengths = [*missing, *(cos.shape[0] for cos, _ in axes)]
        """Positions of frames, rows and columns; 0 for an axis that is not there."""
        self.pairs = [*missing, *(cos.shape[1] for cos, _ in axes)]
        flat = [side.detach().reshape(-1).float() for sides in zip(*axes, strict=True) for side in sides]
        self.table = torch.cat(flat)
        """All cosines, axis after axis, then all sines."""

    @classmethod
    def of(
        cls,
        grid: tuple[int, ...],
        dims: tuple[int, ...],
        *,
        theta: float = 10000.0,
        layout: Layout = "interleaved",
        device: torch.device | str | None = None,
    ) -> Rope:
        """Tables by the usual rule: pair j of an axis with ``dims`` d turns by position * theta ** (-2j / d) radians.

        Args:
            grid: positions on each axis, such as (T, H, W).
            dims: even numbers, how many of a head's values turn with each axis; together the head's size.
            theta: the base.
            layout: see :class:`Rope`.
            device: where the tables lie.

        Raises:
            ConfigError: for ``dims`` that do not fit.
            DeviceError: for a CUDA device that is not there.
        """
        if device is not None and torch.device(device).type == "cuda":
            device = resolve_device(str(device))
        if len(grid) != len(dims) or any(dim % 2 or dim < 0 for dim in dims) or min(grid, default=0) < 0:
            raise ConfigError(f"dims are {dims} for the grid {grid}", fix="give one even number for each axis")
        axes = []
        for length, dim in zip(grid, dims, strict=True):
            speeds = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(theta) / max(dim, 1)))
            angles = torch.arange(length, dtype=torch.float64)[:, None] * speeds
            axes.append((angles.cos().float().to(device), angles.sin().float().to(device)))
        return cls(*axes, layout=layout)

    def to(self, device: torch.device | str) -> Rope:
        """The same tables on another device."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.table = self.table.to(device)
        return made

    def part(self, axis: int, first: int, count: int) -> Rope:
        """The same tables without the positions before ``first`` on one axis: for tokens whose grid begins there.

        Args:
            axis: 0 frames, 1 rows, 2 columns.
            first, count: positions; none is left out where nothing turns with this axis.

        Raises:
            ShapeError: for tables that do not have these positions.
        """
        if not self.pairs[axis]:
            return self
        if first + count > self.lengths[axis]:
            raise ShapeError(
                f"rope has {self.lengths[axis]} positions on axis {axis}", fix=f"{first + count} are needed: make longer tables"
            )
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        sizes = [length * pairs for length, pairs in zip(self.lengths, self.pairs, strict=True)]
        sides = []
        for side in self.table.view(2, -1):
            own = list(side.split(sizes))
            own[axis] = own[axis].view(-1, self.pairs[axis])[first : first + count].reshape(-1)
            sides += own
        made.table = torch.cat(sides)
        made.lengths = [count if place == axis else length for place, length in enumerate(self.lengths)]
        return made

    def fitting(self, grid: tuple[int, ...] | None, tokens: int, dim: int, like: torch.Tensor) -> list[int]:
        """The token grid as three numbers, checked against these tables.

        Args:
            grid: as the user gave it; None: one axis, all tokens.
            tokens: that are turned.
            dim: of a head.
            like: a tensor on the device where the tables must be.

        Raises:
            ShapeError: when they do not fit.
        """
        found = grid_of(grid, tokens)
        if 2 * sum(self.pairs) != dim:
            raise ShapeError(
                f"rope turns {sum(self.pairs)} pairs", fix=f"a head of {dim} has {dim / 2:g}; let the rest have cos 1"
            )
        if grid is not None and len(grid) != self.axes:
            raise ShapeError(f"rope has {self.axes} axes for the grid {grid}", fix="give as many tables as the grid has axes")
        short = any(
            pairs and length < size for size, length, pairs in zip(found, self.lengths, self.pairs, strict=True)
        )  # fmt: skip
        if short or (grid is None and self.axes > 1):
            raise ShapeError(
                f"rope has {self.lengths[AXES - self.axes :]} positions for a grid of {found[AXES - self.axes :]} tokens",
                fix="give the token grid, and tables at least as long as it",
            )
        if self.table.device != like.device:
            raise ShapeError(f"rope lies on {self.table.device}", fix=f"move it: rope.to({str(like.device)!r})")
        return found


def grid_of(grid: tuple[int, ...] | None, tokens: int) -> list[int]:
    """A token grid as (frames, rows, columns); None is one row of all tokens.

    Raises:
        ShapeError: when it does not have that many tokens.
    """
    given = (tokens,) if grid is None else grid
    if (
        not isinstance(given, tuple | list)
        or not 1 <= len(given) <= AXES
        or not all(isinstance(size, int | torch.SymInt) and size >= 0 for size in given)
        or math.prod(given) != tokens
    ):
        raise ShapeError(f"grid is {given} for {tokens} tokens", fix="one to three sizes whose product is the number of tokens")
    return [*[1] * (AXES - len(given)), *given]


def spread(table: torch.Tensor, lengths: list[int], pairs: list[int], grid: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every token of a grid, each (tokens, pairs): what the references turn by."""
    sides = []
    for side in table.view(2, -1):
        parts, at = [], 0
        for axis, (length, count) in enumerate(zip(lengths, pairs, strict=True)):
            own = side[at : at + length * count].view(length, count)
            at += length * count
            if count:
                shape = [1, 1, 1, count]
                shape[axis] = grid[axis]
                parts.append(own[: grid[axis]].view(shape).expand(*grid, count))
        sides.append(torch.cat(parts, -1).reshape(-1, sum(pairs)))
    return sides[0], sides[1]
