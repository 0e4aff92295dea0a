"""The kernel of the norm and the turning of queries and keys: one read and one write of both.

A program takes tokens one after the other, with all heads of the queries or of the keys: where a token lies on the grid is
then one number, its angles are loaded once for all heads, and sums over a head, or over all of them, stay within the program.
Heads or pairs of columns are cut in two parts where need be, so that 24 heads, or heads of 72 columns, waste few lanes.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.packed import sides, stepped, strides
from gpupipe.ops.rotary.pairs import aligned, angles, load_pairs, store_pairs, table_arguments, turn
from gpupipe.ops.rotary.tiles import forward_candidates, forward_us


@jit
def heads_of(row, HEAD_STRIDE: tl.constexpr, H0: tl.constexpr, HN: tl.constexpr, HEADS: tl.constexpr):
    """Pointers (HN, 1) to where heads ``H0`` and following start, and which of them are there."""
    heads = H0 + tl.arange(0, HN)[:, None]
    live = heads < HEADS
    if HEADS * HEAD_STRIDE >= 2147483648:
        heads = heads.to(tl.int64)
    return row + heads * HEAD_STRIDE, live


@jit
def load_weights(
    weight_ptr, H0: tl.constexpr, HN: tl.constexpr, P0: tl.constexpr, PN: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Weights of a part, (HN, PN) or (1, PN); 1 where there are none."""
    first, second = 1.0, 1.0
    if weight_ptr is not None:
        if FULL:
            start, live = heads_of(weight_ptr, DIM, H0, HN, HEADS)
        else:
            start, live = heads_of(weight_ptr, 0, 0, 1, 1)
        first, second = load_pairs(start, live, P0, PN, DIM, INTERLEAVED)
    return first, second


@jit
def place(token, tokens, prefix, end, lines, columns):
    """A token's sample and number in it, 1 if it turns or else 0, and its frame, line and column."""
    sample = token // tokens
    number = token % tokens
    turned = (number >= prefix) & (number < end)
    number_on_grid = tl.where(turned, number - prefix, 0)
    line = number_on_grid // columns
    return (
        sample.to(tl.int64),
        number.to(tl.int64),
        turned.to(tl.float32),
        line // lines,
        line % lines,
        number_on_grid % columns,
    )


@jit
def next_place(sample, number, frame, line, column, tokens, prefix, end, lines, columns):
    """:func:`place` of the token that follows, without a division."""
    number += 1
    wrapped = number == tokens
    sample += wrapped.to(tl.int64)
    number = tl.where(wrapped, 0, number)
    turned = (number >= prefix) & (number < end)
    column = tl.where(turned & (number > prefix), column + 1, 0)
    full = column == columns
    column = tl.where(full, 0, column)
    line = tl.where(turned & (number > prefix), line + full.to(tl.int32), 0)
    full = line == lines
    line = tl.where(full, 0, line)
    frame = tl.where(turned & (number > prefix), frame + full.to(tl.int32), 0)
    return sample, number, turned.to(tl.float32), frame, line, column


@jit
def _finish(
    first, second, rstd, weight_1, weight_2, table_ptr, frame, line, column, turned, second_base, third_base, total, out_row,
    H0: tl.constexpr, HN: tl.constexpr, F0: tl.constexpr, PN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr, INTERLEAVED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Normalises, turns and stores one part of a token."""
    if rstd is not None:
        first = first * rstd * weight_1
        second = second * rstd * weight_2
        if ROUND:
            first = first.to(out_row.dtype.element_ty).to(tl.float32)
            second = second.to(out_row.dtype.element_ty).to(tl.float32)
    if table_ptr is not None:
        cos, sin = angles(table_ptr, frame, line, column, second_base, third_base, total, F0, PN, P0, P1, P2, VECTOR)
        cos = cos * turned + (1.0 - turned)
        sin = sin * turned
        first, second = turn(first, second, cos, sin)
    start, live = heads_of(out_row, DIM, H0, HN, HEADS)
    store_pairs(start, live, first, second, F0, PN, DIM, INTERLEAVED)


@jit
def _side(
    x_ptr, out_ptr, weight_ptr, table_ptr, begin, stop, tokens, prefix, end, lines, columns, second_base, third_base, total,
    sample_stride, token_stride, eps, HEAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HA: tl.constexpr, PA: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr, H1: tl.constexpr, F1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    weight_a1, weight_a2 = load_weights(weight_ptr, 0, HA, 0, PA, HEADS, DIM, INTERLEAVED, NORM == 2)
    if HB > 0:
        weight_b1, weight_b2 = load_weights(weight_ptr, H1, HB, F1, PB, HEADS, DIM, INTERLEAVED, NORM == 2)
    for step in tl.range(0, stop - begin, num_stages=STAGES):
        token = begin + step
        sample, number, turned, frame, line, column = place(token, tokens, prefix, end, lines, columns)
        row = x_ptr + sample * sample_stride + number * token_stride
        out_row = out_ptr + token.to(tl.int64) * (HEADS * DIM)
        start, live = heads_of(row, HEAD_STRIDE, 0, HA, HEADS)
        a1, a2 = load_pairs(start, live, 0, PA, DIM, INTERLEAVED)
        if HB > 0:
            start, live = heads_of(row, HEAD_STRIDE, H1, HB, HEADS)
            b1, b2 = load_pairs(start, live, F1, PB, DIM, INTERLEAVED)
        rstd_a, rstd_b = None, None
        if NORM > 0:
            squares_a = tl.sum(a1 * a1 + a2 * a2, 1, keep_dims=True)
            squares_b = squares_a
            if HB > 0:
                squares_b = tl.sum(b1 * b1 + b2 * b2, 1, keep_dims=True)
            if NORM == 2:
                squares = tl.sum(squares_a, 0, keep_dims=True)
                if HB > 0:
                    squares += tl.sum(squares_b, 0, keep_dims=True)
                rstd_a = tl.rsqrt(squares / (HEADS * DIM) + eps)
                rstd_b = rstd_a
            elif HB > 0 and F1 > 0:
                rstd_a = tl.rsqrt((squares_a + squares_b) / DIM + eps)
                rstd_b = rstd_a
            else:
                rstd_a = tl.rsqrt(squares_a / DIM + eps)
                rstd_b = tl.rsqrt(squares_b / DIM + eps)
        _finish(
            a1, a2, rstd_a, weight_a1, weight_a2, table_ptr, frame, line, column, turned, second_base, third_base, total,
            out_row, 0, HA, 0, PA, HEADS, DIM, P0, P1, P2, VECTOR, INTERLEAVED, ROUND,
        )  # fmt: skip
        if HB > 0:
            _finish(
                b1, b2, rstd_b, weight_b1, weight_b2, table_ptr, frame, line, column, turned, second_base, third_base, total,
                out_row, H1, HB, F1, PB, HEADS, DIM, P0, P1, P2, VECTOR, INTERLEAVED, ROUND,
            )  # fmt: skip


@jit
def qk_forward(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, table_ptr,
    count, tokens, prefix, end, lines, columns, second_base, third_base, total,
    q_sample, q_token, k_sample, k_token, eps,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    HA: tl.constexpr, PA: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr, H1: tl.constexpr, F1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Even programs take queries, odd ones the keys of the same tokens, which lie beside them."""
    begin = tl.program_id(0) // 2 * TOKENS
    stop = tl.minimum(begin + TOKENS, count)
    if tl.program_id(0) % 2 == 0:
        _side(
            q_ptr, q_out_ptr, q_weight_ptr, table_ptr, begin, stop, tokens, prefix, end, lines, columns, second_base,
            third_base, total, q_sample, q_token, eps, Q_HEAD, HEADS, DIM, HA, PA, HB, PB, H1, F1, P0, P1, P2, VECTOR,
            INTERLEAVED, NORM, ROUND, STAGES,
        )  # fmt: skip
    else:
        _side(
            k_ptr, k_out_ptr, k_weight_ptr, table_ptr, begin, stop, tokens, prefix, end, lines, columns, second_base,
            third_base, total, k_sample, k_token, eps, K_HEAD, HEADS, DIM, HA, PA, HB, PB, H1, F1, P0, P1, P2, VECTOR,
            INTERLEAVED, NORM, ROUND, STAGES,
        )  # fmt: skip


def launch_forward(
    x: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    table: torch.Tensor | None,
    lengths: list[int],
    pairs: list[int],
    grid: list[int],
    prefix: int,
    suffix: int,
    interleaved: bool,
    norm: int,
    eps: float,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, N, heads, dim), contiguous. ``x`` is packed (``k`` None), or the queries."""
    q, k, *_ = sides(x, k)
    samples, tokens, heads, dim = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count = samples * tokens
    if count == 0:
        return q_out, k_out
    q, k = stepped(q), stepped(k)
    (q_sample, q_token, q_head), (k_sample, k_token, k_head) = strides(q), strides(k)
    bases, constants = table_arguments(lengths, pairs)
    table = None if table is None else aligned(table)

    def run(config: Config) -> None:
        launch(
            qk_forward, (2 * ceil_div(count, config["TOKENS"]),),
            q, k, q_out, k_out, _vector(q_weight), _vector(k_weight), table,
            count, tokens, prefix, tokens - suffix, grid[1], grid[2], *bases, q_sample, q_token, k_sample, k_token, eps,
            Q_HEAD=q_head, K_HEAD=k_head, HEADS=heads, DIM=dim, INTERLEAVED=interleaved, NORM=norm, ROUND=conservative,
            STAGES=config["num_stages"], **constants, **config,
        )  # fmt: skip

    key = (str(q.dtype), heads, dim, bucket(count), interleaved, norm, q_weight is not None, *pairs)
    gpu = machine(q.device)
    run(
        choose(
            "qk_forward", key, q.device,
            lambda: forward_candidates(heads, dim),
            lambda config: forward_us(gpu, config, count, heads * dim, q.element_size(), interleaved=interleaved),
            run,
        )
    )  # fmt: skip
    return q_out, k_out


def _vector(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.contiguous()
