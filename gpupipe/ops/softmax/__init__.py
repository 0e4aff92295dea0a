"""Softmax of attention scores with scale, mask and dropout: one read and one write forward, two reads and one write backward.

Without dropout the probabilities are kept for the backward. With it, the output does not tell them, and to write them too would
be a third pass: the scores are kept instead, with two numbers a row. What was dropped is drawn again, from the seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpupipe.errors import ShapeError
from gpupipe.ops import checks, settings
from gpupipe.ops.dropout import drawn_seed
from gpupipe.ops.layout import MOST_ROWS
from gpupipe.ops.op import Op
from gpupipe.ops.settings import Precision
from gpupipe.ops.softmax.kernels import LARGEST, launch_backward, launch_forward


def scaled_softmax(
    scores: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0, precision: Precision | None = None
) -> torch.Tensor:
    """softmax(scores * scale + mask) over the last dimension.

    Rows in which everything is masked give zeros, as torch's attention does. On the CPU, for float64 and for rows longer than
    16 384 it is plain torch. Gradients repeat bit for bit; second derivatives are not offered.

    Args:
        scores: (..., L), float32, bfloat16, float16 or float64.
        mask: anything that broadcasts to scores: bool (True: takes part) or floating (added). A floating one gets a gradient.
        scale: multiplies the scores.
        precision: see :func:`gpupipe.ops.precision`; ``"conservative"`` rounds after the scale and after the mask.

    Returns:
        Like scores, contiguous.

    Raises:
        ShapeError: when an argument does not fit scores.
    """
    return _softmax("scaled_softmax", scores, mask, scale, 0.0, precision)


def softmax_dropout(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    p: float,
    scale: float = 1.0,
    training: bool = True,
    precision: Precision | None = None,
) -> torch.Tensor:
    """dropout(softmax(scores * scale + mask)) over the last dimension.

    Which elements are dropped comes from torch's generator of the device, so it repeats under ``torch.manual_seed`` and in a
    recomputed checkpoint, and changes with each replay of a CUDA graph.

    Args:
        scores, mask, scale, precision: as in :func:`scaled_softmax`.
        p: the share that is dropped, 0 to 1, rounded to 1/65536 by the kernel; the rest is divided by 1 - p, so rounded.
        training: False: nothing is dropped.

    Returns:
        Like scores, contiguous.

    Raises:
        ShapeError: when an argument does not fit scores.
        ConfigError: for a ``p`` that is no share.
    """
    checks.share(p)
    return _softmax("softmax_dropout", scores, mask, scale, p if training else 0.0, precision)


def _softmax(
    name: str, scores: torch.Tensor, mask: torch.Tensor | None, scale: float, p: float, precision: Precision | None
) -> torch.Tensor:
    checks.floating("scores", scores)
    if scores.dim() == 0:
        raise checks.refuse("scores", scores, "(..., L)")
    if mask is not None:
        _fits(mask, scores)
    conservative = settings.mode(precision) == "conservative"
    columns = scores.shape[-1]
    if not settings.kernel_runs(name, scores) or columns > LARGEST or scores.numel() >= MOST_ROWS * max(columns, 1):
        return reference(scores, mask, scale, p, conservative)
    seed = drawn_seed(scores.device) if p > 0 else None
    return softmax_op(scores, mask, scale, seed, p, conservative)[0]  # type: ignore[no-any-return]


def _fits(mask: torch.Tensor, scores: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        checks.floating("mask", mask)
    if mask.device != scores.device:
        raise checks.refuse("mask", mask, f"on {scores.device}, where scores is")
    within = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or any(size not in (1, whole) for size, whole in within):
        raise ShapeError(
            f"mask is {checks.said(mask)}, which does not broadcast to scores {tuple(scores.shape)}",
            fix="each of its dimensions, from the last one on, must be 1 or as in scores",
        )


def reference(scores: torch.Tensor, mask: torch.Tensor | None, scale: float, p: float, conservative: bool) -> torch.Tensor:
    """The same in plain torch; differentiable."""
    narrow = scores.dtype
    wide = torch.promote_types(narrow, torch.float32)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(narrow).to(wide) if conservative else value

    z = rounded(scores.to(wide) * scale)
    if mask is not None and mask.dtype == torch.bool:
        z = z.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        z = rounded(z + mask.to(wide))
    nothing = (z == -torch.inf).all(-1, keepdim=True)
    y = rounded(functional.softmax(z.masked_fill(nothing, 0), -1).masked_fill(nothing, 0))
    return (functional.dropout(y, p) if p > 0 else y).to(narrow).contiguous()


def _fake(
    scores: torch.Tensor, mask: torch.Tensor | None, scale: float, seed: torch.Tensor | None, p: float, conservative: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = scores.shape[:-1] if seed is not None else (0,)
    return (
        scores.new_empty(scores.shape),
        scores.new_empty(stats, dtype=torch.float32),
        scores.new_empty(stats, dtype=torch.float32),
    )


def _backward_fake(
    dy: torch.Tensor,
    y: torch.Tensor | None,
    scores: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    seed: torch.Tensor | None,
    p: float,
    top: torch.Tensor,
    inverse: torch.Tensor,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = dy.new_empty(dy.shape if needs[0] else 0)
    return dx, dy.new_empty(0) if mask is None or not needs[1] else mask.new_empty(dy.shape)


softmax_backward_op = Op("softmax_backward", launch_backward, _backward_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    scores, mask, scale, seed, p, conservative = inputs
    y, top, inverse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(top, inverse)
    trained = mask is not None and mask.dtype != torch.bool and ctx.needs_input_grad[1]
    again = seed is not None  # the backward works the probabilities out again
    ctx.save_for_backward(
        None if again else y, scores if again else None, mask if again or trained else None, seed, top, inverse
    )
    ctx.rest = scale, p, conservative


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    y, scores, mask, seed, top, inverse = ctx.saved_tensors
    scale, p, conservative = ctx.rest
    needs = list(ctx.needs_input_grad[:2])
    dx, dmask = softmax_backward_op(dy, y, scores, mask, scale, seed, p, top, inverse, conservative, needs)
    return dx if needs[0] else None, dmask.sum_to_size(mask.shape) if needs[1] else None, None, None, None, None


softmax_op = Op("softmax", launch_forward, _fake, _setup, _backward)
