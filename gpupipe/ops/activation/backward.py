"""The gradient of that pass, in one pass: of the pre-activation element by element, of bias and gate as sums over rows.

Each program keeps the sums of its rows in float32, in registers, and writes them once; a second kernel adds them in a fixed
order. The activation itself may be written as well, for a product that needs it and did not keep it. All modes of precision
keep float32 within.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops import activations
from gpupipe.ops.activation.forward import pre_activation
from gpupipe.ops.activation.tiles import backward_candidates, backward_us
from gpupipe.ops.activation.tiles import programs as sharing
from gpupipe.ops.activations import curve
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, ceil_div, inner_rows, row_starts, rows, stride, wide
from gpupipe.ops.sums import add_up


@jit
def act_backward(
    dy_ptr, x_ptr, bias_ptr, gate_ptr, seed_ptr, dx_ptr, act_ptr, dgate_ptr, bias_sum_ptr, gate_sum_ptr,
    group, chunk, programs, inner, dy_outer, dy_inner, x_outer, x_inner, gate_stride, threshold, keep_scale,
    C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr,
    ROUND: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Program ((m * programs) + p) * across + c takes chunk p of the rows of group m, and tile c of the columns."""
    across: tl.constexpr = (C + COLS - 1) // COLS
    first = (tl.program_id(0) % across) * COLS
    place = tl.program_id(0) // across
    m = place // programs
    begin = m * group + (place % programs) * chunk
    end = tl.minimum(begin + chunk, (m + 1) * group)
    columns = first + tl.arange(0, COLS)[None, :]
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    gate = None
    if gate_ptr is not None and not EACH:
        gate = wide(gate_ptr + m.to(tl.int64) * gate_stride + columns, columns < C)
    bias_sum, other_sum, gate_sum = None, None, None
    if bias_sum_ptr is not None:
        bias_sum = tl.zeros((ROWS, COLS), tl.float32)
        if GLU:
            other_sum = tl.zeros((ROWS, COLS), tl.float32)
    if gate_sum_ptr is not None:
        gate_sum = tl.zeros((ROWS, COLS), tl.float32)

    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (columns < C)
        flat = row.to(tl.int64)[:, None] * C + columns
        dy = wide(row_starts(dy_ptr, row, inner, dy_outer, dy_inner) + columns, mask)
        value, slope, x, factor, factor_slope = None, None, None, None, None
        if x_ptr is not None:
            x_row = row_starts(x_ptr, row, inner, x_outer, x_inner)
            x = pre_activation(x_row, bias_ptr, columns, mask, ROUND)
            if GLU:
                factor, factor_slope = curve(pre_activation(x_row, bias_ptr, C + columns, mask, ROUND), ACT)
                if ROUND:
                    factor = factor.to(x_ptr.dtype.element_ty).to(tl.float32)
                value = x * factor
            else:
                value, slope = curve(x, ACT)
            if act_ptr is not None:
                tl.store(act_ptr + flat, value.to(act_ptr.dtype.element_ty), mask=mask)
        keep = None
        if seed is not None:
            keep = kept(seed, row, first, COLS, threshold)
        if dgate_ptr is not None or gate_sum_ptr is not None:
            dgate = dy * value
            if keep is not None:
                dgate = tl.where(keep, dgate * keep_scale, 0.0)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + flat, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
            if gate_sum_ptr is not None:
                gate_sum += tl.where(mask, dgate, 0.0)
        if EACH:
            dy = dy * wide(gate_ptr + row.to(tl.int64)[:, None] * gate_stride + columns, mask)
        elif gate is not None:
            dy = dy * gate
        if keep is not None:
            dy = tl.where(keep, dy * keep_scale, 0.0)
        if GLU:
            dother = dy * x * factor_slope
            dy = dy * factor
            dx_row = dx_ptr + (row.to(tl.int64) * (2 * C))[:, None]
            if other_sum is not None:
                other_sum += tl.where(mask, dother, 0.0)
            tl.store(dx_row + columns, dy.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.store(dx_row + C + columns, dother.to(dx_ptr.dtype.element_ty), mask=mask)
        else:
            if ACT != "none":
                dy = dy * slope
            if dx_ptr is not None:
                tl.store(dx_ptr + flat, dy.to(dx_ptr.dtype.element_ty), mask=mask)
        if bias_sum is not None:
            bias_sum += tl.where(mask, dy, 0.0)

    column = first + tl.arange(0, COLS)
    inside = column < C
    if bias_sum is not None:
        row_start = bias_sum_ptr + place.to(tl.int64) * (C + GLU * C)
        tl.store(row_start + column, tl.sum(bias_sum, 0), mask=inside)
        if other_sum is not None:
            tl.store(row_start + C + column, tl.sum(other_sum, 0), mask=inside)
    if gate_sum is not None:
        tl.store(gate_sum_ptr + place.to(tl.int64) * C + column, tl.sum(gate_sum, 0), mask=inside)


_COLUMNS = 64
_AT_ONCE = 32


def launch_act_backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    x_type: torch.dtype,
    conservative: bool,
    *,
    want_x: bool = True,
    like_bias: torch.Tensor | None = None,
    want_gate: bool = False,
    want_act: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x + bias, of bias and of gate, and the activation; None for what is not wanted.

    Args:
        x: what went in; it may be None without an activation, when the gate's gradient is not wanted.
        gate: (M, C).
        x_type: of x's gradient.
        like_bias: of the bias' gradient, shape and type; the bias itself may have been added elsewhere.
        want_x: False only without GLU.
    """
    code, glu = activations.split(act)
    size = dy.shape[-1]
    count = dy.numel() // size
    dx = torch.empty((*dy.shape[:-1], size * (1 + glu)), dtype=x_type, device=dy.device) if want_x else None
    activated = torch.empty(dy.shape, dtype=x_type, device=dy.device) if want_act else None
    want_gate = want_gate and gate is not None
    if count == 0:
        empty = [None if like is None else torch.zeros_like(like) for like in (like_bias, gate if want_gate else None)]
        return dx, empty[0], empty[1], activated
    groups = 1 if gate is None else gate.shape[0]
    each = 1 < groups == count
    groups = 1 if each else groups
    group = count // groups
    dgate = None
    if want_gate and each and gate is not None:
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=dy.device)
    bias = None if bias is None else bias.contiguous()
    steps = [rows(dy)]
    if x is not None:
        steps.append(rows(x))
    inner = inner_rows(*steps)
    dy, dy_outer, dy_inner = steps[0]
    x, x_outer, x_inner = (None, 0, 0) if x is None else steps[1]
    threshold, keep_scale = dropping(p)
    gpu = machine(dy.device)
    sums: list[torch.Tensor | None] = [None, None]
    kept_sums = (1 + glu) * (like_bias is not None) + (want_gate and not each)

    def run(config: Config) -> None:
        programs = sharing(gpu, config, size, group, groups)
        wide_sums = {"dtype": torch.float32, "device": dy.device}
        if like_bias is not None:
            sums[0] = torch.empty((1, groups * programs, size * (1 + glu)), **wide_sums)  # type: ignore[call-overload]
        if want_gate and not each:
            sums[1] = torch.empty((groups, programs, size), **wide_sums)  # type: ignore[call-overload]
        chunk = ceil_div(ceil_div(group, programs), config["ROWS"]) * config["ROWS"]
        launch(
            act_backward, (groups * programs * ceil_div(size, config["COLS"]),),
            dy, x, bias, gate, seed, dx, activated, dgate, sums[0], sums[1],
            group, chunk, programs, inner, dy_outer, dy_inner, x_outer, x_inner, stride(gate), threshold, keep_scale,
            C=size, ROWS=config["ROWS"], COLS=config["COLS"], STAGES=config["num_stages"], ACT=code, GLU=glu,
            ROUND=conservative, EACH=each, num_warps=config["num_warps"],
        )  # fmt: skip

    reads = 1 + (x is not None) * (1 + glu) + each
    writes = want_x * (1 + glu) + want_act + (dgate is not None)
    row_bytes = size * (dy.element_size() + (reads - 1 + writes) * x_type.itemsize)
    held = 2 * (seed is not None) + (code != "none") + (gate is not None)
    key = (
        str(dy.dtype), str(x_type), size, bucket(group), bucket(groups), act, reads, writes, kept_sums, seed is not None,
        gate is not None, inner is None,
    )  # fmt: skip
    config = choose(
        "act_backward", key, dy.device,
        lambda: backward_candidates(gpu, size, group, groups, kept_sums > 0),
        lambda config: backward_us(gpu, config, group, groups, size, row_bytes, reads, writes, kept_sums, held),
        run,
    )  # fmt: skip
    run(config)
    if sums[1] is not None and gate is not None:
        dgate = _added(sums[1], gate)
    return dx, None if sums[0] is None or like_bias is None else _added(sums[0], like_bias), dgate, activated


def _added(partials: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Partial sums (M, programs, C) as their sum, in the shape and type of ``like``."""
    total = torch.empty(like.shape, dtype=like.dtype, device=partials.device)
    add_up(partials, total, partials.shape[1], columns=_COLUMNS, at_once=_AT_ONCE)
    return total
