"""Partial sums of persistent programs, added in a fixed order: gradients of what all rows, or many, share."""

from __future__ import annotations

import torch

from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.layout import ceil_div


@jit
def _column_sum(partial_ptr, programs, step, columns, mask, AT_ONCE: tl.constexpr):
    """The sum over programs, in their order."""
    total = tl.zeros((AT_ONCE, columns.shape[0]), tl.float32)
    for at in range(0, programs, AT_ONCE):
        program = at + tl.arange(0, AT_ONCE)
        live = (program < programs)[:, None] & mask[None, :]
        total += tl.load(partial_ptr + program[:, None].to(tl.int64) * step + columns[None, :], mask=live, other=0.0)
    return tl.sum(total, 0)


@jit
def column_sums(
    partial_ptr, weight_ptr, bias_ptr, scale_ptr, dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr, dgate_ptr,
    programs, scale_stride,
    H: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (m, c) finishes ``COLUMNS`` columns of the sums of group m."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < H
    m = tl.program_id(0).to(tl.int64)
    step = (DYN + DY + GATE) * H
    partial_ptr += m * programs * step
    scale = 1.0
    if scale_ptr is not None:
        scale = 1.0 + tl.load(scale_ptr + m * scale_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dyn = tl.zeros((COLUMNS,), tl.float32)
    dy = tl.zeros((COLUMNS,), tl.float32)
    if DYN:
        dyn = _column_sum(partial_ptr, programs, step, columns, mask, AT_ONCE)
        partial_ptr += H
    if DY:
        dy = _column_sum(partial_ptr, programs, step, columns, mask, AT_ONCE)
        partial_ptr += H
    if dweight_ptr is not None:
        tl.store(dweight_ptr + m * H + columns, (dyn * scale).to(dweight_ptr.dtype.element_ty), mask=mask)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + m * H + columns, (dy * scale).to(dbias_ptr.dtype.element_ty), mask=mask)
    if dscale_ptr is not None:
        dscale = dyn
        if weight_ptr is not None:
            dscale = dscale * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            dscale += dy * tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dscale_ptr + m * H + columns, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
    if dshift_ptr is not None:
        tl.store(dshift_ptr + m * H + columns, dy.to(dshift_ptr.dtype.element_ty), mask=mask)
    if GATE:
        gate = _column_sum(partial_ptr, programs, step, columns, mask, AT_ONCE)
        tl.store(dgate_ptr + m * H + columns, gate.to(dgate_ptr.dtype.element_ty), mask=mask)


def add_up(partials: torch.Tensor, into: torch.Tensor, each: int, *, columns: int, at_once: int) -> None:
    """Adds up every ``each`` rows of partial sums (..., C), in their order, to a row of ``into``, which is of any type.

    Args:
        columns: of a program.
        at_once: rows that it adds at a time.
    """
    size = partials.shape[-1]
    launch(
        column_sums, (into.numel() // size, ceil_div(size, columns)),
        partials, None, None, None, into, None, None, None, None, each, 0,
        H=size, COLUMNS=columns, AT_ONCE=at_once, DYN=True, DY=False, GATE=False, num_warps=4,
    )  # fmt: skip
