"""The gradient of attention along time, with that of the norm and the turning: one read of all that came in, one write.

Scores are worked out anew on the chip. With p the probabilities and g their gradient, that of the scores is
p * (g - sum(p * g)), the sum over a row (as in Dao et al. 2022, whose sum over the output is the same number). Each tile writes
its part of the weights' gradients; they are added in two steps in a fixed order.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.packed import like_sides, sides, stepped, strides
from gpupipe.ops.rotary.pairs import aligned, load_pairs, store_pairs, table_arguments, turn_back
from gpupipe.ops.sums import add_up
from gpupipe.ops.temporal.forward import (
    live_one,
    load_side,
    probabilities,
    product_constants,
    programs,
    row_angles,
    row_pointers,
    tile_place,
)
from gpupipe.ops.temporal.tiles import backward_candidates, backward_us, padded_pairs


@jit
def _finish_side(
    g1, g2, start, out, live, rstd, weight_ptr, table_ptr, cos, sin, partial_ptr,
    PAIRS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """From the gradient of what entered the scores to that of what was read, which it stores; and a tile's part of weights'."""
    if table_ptr is not None:
        g1, g2 = turn_back(g1, g2, cos, sin)
    if NORM:
        n1, n2 = load_pairs(start, live, 0, PAIRS, DIM, INTERLEAVED)
        n1 = n1 * rstd
        n2 = n2 * rstd
        if partial_ptr is not None:
            sum1, sum2 = tl.sum(g1 * n1, 0, keep_dims=True), tl.sum(g2 * n2, 0, keep_dims=True)
            store_pairs(partial_ptr + tl.zeros((1, 1), tl.int32), live_one(), sum1, sum2, 0, PAIRS, DIM, INTERLEAVED)
        if weight_ptr is not None:
            weight_1, weight_2 = load_pairs(weight_ptr + tl.zeros((1, 1), tl.int32), live_one(), 0, PAIRS, DIM, INTERLEAVED)
            g1 = g1 * weight_1
            g2 = g2 * weight_2
        mean = tl.sum(g1 * n1 + g2 * n2, 1, keep_dims=True) / DIM
        g1 = (g1 - n1 * mean) * rstd
        g2 = (g2 - n2 * mean) * rstd
    store_pairs(out, live, g1, g2, 0, PAIRS, DIM, INTERLEAVED)


@jit
def temporal_backward(
    dout_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, mask_ptr, q_weight_ptr, k_weight_ptr, table_ptr, partial_ptr,
    samples, pixels, columns, second_base, third_base, total,
    dout_sample, dout_token, q_sample, q_token, k_sample, k_token, v_sample, v_token, dx_sample, dx_token, eps, scale,
    DOUT_HEAD: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, FRAMES: tl.constexpr, ROWS: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, CAUSAL: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs beyond the last sample only write a part of 0 to the sums."""
    head, sample, frame, pixel, live = tile_place(tl.program_id(0), pixels, HEADS, FRAMES, ROWS)
    live = live & (sample + row_zeros(ROWS) < samples)
    sample = tl.minimum(sample, samples - 1)
    q_row = row_pointers(q_ptr, sample, frame, pixel, pixels, head, q_sample, q_token, Q_HEAD)
    k_row = row_pointers(k_ptr, sample, frame, pixel, pixels, head, k_sample, k_token, K_HEAD)
    v_row = row_pointers(v_ptr, sample, frame, pixel, pixels, head, v_sample, v_token, V_HEAD)
    dout_row = row_pointers(dout_ptr, sample, frame, pixel, pixels, head, dout_sample, dout_token, DOUT_HEAD)

    cos, sin = row_angles(
        table_ptr, frame, pixel, pixels, columns, second_base, third_base, total, PAIRS, P0, P1, P2, VECTOR
    )  # fmt: skip
    q1, q2, q_rstd = load_side(q_row, live, q_weight_ptr, table_ptr, cos, sin, eps, KIND, PAIRS, DIM, INTERLEAVED, NORM, ROUND)
    k1, k2, k_rstd = load_side(k_row, live, k_weight_ptr, table_ptr, cos, sin, eps, KIND, PAIRS, DIM, INTERLEAVED, NORM, ROUND)
    dout1, dout2 = load_pairs(dout_row, live, 0, PAIRS, DIM, False)
    dout1 = dout1.to(KIND)
    dout2 = dout2.to(KIND)
    v1, v2 = load_pairs(v_row, live, 0, PAIRS, DIM, False)
    weights = probabilities(q1, q2, k1, k2, mask_ptr, sample, scale, FRAMES, ROWS, CAUSAL, PRECISION)
    slope = tl.dot(dout1, tl.trans(v1.to(KIND)), input_precision=PRECISION)
    slope = tl.dot(dout2, tl.trans(v2.to(KIND)), slope, input_precision=PRECISION)
    turned = tl.trans(weights.to(KIND))
    dv1 = tl.dot(turned, dout1, input_precision=PRECISION)
    dv2 = tl.dot(turned, dout2, input_precision=PRECISION)
    dv_row = row_pointers(dv_ptr, sample, frame, pixel, pixels, head, dx_sample, dx_token, DIM)
    store_pairs(dv_row, live, dv1, dv2, 0, PAIRS, DIM, False)
    slope = (weights * (slope - tl.sum(weights * slope, 1)[:, None]) * scale).to(KIND)

    cos, sin = row_angles(  # read again rather than held: registers are short
        table_ptr, frame, pixel, pixels, columns, second_base, third_base, total, PAIRS, P0, P1, P2, VECTOR
    )  # fmt: skip
    q_partial, k_partial = None, None
    if partial_ptr is not None:
        q_partial = partial_ptr + tl.program_id(0) * DIM
        k_partial = partial_ptr + (tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * DIM
    dq1 = tl.dot(slope, k1, input_precision=PRECISION)
    dq2 = tl.dot(slope, k2, input_precision=PRECISION)
    dq_row = row_pointers(dq_ptr, sample, frame, pixel, pixels, head, dx_sample, dx_token, DIM)
    _finish_side(
        dq1, dq2, q_row, dq_row, live, q_rstd, q_weight_ptr, table_ptr, cos, sin, q_partial, PAIRS, DIM, INTERLEAVED, NORM
    )  # fmt: skip
    slope = tl.trans(slope)
    dk1 = tl.dot(slope, q1, input_precision=PRECISION)
    dk2 = tl.dot(slope, q2, input_precision=PRECISION)
    dk_row = row_pointers(dk_ptr, sample, frame, pixel, pixels, head, dx_sample, dx_token, DIM)
    _finish_side(
        dk1, dk2, k_row, dk_row, live, k_rstd, k_weight_ptr, table_ptr, cos, sin, k_partial, PAIRS, DIM, INTERLEAVED, NORM
    )  # fmt: skip


@jit
def row_zeros(ROWS: tl.constexpr):
    return tl.zeros((ROWS, 1), tl.int32)


_COLUMNS, _AT_ONCE = 16, 256
"""Columns of a program that adds partial sums, and how many of these it adds at a time."""


def launch_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    mask: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    interleaved: bool,
    norm: bool,
    eps: float,
    causal: bool,
    scale: float,
    conservative: bool,
    fast: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, k and v, the last two empty for a packed x; of both weights, float32 (2, dim), empty if not needed."""
    packed = k is None
    q, k_in, v_in = sides(x, k, v)
    dx, dq, dk, dv = like_sides(x, *(() if packed else (k, v)))
    rest = (x.new_empty(0), x.new_empty(0)) if packed else (dk, dv)
    samples, _, heads, dim = q.shape
    frames, pixels = grid[0], grid[1] * grid[2]
    summed = need_weights and norm
    dweights = torch.empty((2, dim) if summed else 0, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return dx, *rest, dweights.zero_()
    dout, q, k_in, v_in = (stepped(side) for side in (dout, q, k_in, v_in))
    (dout_sample, dout_token, dout_head), (q_sample, q_token, q_head) = strides(dout), strides(q)
    (k_sample, k_token, k_head), (v_sample, v_token, v_head) = strides(k_in), strides(v_in)
    bases, constants = table_arguments(lengths, pairs)
    table = None if table is None else aligned(table)
    partials: list[torch.Tensor | None] = [None]

    def run(config: Config) -> None:
        count = programs(samples, heads, frames, pixels, config["ROWS"])
        if summed:
            count = count if count <= _AT_ONCE else ceil_div(count, _AT_ONCE) * _AT_ONCE
            partials[0] = torch.empty((2, count, dim), dtype=torch.float32, device=x.device)
        launch(
            temporal_backward, (count,),
            dout, q, k_in, v_in, dq, dk, dv, mask, q_weight, k_weight, table, partials[0],
            samples, pixels, grid[2], *bases, dout_sample, dout_token, q_sample, q_token, k_sample, k_token, v_sample, v_token,
            dq.stride(0), dq.stride(1), eps, scale,
            DOUT_HEAD=dout_head, Q_HEAD=q_head, K_HEAD=k_head, V_HEAD=v_head, HEADS=heads, DIM=dim, PAIRS=padded_pairs(dim),
            FRAMES=frames, INTERLEAVED=interleaved, NORM=norm, ROUND=conservative, CAUSAL=causal,
            **product_constants(q.dtype, fast), **constants, **config,
        )  # fmt: skip

    gpu = machine(x.device)
    key = (
        str(x.dtype), heads, dim, frames, bucket(samples * pixels), interleaved, norm, summed, table is None, causal,
        mask is None, fast,
    )  # fmt: skip
    config = choose(
        "temporal_backward", key, x.device,
        lambda: backward_candidates(frames, dim),
        lambda config: backward_us(
            gpu, config, samples * pixels, heads, dim, frames, x.element_size(), table is not None, interleaved
        ),
        run,
    )  # fmt: skip
    run(config)
    if partials[0] is not None:
        _add(partials[0], dweights)
    return dx, *rest, dweights


def _add(partial: torch.Tensor, into: torch.Tensor) -> None:
    """Sums (2, count, dim) over its second dimension, many at a time: two launches where one would go on alone for long."""
    _, count, dim = partial.shape
    if count > _AT_ONCE:
        chunks = torch.empty((2, count // _AT_ONCE, dim), dtype=torch.float32, device=partial.device)
        add_up(partial, chunks, _AT_ONCE, columns=_COLUMNS, at_once=_AT_ONCE)
        partial, count = chunks, chunks.shape[1]
    add_up(partial, into, count, columns=_COLUMNS, at_once=_AT_ONCE)
