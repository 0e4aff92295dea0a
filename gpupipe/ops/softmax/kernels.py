"""The kernels of softmax: a row, cut in two powers of two, stays in registers between its read and its write.

With P the probabilities and D what dropout multiplies by (0 or 1 / (1 - p)), the gradient of the masked, scaled scores is
P * (dy * D - sum(P * dy * D)).
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, Machine, choose, machine, streaming_us
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops import layout
from gpupipe.ops.dropout import philox
from gpupipe.ops.layout import bucket, ceil_div, parts, row_starts, there, wide

LARGEST = 16384
"""Columns; longer rows do not fit in the registers of a program."""
_DRAWS = 65536
_LOG2_E = 1.4426950408889634
_LEAST_SCALE = 1e-30


@jit
def _mask_starts(pointer, row, inner, middle, outer_stride, middle_stride, inner_stride):
    """Pointers (ROWS, 1) to where the rows of a mask start, which may repeat in three ways."""
    far = row // inner
    at = (far // middle).to(tl.int64) * outer_stride + (far % middle).to(tl.int64) * middle_stride
    return pointer + (at + (row % inner).to(tl.int64) * inner_stride)[:, None]


@jit
def _kept(seed, row, FIRST: tl.constexpr, COLUMNS: tl.constexpr, threshold):
    """True where dropout keeps an element.

    Row and column are the counter, so that the backward draws the same. Sixteen bits decide on an element, so eight share a
    draw: with more, drawing would take longer than reading and writing. They are compared where they stand highest, for what
    is below them changes no answer. None as a threshold drops all.
    """
    if threshold is None:
        return tl.zeros((row.shape[0], COLUMNS), tl.int1)
    else:
        eighth = FIRST // 8 + tl.arange(0, COLUMNS // 8)[None, :]
        c0 = eighth + tl.zeros((row.shape[0], 1), tl.int32)
        c1 = row[:, None] + eighth * 0
        a, b, c, d = philox(seed, c0, c1, c0 * 0)
        four = tl.join(tl.join(a, c), tl.join(b, d))
        draws = tl.reshape(tl.join(four << 16, four), (row.shape[0], COLUMNS))
        return draws >= tl.cast(threshold << 16, tl.uint32)


@jit
def _logits(
    x_row, mask_row, mask_step, scale, live, H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr
):
    """scores * scale (unless it is None) + mask of one part of some rows; minus infinity beyond their end."""
    columns = FIRST + tl.arange(0, PART)[None, :]
    inside = there(live, H, FIRST, PART)
    narrow = x_row.dtype.element_ty
    z = wide(x_row + columns, inside)
    if scale is not None:
        z = z * scale
        if ROUND:
            z = z.to(narrow).to(tl.float32)
    if mask_row is not None:
        at = mask_row + columns * mask_step
        if mask_row.dtype.element_ty == tl.int1:
            z = tl.where(tl.load(at, mask=inside, other=0) != 0, z, float("-inf"))
        else:
            z += wide(at, inside)
            if ROUND:
                z = z.to(narrow).to(tl.float32)
    if FIRST + PART > H:
        z = tl.where(columns < H, z, float("-inf"))
    return z


@jit
def _finish(
    e, inverse, y_row, seed, row, threshold, keep_scale, live,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    columns = FIRST + tl.arange(0, PART)[None, :]
    narrow = y_row.dtype.element_ty
    if seed is None:
        y = e * inverse[:, None]
    else:
        if ROUND:
            y = (e * inverse[:, None]).to(narrow).to(tl.float32) * keep_scale
        else:
            y = e * (inverse * keep_scale)[:, None]
        y = tl.where(_kept(seed, row, FIRST, PART, threshold), y, 0.0)
    tl.store(y_row + columns, y.to(narrow), mask=there(live, H, FIRST, PART))


@jit
def softmax_forward(
    x_ptr, mask_ptr, seed_ptr, y_ptr, top_ptr, inverse_ptr, count, x_inner, x_outer_stride, x_inner_stride,
    mask_inner, mask_middle, mask_outer_stride, mask_middle_stride, mask_inner_stride, mask_step,
    scale, exponent, threshold, keep_scale,
    H: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    seed = None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    x_row = row_starts(x_ptr, row, x_inner, x_outer_stride, x_inner_stride)
    y_row = row_starts(y_ptr, row, 1, H, 0)
    mask_row = None
    if mask_ptr is not None:
        mask_row = _mask_starts(
            mask_ptr, row, mask_inner, mask_middle, mask_outer_stride, mask_middle_stride, mask_inner_stride
        )  # fmt: skip
    a = _logits(x_row, mask_row, mask_step, scale, live, H, 0, FIRST, ROUND)
    top = tl.max(a, 1)
    if SECOND > 0:
        b = _logits(x_row, mask_row, mask_step, scale, live, H, FIRST, SECOND, ROUND)
        top = tl.maximum(top, tl.max(b, 1))
    top = tl.where(top == float("-inf"), 0.0, top)
    a = tl.exp2((a - top[:, None]) * exponent)
    total = tl.sum(a, 1)
    if SECOND > 0:
        b = tl.exp2((b - top[:, None]) * exponent)
        total += tl.sum(b, 1)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    if top_ptr is not None:
        tl.store(top_ptr + row, top, mask=live)
        tl.store(inverse_ptr + row, inverse, mask=live)
    _finish(a, inverse, y_row, seed, row, threshold, keep_scale, live, H, 0, FIRST, ROUND)
    if SECOND > 0:
        _finish(b, inverse, y_row, seed, row, threshold, keep_scale, live, H, FIRST, SECOND, ROUND)


@jit
def _load_gradient(
    dy_row, y_row, x_row, mask_row, mask_step, scale, exponent, top, inverse, seed, row, threshold, keep_scale, live,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The probabilities and their gradient, of one part of some rows."""
    columns = FIRST + tl.arange(0, PART)[None, :]
    inside = there(live, H, FIRST, PART)
    narrow = dy_row.dtype.element_ty
    dy = wide(dy_row + columns, inside)
    if seed is None:
        y = wide(y_row + columns, inside)
    else:
        z = _logits(x_row, mask_row, mask_step, scale, live, H, FIRST, PART, ROUND)
        y = tl.exp2((z - top[:, None]) * exponent) * inverse[:, None]
        dy = tl.where(_kept(seed, row, FIRST, PART, threshold), dy * keep_scale, 0.0)
        if ROUND:
            y = y.to(narrow).to(tl.float32)
            dy = dy.to(narrow).to(tl.float32)
    return y, dy


@jit
def _store_gradient(
    y, dy, mean, dx_row, dmask_row, scale, live, narrow,
    H: tl.constexpr, FIRST: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    columns = FIRST + tl.arange(0, PART)[None, :]
    inside = there(live, H, FIRST, PART)
    gradient = y * (dy - mean[:, None])
    if dmask_row is not None:
        tl.store(dmask_row + columns, gradient.to(dmask_row.dtype.element_ty), mask=inside)
    if dx_row is not None:
        if ROUND:
            gradient = gradient.to(narrow).to(tl.float32)
        tl.store(dx_row + columns, (gradient * scale).to(narrow), mask=inside)


@jit
def softmax_backward(
    dy_ptr, y_ptr, x_ptr, mask_ptr, seed_ptr, top_ptr, inverse_ptr, dx_ptr, dmask_ptr, count,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    mask_inner, mask_middle, mask_outer_stride, mask_middle_stride, mask_inner_stride, mask_step,
    scale, exponent, dx_scale, threshold, keep_scale,
    H: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    dy_row = row_starts(dy_ptr, row, dy_inner, dy_outer_stride, dy_inner_stride)
    y_row, x_row, mask_row, dx_row, dmask_row = None, None, None, None, None
    seed, top, inverse = None, None, None
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        top = tl.load(top_ptr + row, mask=live, other=0.0)
        inverse = tl.load(inverse_ptr + row, mask=live, other=0.0)
        x_row = row_starts(x_ptr, row, x_inner, x_outer_stride, x_inner_stride)
        if mask_ptr is not None:
            mask_row = _mask_starts(
                mask_ptr, row, mask_inner, mask_middle, mask_outer_stride, mask_middle_stride, mask_inner_stride
            )  # fmt: skip
    else:
        y_row = row_starts(y_ptr, row, 1, H, 0)
    if dx_ptr is not None:
        dx_row = row_starts(dx_ptr, row, 1, H, 0)
    if dmask_ptr is not None:
        dmask_row = row_starts(dmask_ptr, row, 1, H, 0)
    y0, dy0 = _load_gradient(
        dy_row, y_row, x_row, mask_row, mask_step, scale, exponent, top, inverse, seed, row, threshold, keep_scale, live,
        H, 0, FIRST, ROUND,
    )  # fmt: skip
    mean = tl.sum(y0 * dy0, 1)
    if SECOND > 0:
        y1, dy1 = _load_gradient(
            dy_row, y_row, x_row, mask_row, mask_step, scale, exponent, top, inverse, seed, row, threshold, keep_scale, live,
            H, FIRST, SECOND, ROUND,
        )  # fmt: skip
        mean += tl.sum(y1 * dy1, 1)
    narrow = dy_ptr.dtype.element_ty
    _store_gradient(y0, dy0, mean, dx_row, dmask_row, dx_scale, live, narrow, H, 0, FIRST, ROUND)
    if SECOND > 0:
        _store_gradient(y1, dy1, mean, dx_row, dmask_row, dx_scale, live, narrow, H, FIRST, SECOND, ROUND)


def candidates(size: int, most: int) -> list[dict[str, int]]:
    """Rows a program and warps, with 4 to ``most`` elements in a thread."""
    first, second = parts(max(size, 8))
    second = max(second, 8) if second else 0  # dropout draws for eight columns at a time
    found = []
    for tile_rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8, 16):
            per_thread = tile_rows * (first + second) / (warps * 32)
            if 4 <= per_thread <= most or (tile_rows == 1 and warps == (1 if first < 128 else 16)):
                found.append({"ROWS": tile_rows, "FIRST": first, "SECOND": second, "num_warps": warps})
    return found


def cost_us(gpu: Machine, config: Config, count: int, size: int, item_bytes: int, reads: int, writes: int) -> float:
    """Estimated time of a kernel with so many reads and writes of all elements."""
    tile_rows, warps = config["ROWS"], config["num_warps"]
    per_thread = tile_rows * (config["FIRST"] + config["SECOND"]) / (warps * 32)
    narrowest = tile_rows * min(config["FIRST"], config["SECOND"] or config["FIRST"]) * item_bytes // (32 * warps)
    return (1.0 if narrowest >= 16 else 1.1) * streaming_us(
        gpu,
        total_bytes=count * size * item_bytes * (reads + writes),
        programs=-(-count // tile_rows),
        tile_bytes=tile_rows * size * item_bytes * reads,
        warps=warps,
        registers=int(30 + per_thread * (1 + 1.2 * reads)),
    )


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A tensor and how to step through its rows: rows of a run, strides from run to run and within one."""
    x, outer, inner = layout.rows(x)
    return (x, 1, x.shape[-1], 0) if x.is_contiguous() else (x, layout.row_length(x), outer, inner)


def mask_steps(mask: torch.Tensor | None, shape: torch.Size) -> tuple[torch.Tensor | None, int, int, int, int, int, int]:
    """A mask, copied if need be; sizes of inner and middle dimension; strides of outer, middle and inner, and of columns."""
    if mask is None:
        return None, 1, 1, 0, 0, 0, 0
    whole = mask.expand(shape)
    steps: list[tuple[int, int]] = []  # size and stride, from inside out, of dimensions that are no step of one before
    for size, stride in zip(reversed(shape[:-1]), reversed(whole.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if steps and steps[-1][0] * steps[-1][1] == stride:
            steps[-1] = (steps[-1][0] * size, steps[-1][1])
        else:
            steps.append((size, stride))
    if len(steps) > 3:
        return mask_steps(whole.contiguous(), shape)
    (inner, near), (middle, far), (_, farthest) = steps + [(1, 0)] * (3 - len(steps))
    return mask, inner, middle, farthest, far, near, whole.stride(-1)


def _dropping(p: float) -> tuple[int | None, float]:
    """Draws of 16 bits below the first are dropped, all if it is None; what is kept is multiplied by the second."""
    threshold = round(p * _DRAWS)
    return (None, 0.0) if threshold == _DRAWS else (threshold, _DRAWS / (_DRAWS - threshold))


def _exponents(mask: torch.Tensor | None, scale: float, conservative: bool) -> tuple[float | None, float]:
    """The scale of the logits, and what their distance from the largest is multiplied by for exp2.

    A scale that keeps their order, and after which nothing is added or rounded, is left to the latter: the first is None. One
    that is next to nothing would be 0 there, and what is masked not a number.
    """
    if scale > _LEAST_SCALE and not conservative and (mask is None or mask.dtype == torch.bool):
        return None, scale * _LOG2_E
    return scale, _LOG2_E


def launch_forward(
    scores: torch.Tensor, mask: torch.Tensor | None, scale: float, seed: torch.Tensor | None, p: float, conservative: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result and, with ``seed``, of each row its largest logit and the inverse of its sum."""
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    stats = scores.shape[:-1] if seed is not None else (0,)
    top = torch.empty(stats, dtype=torch.float32, device=scores.device)
    inverse = torch.empty_like(top)
    if scores.numel() == 0:
        return y, top.zero_(), inverse.zero_()
    size = scores.shape[-1]
    count = scores.numel() // size
    x, *x_steps = _rows(scores)
    exponents = _exponents(mask, scale, conservative)
    mask, *steps = mask_steps(mask, scores.shape)
    threshold, keep_scale = _dropping(p)

    def run(config: Config) -> None:
        launch(
            softmax_forward, (ceil_div(count, config["ROWS"]),),
            x, mask, seed, y, *((None, None) if seed is None else (top, inverse)),
            count, *x_steps, *steps, *exponents, threshold, keep_scale, H=size, ROUND=conservative, **config,
        )  # fmt: skip

    key = (str(x.dtype), size, bucket(count), str(mask is None or mask.dtype), seed is None)
    run(
        choose(
            "softmax_forward", key, x.device,
            lambda: candidates(size, 64 if seed is None else 32),  # draws take registers of their own
            lambda config: cost_us(machine(x.device), config, count, size, x.element_size(), 1, 1),
            run,
        )
    )  # fmt: skip
    return y, top, inverse


def launch_backward(
    dy: torch.Tensor,
    y: torch.Tensor | None,
    scores: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    seed: torch.Tensor | None,
    p: float,
    top: torch.Tensor,
    inverse: torch.Tensor,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of scores and, not yet summed to its shape, of a floating mask; empty where ``needs`` says so.

    Either ``y``, the probabilities, or ``scores``, ``seed``, ``top`` and ``inverse`` are there.
    """
    dx = torch.empty(dy.shape if needs[0] else (0,), dtype=dy.dtype, device=dy.device)
    trained = mask is not None and needs[1]
    dmask = dy.new_empty(0) if mask is None or not trained else torch.empty(dy.shape, dtype=mask.dtype, device=dy.device)
    if dy.numel() == 0:
        return dx, dmask
    size = dy.shape[-1]
    count = dy.numel() // size
    of_dy, *dy_steps = _rows(dy)
    x, *x_steps = (None, 1, 0, 0) if scores is None else _rows(scores)
    exponents = _exponents(mask, scale, conservative)
    mask, *steps = mask_steps(mask if seed is not None else None, dy.shape)
    threshold, keep_scale = _dropping(p)

    def run(config: Config) -> None:
        launch(
            softmax_backward, (ceil_div(count, config["ROWS"]),),
            of_dy, y, x, mask, seed, *((None, None) if seed is None else (top, inverse)),
            dx if needs[0] else None, dmask if trained else None,
            count, *dy_steps, *x_steps, *steps, *exponents, scale, threshold, keep_scale, H=size, ROUND=conservative, **config,
        )  # fmt: skip

    key = (str(dy.dtype), size, bucket(count), str(mask is None or mask.dtype), seed is None, *needs)
    run(
        choose(
            "softmax_backward", key, dy.device,
            lambda: candidates(size, 32),
            lambda config: cost_us(machine(dy.device), config, count, size, dy.element_size(), 2, 1 + trained),
            run,
        )
    )  # fmt: skip
    return dx, dmask
