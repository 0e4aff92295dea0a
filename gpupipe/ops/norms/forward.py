"""The kernel of all norms, forward: one read of each input, one write of each output, the row held in registers between.

A row is cut in two parts, the largest power of two that fits and what is left, so that hidden sizes such as 3072 or 1152 waste
no lanes. Statistics take two passes over the registers, in float32: first the mean, then the squares about it.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl, triton
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, row_length, row_starts, rows, stride, wide
from gpupipe.ops.norms.tiles import forward_candidates, forward_us


@jit
def add_branch(x, branch, gate, keep, keep_scale, x_type, branch_type, ROUND: tl.constexpr):
    """x + gate * dropout(branch), in float32, rounded as the sum is stored."""
    if keep is not None:
        branch = tl.where(keep, branch * keep_scale, 0.0)
        if ROUND:
            branch = branch.to(branch_type).to(tl.float32)
    if gate is not None:
        branch = branch * gate
        if ROUND:
            branch = branch.to(x_type).to(tl.float32)
    return (x + branch).to(x_type).to(tl.float32)


@jit
def modulation(weight_ptr, scale_row, columns, mask, ROUND: tl.constexpr, x_type):
    """What the normalised value is multiplied by: weight and 1 + scale, each 1 where it is not there."""
    weight = 1.0
    if weight_ptr is not None:
        weight = wide(weight_ptr + columns, mask)
    scale = 1.0
    if scale_row is not None:
        scale = 1.0 + wide(scale_row + columns, mask)
        if ROUND:
            scale = scale.to(x_type).to(tl.float32)
    return weight, scale


@jit
def _sum_part(
    x_row, branch_row, gate_row, sum_row, seed, threshold, keep_scale, row, live, x_type,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    columns = FIRST + tl.arange(0, PART)[None, :]
    mask = live[:, None] & (columns < H)
    x = wide(x_row + columns, mask)
    if branch_row is not None:
        gate = None
        if gate_row is not None:
            gate = wide(gate_row + columns, mask)
        keep = None
        if seed is not None:
            keep = kept(seed, row, FIRST, PART, threshold)
        branch_type = branch_row.dtype.element_ty
        x = add_branch(x, wide(branch_row + columns, mask), gate, keep, keep_scale, x_type, branch_type, ROUND)
        tl.store(sum_row + columns, x.to(x_type), mask=mask)
    return x


@jit
def _store_part(
    normal, y_row, weight_ptr, bias_ptr, scale_row, shift_row, live, y_type,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    columns = FIRST + tl.arange(0, PART)[None, :]
    mask = live[:, None] & (columns < H)
    weight, scale = modulation(weight_ptr, scale_row, columns, mask, ROUND, y_type)
    y = normal * weight
    if bias_ptr is not None:
        if ROUND and RMS:
            y = y.to(y_type).to(tl.float32)  # torch has no bias in its RMS norm: there it is an addition of its own
        y += wide(bias_ptr + columns, mask)
    if scale_row is not None:
        if ROUND:
            y = y.to(y_type).to(tl.float32)
        y *= scale
    if shift_row is not None:
        if ROUND:
            y = y.to(y_type).to(tl.float32)
        y += wide(shift_row + columns, mask)
    tl.store(y_row + columns, y.to(y_type), mask=mask)


@jit
def norm_forward(
    x_ptr, branch_ptr, gate_ptr, seed_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    count, inner, group, x_outer, x_inner, branch_outer, branch_inner, gate_stride, scale_stride, shift_stride,
    threshold, keep_scale, eps,
    H: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROUND: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    x_row = row_starts(x_ptr, row, inner, x_outer, x_inner)
    branch_row = row_starts(branch_ptr, row, inner, branch_outer, branch_inner) if branch_ptr is not None else None
    gate_row = row_starts(gate_ptr, row, group, gate_stride, 0) if gate_ptr is not None else None
    scale_row = row_starts(scale_ptr, row, group, scale_stride, 0) if scale_ptr is not None else None
    shift_row = row_starts(shift_ptr, row, group, shift_stride, 0) if shift_ptr is not None else None
    sum_row = row_starts(sum_ptr, row, 1, H, 0) if sum_ptr is not None else None
    y_row = row_starts(y_ptr, row, 1, H, 0)
    x_type = x_ptr.dtype.element_ty
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)

    a = _sum_part(
        x_row, branch_row, gate_row, sum_row, seed, threshold, keep_scale, row, live, x_type, H, 0, FIRST, ROUND
    )  # fmt: skip
    total = tl.sum(a, 1)
    b = a
    if SECOND > 0:
        b = _sum_part(
            x_row, branch_row, gate_row, sum_row, seed, threshold, keep_scale, row, live, x_type, H, FIRST, SECOND, ROUND
        )  # fmt: skip
        total += tl.sum(b, 1)

    if RMS:
        squares = tl.sum(a * a, 1)
        if SECOND > 0:
            squares += tl.sum(b * b, 1)
    else:
        mean = total / H
        a = tl.where(tl.arange(0, FIRST)[None, :] < H, a - mean[:, None], 0.0)
        squares = tl.sum(a * a, 1)
        if SECOND > 0:
            b = tl.where(FIRST + tl.arange(0, SECOND)[None, :] < H, b - mean[:, None], 0.0)
            squares += tl.sum(b * b, 1)
        tl.store(mean_ptr + row, mean, mask=live)
    rstd = tl.rsqrt(squares / H + eps)
    tl.store(rstd_ptr + row, rstd, mask=live)

    _store_part(
        a * rstd[:, None], y_row, weight_ptr, bias_ptr, scale_row, shift_row, live, x_type, H, 0, FIRST, ROUND, RMS
    )  # fmt: skip
    if SECOND > 0:
        _store_part(
            b * rstd[:, None], y_row, weight_ptr, bias_ptr, scale_row, shift_row, live, x_type, H, FIRST, SECOND, ROUND, RMS
        )  # fmt: skip


def launch_forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    rms: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised rows, the sum (empty without ``branch``), mean (empty for RMS) and 1 / deviation of each row."""
    size = x.shape[-1]
    count = x.numel() // size
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y.new_empty(x.shape if branch is not None else (0,))
    mean = torch.empty(0 if rms else count, dtype=torch.float32, device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    if count == 0:
        return y, total, mean, rstd
    weight, bias = (None if value is None else value.contiguous() for value in (weight, bias))
    x, x_outer, x_inner = rows(x)
    branch_outer = branch_inner = 0
    if branch is not None:
        branch, branch_outer, branch_inner = rows(branch)
    group = count // per_group.shape[0] if (per_group := _first(scale, shift, gate)) is not None else 1
    threshold, keep_scale = dropping(p)

    def run(config: Config) -> None:
        launch(
            norm_forward, (triton.cdiv(count, config["ROWS"]),),
            x, branch, gate, seed, weight, bias, scale, shift, y, None if branch is None else total, mean, rstd,
            count, row_length(x), group, x_outer, x_inner, branch_outer, branch_inner,
            stride(gate), stride(scale), stride(shift), threshold, keep_scale, eps,
            H=size, ROUND=conservative, RMS=rms, **config,
        )  # fmt: skip

    passes = 2 if branch is None else 4
    modulations = sum(value is not None for value in (gate, scale, shift))
    key = (str(x.dtype), size, bucket(count), passes, modulations, seed is not None, rms)
    run(
        choose(
            "norm_forward", key, x.device,
            lambda: forward_candidates(size),
            lambda config: forward_us(machine(x.device), config, count, size, x.element_size(), passes, modulations),
            run,
        )
    )  # fmt: skip
    return y, total, mean, rstd


def _first(*values: torch.Tensor | None) -> torch.Tensor | None:
    return next((value for value in values if value is not None), None)
