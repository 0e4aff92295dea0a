"""The gradient of the norm and the turning of queries and keys: one read of what came in and of its gradient, one write.

The deviation is worked out anew, beside the sum that the gradient needs, so nothing but the input is kept. With n the
normalised value, w the weight and u = w times the gradient turned back, the gradient of x is (u - n * mean(u * n)) / deviation
(Zhang and Sennrich 2019); that of w is the sum of n times the gradient turned back, which each program keeps for its tokens.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.packed import like_sides, sides, stepped, strides
from gpupipe.ops.rotary.forward import _vector, heads_of, load_weights, next_place, place
from gpupipe.ops.rotary.pairs import aligned, angles, load_pairs, store_pairs, table_arguments, turn_back
from gpupipe.ops.rotary.tiles import backward_candidates, backward_us
from gpupipe.ops.rotary.tiles import programs as sharing
from gpupipe.ops.sums import add_up


@jit
def _load(
    dy_row, x_row, weight_ptr, table_ptr, frame, line, column, turned, second_base, third_base, total,
    DY_HEAD: tl.constexpr, X_HEAD: tl.constexpr, H0: tl.constexpr, HN: tl.constexpr, F0: tl.constexpr, PN: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The gradient turned back, x and u, of one part of a token, and sums over each head: of squares, and of x * u."""
    start, live = heads_of(dy_row, DY_HEAD, H0, HN, HEADS)
    g1, g2 = load_pairs(start, live, F0, PN, DIM, INTERLEAVED)
    if table_ptr is not None:
        cos, sin = angles(table_ptr, frame, line, column, second_base, third_base, total, F0, PN, P0, P1, P2, VECTOR)
        cos = cos * turned + (1.0 - turned)
        sin = sin * turned
        g1, g2 = turn_back(g1, g2, cos, sin)
    x1, x2, u1, u2, squares, products = g1, g2, g1, g2, 0.0, 0.0
    if NORM > 0:
        start, live = heads_of(x_row, X_HEAD, H0, HN, HEADS)
        x1, x2 = load_pairs(start, live, F0, PN, DIM, INTERLEAVED)
        w1, w2 = load_weights(weight_ptr, H0, HN, F0, PN, HEADS, DIM, INTERLEAVED, NORM == 2)
        u1, u2 = g1 * w1, g2 * w2
        squares = tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True)
        products = tl.sum(x1 * u1 + x2 * u2, 1, keep_dims=True)
    return g1, g2, x1, x2, u1, u2, squares, products


@jit
def _store(
    g1, g2, x1, x2, u1, u2, rstd, along, dx_row, first, second,
    DX_HEAD: tl.constexpr, H0: tl.constexpr, HN: tl.constexpr, F0: tl.constexpr, PN: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of one part of a token, and returns the sums with this token added."""
    if NORM > 0:
        if SUMS:
            first += g1 * (x1 * rstd)
            second += g2 * (x2 * rstd)
        u1 = u1 * rstd - x1 * along
        u2 = u2 * rstd - x2 * along
    start, live = heads_of(dx_row, DX_HEAD, H0, HN, HEADS)
    store_pairs(start, live, u1, u2, F0, PN, DIM, INTERLEAVED)
    return first, second


@jit
def _keep(
    first, second, partial_ptr, H0: tl.constexpr, HN: tl.constexpr, F0: tl.constexpr, PN: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Stores a part's sums: of each head its own, or of all heads together."""
    if FULL:
        start, live = heads_of(partial_ptr, DIM, H0, HN, HEADS)
    else:
        first, second = tl.sum(first, 0, keep_dims=True), tl.sum(second, 0, keep_dims=True)
        start, live = heads_of(partial_ptr, 0, 0, 1, 1)
    store_pairs(start, live, first, second, F0, PN, DIM, INTERLEAVED)


@jit
def _side(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, table_ptr, partial_ptr, begin, stop, tokens, prefix, end, lines, columns,
    second_base, third_base, total, dy_sample, dy_token, x_sample, x_token, dx_sample, dx_token, eps,
    DY_HEAD: tl.constexpr, X_HEAD: tl.constexpr, DX_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HA: tl.constexpr, PA: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr, H1: tl.constexpr, F1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sums: tl.constexpr = partial_ptr is not None
    a_first = tl.zeros((HA, PA), tl.float32)  # sums that nothing is added to cost nothing
    a_second = a_first
    if HB > 0:
        b_first = tl.zeros((HB, PB), tl.float32)
        b_second = b_first
    sample, number, turned, frame, line, column = place(begin, tokens, prefix, end, lines, columns)
    for _ in tl.range(0, stop - begin, num_stages=STAGES):
        dy_row = dy_ptr + sample * dy_sample + number * dy_token
        x_row = None
        if x_ptr is not None:
            x_row = x_ptr + sample * x_sample + number * x_token
        dx_row = dx_ptr + sample * dx_sample + number * dx_token
        ga1, ga2, xa1, xa2, ua1, ua2, squares_a, products_a = _load(
            dy_row, x_row, weight_ptr, table_ptr, frame, line, column, turned, second_base, third_base, total,
            DY_HEAD, X_HEAD, 0, HA, 0, PA, HEADS, DIM, P0, P1, P2, VECTOR, INTERLEAVED, NORM,
        )  # fmt: skip
        squares_b, products_b = squares_a, products_a
        if HB > 0:
            gb1, gb2, xb1, xb2, ub1, ub2, squares_b, products_b = _load(
                dy_row, x_row, weight_ptr, table_ptr, frame, line, column, turned, second_base, third_base, total,
                DY_HEAD, X_HEAD, H1, HB, F1, PB, HEADS, DIM, P0, P1, P2, VECTOR, INTERLEAVED, NORM,
            )  # fmt: skip
        rstd_a, rstd_b, along_a, along_b = None, None, None, None
        if NORM > 0:
            over: tl.constexpr = HEADS * DIM if NORM == 2 else DIM
            if NORM == 2:
                squares_a = tl.sum(squares_a, 0, keep_dims=True)
                products_a = tl.sum(products_a, 0, keep_dims=True)
                if HB > 0:
                    squares_a += tl.sum(squares_b, 0, keep_dims=True)
                    products_a += tl.sum(products_b, 0, keep_dims=True)
                squares_b, products_b = squares_a, products_a
            elif HB > 0 and F1 > 0:
                squares_a += squares_b
                products_a += products_b
                squares_b, products_b = squares_a, products_a
            rstd_a = tl.rsqrt(squares_a / over + eps)
            rstd_b = tl.rsqrt(squares_b / over + eps)
            along_a = products_a * rstd_a * rstd_a * rstd_a / over  # times x: n * mean(u * n) / deviation
            along_b = products_b * rstd_b * rstd_b * rstd_b / over
        a_first, a_second = _store(
            ga1, ga2, xa1, xa2, ua1, ua2, rstd_a, along_a, dx_row, a_first, a_second,
            DX_HEAD, 0, HA, 0, PA, HEADS, DIM, INTERLEAVED, NORM, sums,
        )  # fmt: skip
        if HB > 0:
            b_first, b_second = _store(
                gb1, gb2, xb1, xb2, ub1, ub2, rstd_b, along_b, dx_row, b_first, b_second,
                DX_HEAD, H1, HB, F1, PB, HEADS, DIM, INTERLEAVED, NORM, sums,
            )  # fmt: skip
        sample, number, turned, frame, line, column = next_place(
            sample, number, frame, line, column, tokens, prefix, end, lines, columns
        )  # fmt: skip
    if sums:
        if HB > 0 and F1 == 0 and NORM == 1:  # both parts hold the same columns, of other heads
            first = tl.sum(a_first, 0, keep_dims=True) + tl.sum(b_first, 0, keep_dims=True)
            second = tl.sum(a_second, 0, keep_dims=True) + tl.sum(b_second, 0, keep_dims=True)
            _keep(first, second, partial_ptr, 0, HA, 0, PA, HEADS, DIM, INTERLEAVED, False)
        else:
            _keep(a_first, a_second, partial_ptr, 0, HA, 0, PA, HEADS, DIM, INTERLEAVED, NORM == 2)
            if HB > 0:
                _keep(b_first, b_second, partial_ptr, H1, HB, F1, PB, HEADS, DIM, INTERLEAVED, NORM == 2)


@jit
def _copy(
    dy_ptr, dx_ptr, begin, stop, tokens, dy_sample, dy_token, dx_sample, dx_token, DY_HEAD: tl.constexpr, DX_HEAD: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, HA: tl.constexpr, PA: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr,
    H1: tl.constexpr, F1: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of what the op hands through, or zeros where there is none."""
    for step in tl.range(0, stop - begin, num_stages=STAGES):
        token = begin + step
        sample = (token // tokens).to(tl.int64)
        number = (token % tokens).to(tl.int64)
        dx_row = dx_ptr + sample * dx_sample + number * dx_token
        if dy_ptr is not None:
            dy_row = dy_ptr + sample * dy_sample + number * dy_token
            start, live = heads_of(dy_row, DY_HEAD, 0, HA, HEADS)
            a1, a2 = load_pairs(start, live, 0, PA, DIM, INTERLEAVED)
            if HB > 0:
                start, live = heads_of(dy_row, DY_HEAD, H1, HB, HEADS)
                b1, b2 = load_pairs(start, live, F1, PB, DIM, INTERLEAVED)
        else:
            a1 = tl.zeros((HA, PA), tl.float32)
            a2 = a1
            if HB > 0:
                b1 = tl.zeros((HB, PB), tl.float32)
                b2 = b1
        start, live = heads_of(dx_row, DX_HEAD, 0, HA, HEADS)
        store_pairs(start, live, a1, a2, 0, PA, DIM, INTERLEAVED)
        if HB > 0:
            start, live = heads_of(dx_row, DX_HEAD, H1, HB, HEADS)
            store_pairs(start, live, b1, b2, F1, PB, DIM, INTERLEAVED)


@jit
def qk_backward(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, dq_out_ptr, dk_out_ptr, dv_out_ptr, q_weight_ptr, k_weight_ptr, table_ptr,
    partial_ptr,
    count, chunk, tokens, prefix, end, lines, columns, second_base, third_base, total,
    dq_sample, dq_token, dk_sample, dk_token, dv_sample, dv_token, q_sample, q_token, k_sample, k_token,
    out_sample, out_token, eps,
    DQ_HEAD: tl.constexpr, DK_HEAD: tl.constexpr, DV_HEAD: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr,
    HA: tl.constexpr, PA: tl.constexpr, HB: tl.constexpr, PB: tl.constexpr, H1: tl.constexpr, F1: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, SUMMED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (p, s) takes tokens ``p * chunk`` and following of queries (s = 0), keys (1), or copies values' gradient (2)."""
    program = tl.program_id(0)
    begin = program * chunk
    stop = tl.minimum(begin + chunk, count)
    if tl.program_id(1) == 0:
        q_partial = None
        if partial_ptr is not None:
            q_partial = partial_ptr + program * SUMMED
        _side(
            dq_ptr, q_ptr, dq_out_ptr, q_weight_ptr, table_ptr, q_partial, begin, stop, tokens, prefix, end, lines, columns,
            second_base, third_base, total, dq_sample, dq_token, q_sample, q_token, out_sample, out_token, eps,
            DQ_HEAD, Q_HEAD, DIM, HEADS, DIM, HA, PA, HB, PB, H1, F1, P0, P1, P2, VECTOR, INTERLEAVED, NORM, STAGES,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        k_partial = None
        if partial_ptr is not None:
            k_partial = partial_ptr + (tl.num_programs(0) + program) * SUMMED
        _side(
            dk_ptr, k_ptr, dk_out_ptr, k_weight_ptr, table_ptr, k_partial, begin, stop, tokens, prefix, end, lines, columns,
            second_base, third_base, total, dk_sample, dk_token, k_sample, k_token, out_sample, out_token, eps,
            DK_HEAD, K_HEAD, DIM, HEADS, DIM, HA, PA, HB, PB, H1, F1, P0, P1, P2, VECTOR, INTERLEAVED, NORM, STAGES,
        )  # fmt: skip
    else:
        if dv_out_ptr is not None:
            _copy(
                dv_ptr, dv_out_ptr, begin, stop, tokens, dv_sample, dv_token, out_sample, out_token,
                DV_HEAD, DIM, HEADS, DIM, HA, PA, HB, PB, H1, F1, INTERLEAVED, STAGES,
            )  # fmt: skip


_COLUMNS, _AT_ONCE = 16, 256
"""Columns of a program that adds partial sums, and how many of these it adds at a time."""


def launch_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor | None,
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
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x and k, and of both weights as one float32 tensor (2, size), empty if not needed.

    Of a packed x, the first is whole, with ``dv`` in its place (zeros for None), and the second is empty.
    """
    q, k_in, *_ = sides(x, k)
    samples, tokens, heads, dim = q.shape
    dx, dq_out, dk_out, *rest = like_sides(x, *(() if k is None else (k,)))
    dv_out = rest[0] if rest else None
    none = x.new_empty(0)
    summed = (heads * dim if norm == 2 else dim) if need_weights and norm else 0
    dweights = torch.empty((2, summed) if summed else 0, dtype=torch.float32, device=x.device)
    count = samples * tokens
    if count == 0:
        return dx, none if k is None else dk_out, dweights.zero_()
    dq, dk = stepped(dq), stepped(dk)
    dv = None if dv is None else stepped(dv)
    q, k_in = (stepped(q), stepped(k_in)) if norm else (None, None)
    (dq_sample, dq_token, dq_head), (dk_sample, dk_token, dk_head), (dv_sample, dv_token, dv_head) = map(strides, (dq, dk, dv))
    (q_sample, q_token, q_head), (k_sample, k_token, k_head) = strides(q), strides(k_in)
    out_sample, out_token, _ = strides(dq_out)
    bases, constants = table_arguments(lengths, pairs)
    table = None if table is None else aligned(table)
    gpu = machine(x.device)
    partials: list[torch.Tensor | None] = [None]

    def run(config: Config) -> None:
        programs = sharing(gpu, config, count)
        if summed:
            partials[0] = torch.empty((2, programs, summed), dtype=torch.float32, device=x.device)
        cut = {name: config[name] for name in ("HA", "PA", "HB", "PB", "H1", "F1", "num_warps")}
        launch(
            qk_backward, (programs, 2 if dv_out is None else 3),
            dq, dk, dv, q, k_in, dq_out, dk_out, dv_out, _vector(q_weight), _vector(k_weight), table, partials[0],
            count, ceil_div(count, programs), tokens, prefix, tokens - suffix, grid[1], grid[2], *bases,
            dq_sample, dq_token, dk_sample, dk_token, dv_sample, dv_token, q_sample, q_token, k_sample, k_token,
            out_sample, out_token, eps,
            DQ_HEAD=dq_head, DK_HEAD=dk_head, DV_HEAD=dv_head, Q_HEAD=q_head, K_HEAD=k_head, HEADS=heads, DIM=dim,
            INTERLEAVED=interleaved, NORM=norm, SUMMED=summed, STAGES=config["num_stages"], **constants, **cut,
        )  # fmt: skip

    key = (str(x.dtype), heads, dim, bucket(count), interleaved, norm, summed, dv is not None, *pairs)
    config = choose(
        "qk_backward", key, x.device,
        lambda: backward_candidates(gpu, heads, dim, count),
        lambda config: backward_us(gpu, config, count, heads * dim, x.element_size(), 2 if norm else 1, summed),
        run,
    )  # fmt: skip
    run(config)
    if summed:
        assert partials[0] is not None
        add_up(partials[0], dweights, sharing(gpu, config, count), columns=_COLUMNS, at_once=_AT_ONCE)
    return dx, none if k is None else dk_out, dweights
