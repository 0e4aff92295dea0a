"""The kernel of all norms, forward: one read of each input, one write of each output, the row held in registers between.

A row is cut in equal parts, each a power of two wide, so that hidden sizes such as 3072 or 1152 waste no lanes and a sum over
the row is one sum over a part. Statistics take two passes over the registers, in float32: first the mean, then the squares
about it.
"""

# mypy: disable-error-code="assignment"
# Kernels make tuples of tiles longer one by one.

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, ceil_div, inner_rows, row_starts, rows, stride, there, wide
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
def _load_sum(
    x_row, branch_row, gate_row, sum_row, seed, threshold, keep_scale, row, mask, x_type,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One part of some rows of what is normalised; a sum is stored too."""
    columns = FIRST + tl.arange(0, WIDTH)[None, :]
    x = wide(x_row + columns, mask)
    if branch_row is not None:
        gate = None
        if gate_row is not None:
            gate = wide(gate_row + columns, mask)
        keep = None
        if seed is not None:
            keep = kept(seed, row, FIRST, WIDTH, threshold)
        branch_type = branch_row.dtype.element_ty
        x = add_branch(x, wide(branch_row + columns, mask), gate, keep, keep_scale, x_type, branch_type, ROUND)
        tl.store(sum_row + columns, x.to(x_type), mask=mask)
    return x


@jit
def _store(
    normal, y_row, weight_ptr, bias_ptr, scale_row, shift_row, mask, y_type, columns, ROUND: tl.constexpr, RMS: tl.constexpr
):
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
    H: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    x_row = row_starts(x_ptr, row, inner, x_outer, x_inner)
    branch_row = row_starts(branch_ptr, row, inner, branch_outer, branch_inner) if branch_ptr is not None else None
    of_group = (row // group).to(tl.int64)[:, None]
    gate_row = gate_ptr + of_group * gate_stride if gate_ptr is not None else None
    scale_row = scale_ptr + of_group * scale_stride if scale_ptr is not None else None
    shift_row = shift_ptr + of_group * shift_stride if shift_ptr is not None else None
    dense = row.to(tl.int64)[:, None] * H
    sum_row = sum_ptr + dense if sum_ptr is not None else None
    x_type = x_ptr.dtype.element_ty
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)

    values = ()
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):
        mask = there(live, H, part * WIDTH, WIDTH)
        x = _load_sum(
            x_row, branch_row, gate_row, sum_row, seed, threshold, keep_scale, row, mask, x_type, part * WIDTH, WIDTH, ROUND
        )  # fmt: skip
        values += (x,)
        total += x

    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    if RMS:
        for part in tl.static_range(PARTS):
            squares += values[part] * values[part]
    else:
        mean = tl.sum(total, 1) / H
        centred = ()
        for part in tl.static_range(PARTS):
            off = values[part] - mean[:, None]
            if part * WIDTH + WIDTH > H:
                off = tl.where(part * WIDTH + tl.arange(0, WIDTH)[None, :] < H, off, 0.0)
            squares += off * off
            centred += (off,)
        values = centred
        tl.store(mean_ptr + row, mean, mask=live)
    rstd = tl.rsqrt(tl.sum(squares, 1) / H + eps)
    tl.store(rstd_ptr + row, rstd, mask=live)

    for part in tl.static_range(PARTS):
        columns = part * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = there(live, H, part * WIDTH, WIDTH)
        _store(
            values[part] * rstd[:, None], y_ptr + dense, weight_ptr, bias_ptr, scale_row, shift_row, mask, x_type, columns,
            ROUND, RMS,
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
    steps = x, x_outer, x_inner = rows(x)
    of_branch = steps if branch is None else rows(branch)
    branch_outer, branch_inner = of_branch[1:]
    branch = None if branch is None else of_branch[0]
    inner = inner_rows(steps, of_branch)
    group = count // per_group.shape[0] if (per_group := _first(scale, shift, gate)) is not None else 1
    threshold, keep_scale = dropping(p)

    def run(config: Config) -> None:
        launch(
            norm_forward, (ceil_div(count, config["ROWS"]),),
            x, branch, gate, seed, weight, bias, scale, shift, y, None if branch is None else total, mean, rstd,
            count, inner, group, x_outer, x_inner, branch_outer, branch_inner,
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
