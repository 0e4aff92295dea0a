"""The kernels of all norms, backward: one persistent pass over the rows, and a small one that adds up what its programs found.

Gradients of weights, scales, shifts and gates are sums over rows. Each program keeps its own in float32, in registers, and
writes them once; a second kernel adds them in a fixed order. So nothing depends on timing, and no atomics are needed.

With n the normalised value, f = weight * (1 + scale) and u = dy * f, the gradient of the sum that was normalised is
(u - mean(u) - n * mean(u * n)) / deviation, without mean(u) for RMS (Ba, Kiros, Hinton 2016; Zhang and Sennrich 2019).
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl, triton
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, row_length, row_starts, rows, stride, wide
from gpupipe.ops.norms.forward import modulation
from gpupipe.ops.norms.tiles import backward_candidates, backward_us
from gpupipe.ops.norms.tiles import programs as sharing
from gpupipe.ops.sums import column_sums


@jit
def _load_part(
    dy_row, sum_row, weight_ptr, scale_row, mean, rstd, live, x_type,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """dy, n and u of one part of some rows."""
    columns = FIRST + tl.arange(0, PART)[None, :]
    mask = live[:, None] & (columns < H)
    dy = wide(dy_row + columns, mask)
    normal = wide(sum_row + columns, mask)
    if mean is not None:
        normal = normal - mean[:, None]
    normal = tl.where(mask, normal * rstd[:, None], 0.0)
    weight, scale = modulation(weight_ptr, scale_row, columns, mask, ROUND, x_type)
    u = dy * scale
    if ROUND:
        u = u.to(x_type).to(tl.float32)
    return dy, normal, u * weight


@jit
def _store_part(
    dy, normal, u, mean_u, mean_un, rstd,
    dsum_row, branch_row, gate_row, dx_row, dbranch_row, weight_ptr, bias_ptr, scale_row, dscale_row, dshift_row, dgate_row,
    seed, threshold, keep_scale, row, live, x_type, dyn_sum, dy_sum, gate_sum,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr, EACH: tl.constexpr,
    DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of one part of some rows, and returns its sums over rows with these rows added."""
    columns = FIRST + tl.arange(0, PART)[None, :]
    mask = live[:, None] & (columns < H)
    gradient = (u - normal * mean_un[:, None]) * rstd[:, None]
    if mean_u is not None:
        gradient = (u - mean_u[:, None] - normal * mean_un[:, None]) * rstd[:, None]
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
            keep = kept(seed, row, FIRST, PART, threshold)
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
def _keep_sums(
    dyn_sum, dy_sum, gate_sum, partial_ptr, H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr,
    DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    columns = FIRST + tl.arange(0, PART)
    mask = columns < H
    if DYN:
        tl.store(partial_ptr + columns, tl.sum(dyn_sum, 0), mask=mask)
        partial_ptr += H
    if DY:
        tl.store(partial_ptr + columns, tl.sum(dy_sum, 0), mask=mask)
        partial_ptr += H
    if GATE:
        tl.store(partial_ptr + columns, tl.sum(gate_sum, 0), mask=mask)


@jit
def norm_backward(
    dy_ptr, dsum_ptr, sum_ptr, branch_ptr, gate_ptr, seed_ptr, weight_ptr, bias_ptr, scale_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dbranch_ptr, dgate_ptr, dscale_ptr, dshift_ptr, partial_ptr,
    group, chunk, inner, dy_outer, dy_inner, dsum_outer, dsum_inner, sum_outer, sum_inner, branch_outer, branch_inner,
    modulation_group, gate_stride, scale_stride, threshold, keep_scale,
    H: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, STAGES: tl.constexpr,
    ROUND: tl.constexpr, EACH: tl.constexpr, DYN: tl.constexpr, DY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (m, p) takes rows ``p * chunk`` and following of the ``group`` rows whose sums are one."""
    x_type = sum_ptr.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * group
    end = tl.minimum(begin + group, begin + (tl.program_id(1) + 1).to(tl.int64) * chunk)
    begin += tl.program_id(1).to(tl.int64) * chunk
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    dyn_a = tl.zeros((ROWS, FIRST), tl.float32)  # sums that nothing is added to cost nothing
    dy_a, gate_a = dyn_a, dyn_a
    if SECOND > 0:
        dyn_b = tl.zeros((ROWS, SECOND), tl.float32)
        dy_b, gate_b = dyn_b, dyn_b

    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = at + tl.arange(0, ROWS)
        live = row < end
        dy_row = row_starts(dy_ptr, row, inner, dy_outer, dy_inner)
        dsum_row = row_starts(dsum_ptr, row, inner, dsum_outer, dsum_inner) if dsum_ptr is not None else None
        sum_row = row_starts(sum_ptr, row, inner, sum_outer, sum_inner)
        branch_row = row_starts(branch_ptr, row, inner, branch_outer, branch_inner) if branch_ptr is not None else None
        gate_row = row_starts(gate_ptr, row, modulation_group, gate_stride, 0) if gate_ptr is not None else None
        scale_row = row_starts(scale_ptr, row, modulation_group, scale_stride, 0) if scale_ptr is not None else None
        dx_row = row_starts(dx_ptr, row, 1, H, 0)
        dbranch_row = row_starts(dbranch_ptr, row, 1, H, 0) if dbranch_ptr is not None else None
        dgate_row = row_starts(dgate_ptr, row, 1, H, 0) if dgate_ptr is not None else None
        dscale_row = row_starts(dscale_ptr, row, 1, H, 0) if dscale_ptr is not None else None
        dshift_row = row_starts(dshift_ptr, row, 1, H, 0) if dshift_ptr is not None else None
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
        mean = None
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row, mask=live, other=0.0)

        dy0, normal0, u0 = _load_part(
            dy_row, sum_row, weight_ptr, scale_row, mean, rstd, live, x_type, H, 0, FIRST, ROUND
        )  # fmt: skip
        sum_un = tl.sum(u0 * normal0, 1)
        if SECOND > 0:
            dy1, normal1, u1 = _load_part(
                dy_row, sum_row, weight_ptr, scale_row, mean, rstd, live, x_type, H, FIRST, SECOND, ROUND
            )  # fmt: skip
            sum_un += tl.sum(u1 * normal1, 1)
        mean_un = sum_un / H
        mean_u = None
        if mean_ptr is not None:
            sum_u = tl.sum(u0, 1)
            if SECOND > 0:
                sum_u += tl.sum(u1, 1)
            mean_u = sum_u / H

        dyn_a, dy_a, gate_a = _store_part(
            dy0, normal0, u0, mean_u, mean_un, rstd, dsum_row, branch_row, gate_row, dx_row, dbranch_row, weight_ptr, bias_ptr,
            scale_row, dscale_row, dshift_row, dgate_row, seed, threshold, keep_scale, row, live, x_type, dyn_a, dy_a, gate_a,
            H, 0, FIRST, ROUND, EACH, DYN, DY, GATE,
        )  # fmt: skip
        if SECOND > 0:
            dyn_b, dy_b, gate_b = _store_part(
                dy1, normal1, u1, mean_u, mean_un, rstd, dsum_row, branch_row, gate_row, dx_row, dbranch_row, weight_ptr,
                bias_ptr, scale_row, dscale_row, dshift_row, dgate_row, seed, threshold, keep_scale, row, live, x_type,
                dyn_b, dy_b, gate_b, H, FIRST, SECOND, ROUND, EACH, DYN, DY, GATE,
            )  # fmt: skip

    if partial_ptr is not None:
        place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        partial_ptr += place * (DYN + DY + GATE) * H
        _keep_sums(dyn_a, dy_a, gate_a, partial_ptr, H, 0, FIRST, DYN, DY, GATE)
        if SECOND > 0:
            _keep_sums(dyn_b, dy_b, gate_b, partial_ptr, H, FIRST, SECOND, DYN, DY, GATE)


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
    dy, dy_outer, dy_inner = rows(dy)
    total, sum_outer, sum_inner = rows(total)
    dsum_outer = dsum_inner = branch_outer = branch_inner = 0
    if dsum is not None:
        dsum, dsum_outer, dsum_inner = rows(dsum)
    if gate is None and seed is None:
        branch = None
    if branch is not None:
        branch, branch_outer, branch_inner = rows(branch)
    threshold, keep_scale = dropping(p)
    gpu = machine(dy.device)
    partials: list[torch.Tensor | None] = [None]

    def run(config: Config) -> None:
        programs = sharing(gpu, config, group, groups)
        partials[0] = torch.empty((groups, programs, kinds, size), dtype=torch.float32, device=dy.device) if kinds else None
        chunk = triton.cdiv(triton.cdiv(group, programs), config["ROWS"]) * config["ROWS"]
        launch(
            norm_backward, (groups, programs),
            dy, dsum, total, branch, gate, seed, weight, bias, scale, None if rms else mean, rstd,
            dx, dbranch, dgate if each else None, dscale if each else None, dshift if each else None, partials[0],
            group, chunk, row_length(total), dy_outer, dy_inner, dsum_outer, dsum_inner, sum_outer, sum_inner,
            branch_outer, branch_inner, 1 if each else group, stride(gate), stride(scale), threshold, keep_scale,
            H=size, ROWS=config["ROWS"], FIRST=config["FIRST"], SECOND=config["SECOND"], STAGES=config["num_stages"],
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
            column_sums, (groups, triton.cdiv(size, _COLUMNS)),
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
