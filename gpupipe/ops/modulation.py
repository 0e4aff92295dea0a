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
    prefixes = {name: _prefix(name, value, x) for name, value in values.items() if value is not None}
    finest = max(prefixes.values())
    made: list[torch.Tensor | None] = []
    for name, value in values.items():
        if value is None:
            made.append(None)
        elif prefixes[name] == finest and value.dim() == 2:
            made.append(matrix(value))
        else:
            leading = x.shape[:finest]
            value = value.reshape(*x.shape[: prefixes[name]], *[1] * (finest - prefixes[name]), x.shape[-1])
            made.append(matrix(value.expand(*leading, x.shape[-1])))
    return made


def _prefix(name: str, value: torch.Tensor, x: torch.Tensor) -> int:
    """How many of x's leading dimensions a modulation has a row for each of."""
    checks.floating(name, value, like=x)
    if value.dim() > 0 and value.shape[-1] == x.shape[-1]:
        leading = list(value.shape[:-1])
        while leading and leading[-1] == 1:
            leading.pop()
        if leading == list(x.shape[: len(leading)]) and value.dim() <= x.dim():
            return len(leading)
    raise ShapeError(
        f"{name} is {checks.said(value)}, which does not fit x {tuple(x.shape)}",
        fix=f"{name} must be ({x.shape[-1]},), one row for each of x's first dimensions such as "
        f"{(*x.shape[:1], x.shape[-1])}, or {tuple(x.shape)}",
    )
