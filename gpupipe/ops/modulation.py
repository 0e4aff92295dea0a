"""Values that a row of x is multiplied by or shifted by, given for all rows, for each sample or for each token."""

from __future__ import annotations

import torch

from gpupipe.errors import ShapeError
from gpupipe.ops import checks
from gpupipe.ops.layout import matrix


def modulations(x: torch.Tensor, **values: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Gate, scale and shift as (M, H), all with one M: each row serves as many rows of x, one after the other.

    Raises:
        ShapeError: for one that does not fit x.
    """
    finest = -1
    alike = True  # all are rows of one number of x's dimensions, as models give them
    for name, value in values.items():
        if value is None:
            continue
        checks.floating(name, value, like=x)
        prefix = _prefix(value.shape, x.shape)
        if prefix is None:
            raise ShapeError(
                f"{name} is {checks.said(value)}, which does not fit x {tuple(x.shape)}",
                fix=f"{name} must be ({x.shape[-1]},), one row for each of x's first dimensions such as "
                f"{(*x.shape[:1], x.shape[-1])}, or {tuple(x.shape)}",
            )
        alike = alike and finest in (-1, prefix) and value.dim() == 2
        finest = max(finest, prefix)
    if alike:
        return [None if value is None else matrix(value) for value in values.values()]
    made: list[torch.Tensor | None] = []
    for value in values.values():
        if value is None:
            made.append(None)
            continue
        prefix = _prefix(value.shape, x.shape) or 0
        value = value.reshape(*x.shape[:prefix], *[1] * (finest - prefix), x.shape[-1])
        made.append(matrix(value.expand(*x.shape[:finest], x.shape[-1])))
    return made


def _prefix(shape: torch.Size, of: torch.Size) -> int | None:
    """How many leading dimensions of x, ``of`` this shape, a modulation has a row for each of; None if it does not fit."""
    if len(shape) == 2 and shape[1] == of[-1] and len(of) > 1:  # as models give them, with less ado
        if shape[0] == 1:
            return 0
        return 1 if shape[0] == of[0] else None
    if len(shape) > 0 and shape[-1] == of[-1]:
        leading = list(shape[:-1])
        while leading and leading[-1] == 1:
            leading.pop()
        if leading == list(of[: len(leading)]) and len(shape) <= len(of):
            return len(leading)
    return None
