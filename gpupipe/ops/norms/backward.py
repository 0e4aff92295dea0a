"""The kernels of all norms, backward: one persistent pass over the rows, and a small one that adds up what its programs found.

Gradients of weights, scales, shifts and gates are sums over rows. Each program keeps its own in float32, in registers, and
writes them once; a second kernel adds them in a fixed order. So nothing depends on timing, and no atomics are needed.

With n the normalised value, f = weight * (1 + scale) and u = dy * f, the gradient of the sum that was normalised is
(u - mean(u) - n * mean(u * n)) / deviation, without mean(u) for RMS (Ba, Kiros, Hinton 2016; Zhang and Sennrich 2019).
"""

# mypy: disable-error-code="assignment"
# Kernels make tuples of tiles longer one by one.

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, ceil_div, inner_rows, row_starts, rows, stride, there, wide
from gpupipe.ops.norms.forward import modulation
from gpupipe.ops.norms.tiles import backward_candidates, backward_us
from gpupipe.ops.norms.tiles import programs as sharing
from gpupipe.ops.sums import column_sums


@jit
def _both(a, b, c, d):
    """Two sums at once wait for each other's warps once."""
    return a + c, b + d


@jit
def _of_all_rows(weight_ptr, scale_row, x_type, H: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr):
    """Weights and scales, by part, that serve all rows of a program and stay in its registers."""
    weights, scales = (), ()
    for part in tl.static_range(PARTS):
        columns = part * WIDTH + tl.arange(0, WIDTH)[None, :]
        weight, scale = modulation(weight_ptr, scale_row, columns, columns < H, ROUND, x_type)
        weights += (weight,)
        scales += (scale,)
    return weights, scales


@jit
def _store(
    dy, normal, gradient, dsum_row, branch_row, gate_row, dx_row, dbranch_row, weight_ptr, bias_ptr, scale_row, dscale_row,
    dshift_row, dgate_row, seed, threshold, keep_scale, row, mask, x_type, dyn_sum, dy_sum, gate_sum,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr, EACH: tl.constexpr,
    DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one part of some rows, and returns its sums over rows with these rows added."""
    columns = FIRST + tl.arange(0, WIDTH)[None, :]
    if dsum_row is not None:
        if ROUND:
            gradient = gradient.to(x_type).to(tl.float32)
        gradient += wide(dsum_row + columns, mask)
    tl.store(dx_row + columns, gradient.to(x_type), mask=mask)
    if ROUND:
        gradient = gradient.to(x_type).to(tl.float32)

    if branch_row is not None:
        keep = None
        if seed is not None:
            keep = kept(seed, row, FIRST, WIDTH, threshold)
        dbranch = gradient
        if gate_row is not None:
            dbranch = gradient * wide(gate_row + columns, mask)
        if keep is not None:
            dbranch = tl.where(keep, dbranch * keep_scale, 0.0)
        if dbranch_row is not None:
            tl.store(dbranch_row + columns, dbranch.to(branch_row.dtype.element_ty), mask=mask)
        if gate_row is not None:
            branch = wide(branch_row + columns, mask)
            if keep is not None:
                branch = tl.where(keep, branch * keep_scale, 0.0)
            if dgate_row is not None:
                tl.store(dgate_row + columns, (gradient * branch).to(dgate_row.dtype.element_ty), mask=mask)
            if GATE:
                gate_sum += tl.where(mask, gradient * branch, 0.0)

    if dscale_row is not None:
        value = normal
        if weight_ptr is not None:
            value = value * wide(weight_ptr + columns, mask)
        if bias_ptr is not None:
            value += wide(bias_ptr + columns, mask)
        tl.store(dscale_row + columns, (dy * value).to(dscale_row.dtype.element_ty), mask=mask)
    if dshift_row is not None:
        tl.store(dshift_row + columns, dy.to(dshift_row.dtype.element_ty), mask=mask)
    if EACH and scale_row is not None:  # every row has its own scale: what is summed is the gradient of what that multiplies
        dy = dy * (1.0 + wide(scale_row + columns, mask))
    if DYN:
        dyn_sum += dy * normal
    if DY:
        dy_sum += dy
    return dyn_sum, dy_sum, gate_sum


@jit
def norm_backward(
    dy_ptr, dsum_ptr, sum_ptr, branch_ptr, gate_ptr, seed_ptr, weight_ptr, bias_ptr, scale_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dbranch_ptr, dgate_ptr, dscale_ptr, dshift_ptr, partial_ptr,
    group, chunk, inner, dy_outer, dy_inner, dsum_outer, dsum_inner, sum_outer, sum_inner, branch_outer, branch_inner,
    gate_stride, scale_stride, threshold, keep_scale,
    H: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    ROUND: tl.constexpr, EACH: tl.constexpr, DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (m, p) takes rows ``p * chunk`` and following of the ``group`` rows whose sums are one."""
    x_type = sum_ptr.dtype.element_ty
    begin = tl.program_id(0) * group
    end = tl.minimum(begin + group, begin + (tl.program_id(1) + 1) * chunk)
    begin += tl.program_id(1) * chunk
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    nothing = tl.zeros((ROWS, WIDTH), tl.float32)  # sums that nothing is added to cost nothing
    dyn_sums, dy_sums, gate_sums = (), (), ()
    for _ in tl.static_range(PARTS):
        dyn_sums += (nothing,)
        dy_sums += (nothing,)
        gate_sums += (nothing,)
    at_group = tl.program_id(0).to(tl.int64)
    of_all = scale_ptr + at_group * scale_stride if scale_ptr is not None and not EACH else None
    weights, scales = _of_all_rows(weight_ptr, of_all, x_type, H, PARTS, WIDTH, ROUND)

    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)
        live = row < end
        of_group = row.to(tl.int64)[:, None] if EACH else at_group
        dense = row.to(tl.int64)[:, None] * H
        dy_row = row_starts(dy_ptr, row, inner, dy_outer, dy_inner)
        dsum_row = row_starts(dsum_ptr, row, inner, dsum_outer, dsum_inner) if dsum_ptr is not None else None
        sum_row = row_starts(sum_ptr, row, inner, sum_outer, sum_inner)
        branch_row = row_starts(branch_ptr, row, inner, branch_outer, branch_inner) if branch_ptr is not None else None
        gate_row = gate_ptr + of_group * gate_stride if gate_ptr is not None else None
        scale_row = scale_ptr + of_group * scale_stride if scale_ptr is not None and EACH else None
        dbranch_row = dbranch_ptr + dense if dbranch_ptr is not None else None
        dgate_row = dgate_ptr + dense if dgate_ptr is not None else None
        dscale_row = dscale_ptr + dense if dscale_ptr is not None else None
        dshift_row = dshift_ptr + dense if dshift_ptr is not None else None
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
        mean = None
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=live, other=0.0)

        # dy and u are 0 where there is nothing; the normalised values need not be.
        dys, normals, us = (), (), ()
        sum_un = tl.zeros((ROWS, WIDTH), tl.float32)
        sum_u = tl.zeros((ROWS, WIDTH), tl.float32)
        for part in tl.static_range(PARTS):
            columns = part * WIDTH + tl.arange(0, WIDTH)[None, :]
            mask = there(live, H, part * WIDTH, WIDTH)
            dy = wide(dy_row + columns, mask)
            normal = wide(sum_row + columns, mask)
            if mean is not None:
                normal = normal - mean[:, None]
            normal = normal * rstd[:, None]
            if scale_row is not None:
                weight, scale = modulation(weight_ptr, scale_row, columns, mask, ROUND, x_type)
            else:
                weight, scale = weights[part], scales[part]
            u = dy * scale
            if ROUND:
                u = u.to(x_type).to(tl.float32)
            u = u * weight
            sum_un += u * normal
            sum_u += u
            dys += (dy,)
            normals += (normal,)
            us += (u,)
        if mean is not None:
            mean_un, mean_u = tl.reduce((sum_un, sum_u), 1, _both)
        else:
            mean_un = tl.sum(sum_un, 1)
        mean_un = (mean_un * rstd / H)[:, None]
        if mean is not None:
            mean_u = (mean_u * rstd / H)[:, None]

        new_dyn, new_dy, new_gate = (), (), ()
        for part in tl.static_range(PARTS):
            mask = there(live, H, part * WIDTH, WIDTH)
            off = normals[part] * mean_un
            if mean is not None:
                off += mean_u
            dyn_sum, dy_sum, gate_sum = _store(
                dys[part], normals[part], us[part] * rstd[:, None] - off, dsum_row, branch_row, gate_row, dx_ptr + dense,
                dbranch_row, weight_ptr, bias_ptr, scale_row, dscale_row, dshift_row, dgate_row, seed, threshold, keep_scale,
                row, mask, x_type, dyn_sums[part], dy_sums[part], gate_sums[part],
                part * WIDTH, WIDTH, ROUND, EACH, DYN, DY, GATE,
            )  # fmt: skip
            new_dyn += (dyn_sum,)
            new_dy += (dy_sum,)
            new_gate += (gate_sum,)
        dyn_sums, dy_sums, gate_sums = new_dyn, new_dy, new_gate

    if partial_ptr is not None:
        place = at_group * tl.num_programs(1) + tl.program_id(1)
        partial_ptr += place * (DYN + DY + GATE) * H
        for part in tl.static_range(PARTS):
            columns = part * WIDTH + tl.arange(0, WIDTH)
            mask = columns < H
            if DYN:
                tl.store(partial_ptr + columns, tl.sum(dyn_sums[part], 0), mask=mask)
            if DY:
                tl.store(partial_ptr + DYN * H + columns, tl.sum(dy_sums[part], 0), mask=mask)
            if GATE:
                tl.store(partial_ptr + (DYN + DY) * H + columns, tl.sum(gate_sums[part], 0), mask=mask)


_COLUMNS = 64
"""Columns of a program that adds partial sums: so few, that several programs share the work at usual hidden sizes."""
_AT_ONCE = 32


def launch_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rms: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, branch, gate, weight, bias, scale and shift; empty where ``needs`` (in that order) says so.

    That of branch is empty too where it equals that of x. ``total`` is what was normalised.
    """
    size = total.shape[-1]
    count = total.numel() // size
    modulations = [value for value in (gate, scale, shift) if value is not None]
    groups = modulations[0].shape[0] if modulations else 1
    each = 1 < groups == count
    _, need_branch, need_gate, need_weight, need_bias, need_scale, need_shift = needs
    need_branch = need_branch and branch is not None and (gate is not None or seed is not None)

    def like(value: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
        return torch.empty(value.shape, dtype=value.dtype, device=dy.device) if needed and value is not None else None

    dx = torch.empty(total.shape, dtype=total.dtype, device=dy.device)
    dbranch, dgate, dscale, dshift = (
        like(branch, need_branch), like(gate, need_gate), like(scale, need_scale), like(shift, need_shift)
    )  # fmt: skip
    dweight, dbias = like(weight, need_weight), like(bias, need_bias)
    if count == 0:
        given = (dbranch, dgate, dweight, dbias, dscale, dshift)
        return _given(dx, *(value if value is None else value.zero_() for value in given))
    sums = {
        "DYN": dweight is not None or (dscale is not None and not each),
        "DY": dbias is not None or (not each and (dshift is not None or (dscale is not None and bias is not None))),
        "GATE": dgate is not None and not each,
    }
    kinds = sum(sums.values())
    groups = 1 if each else groups
    group = count // groups
    weight, bias = (None if value is None else value.contiguous() for value in (weight, bias))
    of_dy = dy, dy_outer, dy_inner = rows(dy)
    of_total = total, sum_outer, sum_inner = rows(total)
    of_dsum, of_branch = of_dy, of_dy
    if dsum is not None:
        of_dsum = dsum, *_ = rows(dsum)
    if gate is None and seed is None:
        branch = None
    if branch is not None:
        of_branch = branch, *_ = rows(branch)
    inner = inner_rows(of_dy, of_total, of_dsum, of_branch)
    threshold, keep_scale = dropping(p)
    gpu = machine(dy.device)
    partials: list[torch.Tensor | None] = [None]

    def run(config: Config) -> None:
        programs = sharing(gpu, config, group, groups)
        partials[0] = torch.empty((groups, programs, kinds, size), dtype=torch.float32, device=dy.device) if kinds else None
        chunk = ceil_div(ceil_div(group, programs), config["ROWS"]) * config["ROWS"]
        launch(
            norm_backward, (groups, programs),
            dy, dsum, total, branch, gate, seed, weight, bias, scale, None if rms else mean, rstd,
            dx, dbranch, dgate if each else None, dscale if each else None, dshift if each else None, partials[0],
            group, chunk, inner, dy_outer, dy_inner, *of_dsum[1:], sum_outer, sum_inner, *of_branch[1:],
            stride(gate), stride(scale), threshold, keep_scale,
            H=size, ROWS=config["ROWS"], PARTS=config["PARTS"], WIDTH=config["WIDTH"], STAGES=config["num_stages"],
            ROUND=conservative, EACH=each, **sums, num_warps=config["num_warps"],
        )  # fmt: skip

    passes = 3 + (dsum is not None) + (branch is not None) + (dbranch is not None) + each * (len(modulations) + 1)
    key = (
        str(total.dtype),
        size,
        bucket(group),
        bucket(groups),
        passes,
        seed is not None,
        scale is not None,
        rms,
        *sums.values(),
    )
    config = choose(
        "norm_backward", key, dy.device,
        lambda: backward_candidates(gpu, size, group, groups),
        lambda config: backward_us(gpu, config, group, groups, size, total.element_size(), passes, kinds),
        run,
    )  # fmt: skip
    run(config)
    if kinds:
        alone = groups == 1
        each_weight, each_bias = (
            value if value is None or alone else torch.empty((groups, size), dtype=torch.float32, device=dy.device)
            for value in (dweight, dbias)
        )
        launch(
            column_sums, (groups, ceil_div(size, _COLUMNS)),
            partials[0], weight, bias, None if each else scale, each_weight, each_bias,
            None if each else dscale, None if each else dshift, None if each else dgate,
            sharing(gpu, config, group, groups), stride(scale), H=size, COLUMNS=_COLUMNS, AT_ONCE=_AT_ONCE, **sums, num_warps=4,
        )  # fmt: skip
        if not alone:
            dweight = None if each_weight is None or weight is None else each_weight.sum(0).to(weight.dtype)
            dbias = None if each_bias is None or bias is None else each_bias.sum(0).to(bias.dtype)
    return _given(dx, dbranch, dgate, dweight, dbias, dscale, dshift)


def _given(
    dx: torch.Tensor, *gradients: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An op returns tensors only: empty ones stand for those that nobody asked for."""
    return (dx, *(dx.new_empty(0) if value is None else value for value in gradients))  # type: ignore[return-value]
