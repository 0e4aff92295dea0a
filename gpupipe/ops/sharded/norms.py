"""RMS norms over columns of which each rank has a part: heads that are split, with one norm over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpupipe.errors import ShapeError
from gpupipe.ops import checks
from gpupipe.ops.sharded import cut, is_sharded
from gpupipe.ops.sharded.collectives import copied, summed


def rms_norms(given: Sequence[tuple[torch.Tensor, Any]], eps: float) -> list[torch.Tensor]:
    """Several tensors (..., H / ranks), each normalised over all ranks' columns and times its weight (H,), split by rows.

    Sums of squares, a number a token and tensor, go between ranks together: once forward, once backward. Within it is float32.

    Raises:
        ShapeError: for weights that are split otherwise, or do not fit.
    """
    eps = checks.epsilon(eps)
    cuts = [cut("weight", weight) if is_sharded(weight) else None for _, weight in given]
    for (x, weight), own in zip(given, cuts, strict=True):
        if own is None or own.by != "rows" or own.parts != 1 or own.local.shape != x.shape[-1:]:
            raise ShapeError(
                f"weight {tuple(weight.shape)} of a norm over heads that are split, of which a rank has {x.shape[-1]} columns",
                fix="split it by rows as the heads are",
            )
    first = cuts[0]
    assert first is not None
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x, _ in given]
    squares = [x.square().sum(-1) for x in wide]
    together = copied(summed(torch.cat([value.flatten() for value in squares]), first.group), first.group)
    made = []
    for x, (like, _), own, square, total in zip(
        wide, given, cuts, squares, together.split([value.numel() for value in squares]), strict=True
    ):
        assert own is not None
        mean = total.view(square.shape) / (x.shape[-1] * own.ranks)
        made.append((x * torch.rsqrt(mean + eps)[..., None] * own.local.to(x.dtype)).to(like.dtype))
    return made
