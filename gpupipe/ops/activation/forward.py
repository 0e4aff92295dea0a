"""One pass over a matrix: bias, activation, dropout, gate and residual, each if it is there.

An activation with a gate of its own (GLU) takes the value from the first half of a row's columns and the gate from the second.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops import activations
from gpupipe.ops.activation.tiles import forward_candidates, forward_us
from gpupipe.ops.activations import activated
from gpupipe.ops.dropout import dropping, kept
from gpupipe.ops.layout import bucket, ceil_div, inner_rows, row_starts, rows, stride, wide


@jit
def pre_activation(x_row, bias_ptr, columns, mask, ROUND: tl.constexpr):
    """x + bias of some columns, in float32."""
    x = wide(x_row + columns, mask)
    if bias_ptr is not None:
        x += wide(bias_ptr + columns, mask)
        if ROUND:
            x = x.to(x_row.dtype.element_ty).to(tl.float32)
    return x


@jit
def act_forward(
    x_ptr, bias_ptr, gate_ptr, residual_ptr, seed_ptr, y_ptr,
    count, inner, group, x_outer, x_inner, residual_outer, residual_inner, gate_stride, threshold, keep_scale,
    C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Program p makes a tile of ``ROWS`` by ``COLS`` of the ``count`` by ``C`` results, neighbours along the columns first."""
    across: tl.constexpr = (C + COLS - 1) // COLS
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    live = row < count
    first = (tl.program_id(0) % across) * COLS
    columns = first + tl.arange(0, COLS)[None, :]
    mask = live[:, None] & (columns < C)
    x_type = x_ptr.dtype.element_ty
    x_row = row_starts(x_ptr, row, inner, x_outer, x_inner)
    x = pre_activation(x_row, bias_ptr, columns, mask, ROUND)
    if GLU:
        other = pre_activation(x_row, bias_ptr, C + columns, mask, ROUND)
        factor = activated(other, x_type, ACT)
        if ROUND:
            factor = factor.to(x_type).to(tl.float32)
        y = x * factor
    else:
        y = activated(x, x_type, ACT)
    if ROUND:
        y = y.to(x_type).to(tl.float32)
    if seed_ptr is not None:
        y = tl.where(kept(tl.load(seed_ptr), row, first, COLS, threshold), y * keep_scale, 0.0)
        if ROUND:
            y = y.to(x_type).to(tl.float32)
    if gate_ptr is not None:
        gate_row = gate_ptr
        if group is not None:
            gate_row = gate_ptr + ((row // group).to(tl.int64) * gate_stride)[:, None]
        y = y * wide(gate_row + columns, mask)
        if ROUND and gate_ptr.dtype.element_ty == x_type:
            y = y.to(x_type).to(tl.float32)
    if residual_ptr is not None:
        y += wide(row_starts(residual_ptr, row, inner, residual_outer, residual_inner) + columns, mask)
    tl.store(y_ptr + (row.to(tl.int64) * C)[:, None] + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    seed: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """residual + gate * dropout(act(x + bias)), of the residual's type, else of that of x; gate is (M, C)."""
    code, glu = activations.split(act)
    size = x.shape[-1] // 2 if glu else x.shape[-1]
    count = x.numel() // x.shape[-1]
    y = torch.empty((*x.shape[:-1], size), dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    if count == 0:
        return y
    bias = None if bias is None else bias.contiguous()
    steps = [rows(x)]
    if residual is not None:
        steps.append(rows(residual))
    inner = inner_rows(*steps)
    x, x_outer, x_inner = steps[0]
    residual, residual_outer, residual_inner = (None, 0, 0) if residual is None else steps[1]
    threshold, keep_scale = dropping(p)
    group = None if gate is None or gate.shape[0] == 1 else count // gate.shape[0]

    def run(config: Config) -> None:
        launch(
            act_forward, (ceil_div(count, config["ROWS"]) * ceil_div(size, config["COLS"]),),
            x, bias, gate, residual, seed, y, count, inner, group, x_outer, x_inner, residual_outer, residual_inner,
            stride(gate), threshold, keep_scale, C=size, ACT=code, GLU=glu, ROUND=conservative, **config,
        )  # fmt: skip

    reads = 1 + glu + (residual is not None) + (gate is not None and gate.shape[0] == count)
    item = x.element_size()
    row_bytes = size * (item * (1 + glu) + y.element_size() * (1 + (residual is not None)))
    key = (str(x.dtype), str(y.dtype), size, bucket(count), act, reads, seed is not None, gate is not None, inner is None)
    config = choose(
        "act_forward", key, x.device,
        lambda: forward_candidates(size),
        lambda config: forward_us(machine(x.device), config, count, size, row_bytes, reads),
        run,
    )  # fmt: skip
    run(config)
    return y
