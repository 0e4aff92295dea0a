"""The kernel of attention along time: what one head needs of a few neighbouring pixels, all frames, in one tile.

Sequences are so short that a tile holds several pixels; each row sees the rows of its own pixel. Whatever the number of frames,
a tile moves the same bytes for the same products, so 8 frames cost what 32 do. Queries and keys are read as two halves, or as
the two columns of each pair: scores do not mind the order of columns, and an angle then turns two tiles without a shuffle.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import interpreted, jit, launch, tl
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.packed import sides, stepped, strides
from gpupipe.ops.rotary.pairs import aligned, angles, load_pairs, store_pairs, table_arguments, turn
from gpupipe.ops.temporal.tiles import forward_candidates, forward_us, padded_pairs


@jit
def tile_place(program, pixels, HEADS: tl.constexpr, FRAMES: tl.constexpr, ROWS: tl.constexpr):
    """The head and sample of a program, and of its rows (ROWS, 1) the frame, the pixel, and whether they are there."""
    per_tile: tl.constexpr = ROWS // FRAMES
    head = program % HEADS
    tile = program // HEADS
    tiles = tl.cdiv(pixels, per_tile)
    row = tl.arange(0, ROWS)[:, None]
    pixel = tile % tiles * per_tile + row // FRAMES
    return head, tile // tiles, row % FRAMES, pixel, (row < per_tile * FRAMES) & (pixel < pixels)


@jit
def row_pointers(x_ptr, sample, frame, pixel, pixels, head, sample_stride, token_stride, HEAD_STRIDE: tl.constexpr):
    """Where rows start, (ROWS, 1)."""
    token = frame.to(tl.int64) * pixels + pixel
    return x_ptr + (sample.to(tl.int64) * sample_stride + head.to(tl.int64) * HEAD_STRIDE) + token * token_stride


@jit
def load_side(
    start, live, weight_ptr, table_ptr, cos, sin, eps, kind,
    PAIRS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Queries or keys, normalised and turned, as two tiles of the type of products; and 1 / deviation of normalised rows."""
    first, second = load_pairs(start, live, 0, PAIRS, DIM, INTERLEAVED)
    rstd = tl.zeros((1, 1), tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(first * first + second * second, 1, keep_dims=True) / DIM + eps)
        first = first * rstd
        second = second * rstd
        if weight_ptr is not None:
            weight_1, weight_2 = load_pairs(weight_ptr + tl.zeros((1, 1), tl.int32), live_one(), 0, PAIRS, DIM, INTERLEAVED)
            first = first * weight_1
            second = second * weight_2
        if ROUND:
            first = first.to(start.dtype.element_ty).to(tl.float32)
            second = second.to(start.dtype.element_ty).to(tl.float32)
    if table_ptr is not None:
        first, second = turn(first, second, cos, sin)
    kept: tl.constexpr = start.dtype.element_ty
    return first.to(kept).to(kind), second.to(kept).to(kind), rstd


@jit
def live_one():
    return tl.zeros((1, 1), tl.int32) == 0


@jit
def row_angles(
    table_ptr, frame, pixel, pixels, columns, second_base, third_base, total,
    PAIRS: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of a tile's rows; 1 and 0 without a table, which nobody should use."""
    cos, sin = 1.0, 0.0
    if table_ptr is not None:
        pixel = tl.minimum(pixel, pixels - 1)
        cos, sin = angles(
            table_ptr, frame, pixel // columns, pixel % columns, second_base, third_base, total, 0, PAIRS, P0, P1, P2, VECTOR
        )  # fmt: skip
    return cos, sin


@jit
def probabilities(
    q1, q2, k1, k2, mask_ptr, sample, scale, FRAMES: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax over the rows that each row may see: those of its pixel. 0 for a row that may see none."""
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * (scale * 1.4426950408889634)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    visible = row // FRAMES == column // FRAMES
    if CAUSAL:
        visible = visible & (column <= row)
    if mask_ptr is not None:
        there = tl.load(mask_ptr + sample.to(tl.int64) * FRAMES + column % FRAMES)
        visible = visible & (there != 0)
    scores = tl.where(visible, scores, float("-inf"))
    most = tl.max(scores, 1)
    most = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp2(scores - most[:, None])
    total = tl.sum(weights, 1)
    return weights * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@jit
def temporal_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, mask_ptr, q_weight_ptr, k_weight_ptr, table_ptr,
    pixels, columns, second_base, third_base, total, q_sample, q_token, k_sample, k_token, v_sample, v_token, out_sample,
    eps, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, FRAMES: tl.constexpr, ROWS: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, CAUSAL: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr, AT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes ``AT`` heads one after the other: the angles serve all, and one is read while another is worked on."""
    group, sample, frame, pixel, live = tile_place(tl.program_id(0), pixels, HEADS // AT, FRAMES, ROWS)
    cos, sin = row_angles(
        table_ptr, frame, pixel, pixels, columns, second_base, third_base, total, PAIRS, P0, P1, P2, VECTOR
    )  # fmt: skip
    for step in tl.range(0, AT, num_stages=STAGES):
        head = group * AT + step
        q_row = row_pointers(q_ptr, sample, frame, pixel, pixels, head, q_sample, q_token, Q_HEAD)
        k_row = row_pointers(k_ptr, sample, frame, pixel, pixels, head, k_sample, k_token, K_HEAD)
        v_row = row_pointers(v_ptr, sample, frame, pixel, pixels, head, v_sample, v_token, V_HEAD)
        q1, q2, _ = load_side(q_row, live, q_weight_ptr, table_ptr, cos, sin, eps, KIND, PAIRS, DIM, INTERLEAVED, NORM, ROUND)
        k1, k2, _ = load_side(k_row, live, k_weight_ptr, table_ptr, cos, sin, eps, KIND, PAIRS, DIM, INTERLEAVED, NORM, ROUND)
        v1, v2 = load_pairs(v_row, live, 0, PAIRS, DIM, False)
        weights = probabilities(q1, q2, k1, k2, mask_ptr, sample, scale, FRAMES, ROWS, CAUSAL, PRECISION).to(KIND)
        out_row = row_pointers(out_ptr, sample, frame, pixel, pixels, head, out_sample, HEADS * DIM, DIM)
        out1 = tl.dot(weights, v1.to(KIND), input_precision=PRECISION)
        out2 = tl.dot(weights, v2.to(KIND), input_precision=PRECISION)
        store_pairs(out_row, live, out1, out2, 0, PAIRS, DIM, False)


def product_constants(dtype: torch.dtype, fast: bool) -> dict[str, object]:
    """The type that products take, and how float32 goes through tensor cores."""
    if interpreted() or dtype == torch.float32:
        return {"KIND": tl.float32, "PRECISION": "tf32" if fast else "tf32x3"}
    return {"KIND": tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, "PRECISION": "tf32"}


def launch_forward(
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
) -> torch.Tensor:
    """Attention along the frames of ``grid``, (B, N, heads, dim). ``x`` is packed (k and v None), or the queries."""
    q, k, v = (stepped(side) for side in sides(x, k, v))
    samples, _, heads, dim = q.shape
    frames, pixels = grid[0], grid[1] * grid[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    (q_sample, q_token, q_head), (k_sample, k_token, k_head), (v_sample, v_token, v_head) = map(strides, (q, k, v))
    bases, constants = table_arguments(lengths, pairs)
    table = None if table is None else aligned(table)

    def run(config: Config) -> None:
        launch(
            temporal_forward, (programs(samples, heads // config["AT"], frames, pixels, config["ROWS"]),),
            q, k, v, out, mask, q_weight, k_weight, table,
            pixels, grid[2], *bases, q_sample, q_token, k_sample, k_token, v_sample, v_token, out.stride(0), eps, scale,
            Q_HEAD=q_head, K_HEAD=k_head, V_HEAD=v_head, HEADS=heads, DIM=dim, PAIRS=padded_pairs(dim), FRAMES=frames,
            INTERLEAVED=interleaved, NORM=norm, ROUND=conservative, CAUSAL=causal,
            **product_constants(q.dtype, fast), **constants, **config,
        )  # fmt: skip

    gpu = machine(q.device)
    key = (
        str(q.dtype), heads, dim, frames, bucket(samples * pixels), interleaved, norm, table is None, causal, mask is None,
        fast,
    )  # fmt: skip
    run(
        choose(
            "temporal_forward", key, q.device,
            lambda: forward_candidates(frames, dim, heads),
            lambda config: forward_us(
                gpu, config, samples * pixels, heads, dim, frames, q.element_size(), table is not None, interleaved
            ),
            run,
        )
    )  # fmt: skip
    return out


def programs(samples: int, heads: int, frames: int, pixels: int, rows: int) -> int:
    """Tiles of all heads."""
    return int(samples * heads * ceil_div(pixels, rows // frames))
