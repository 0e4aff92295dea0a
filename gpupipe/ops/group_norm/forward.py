"""The kernels of group norm, forward: a pass that finds statistics, a small one that finishes them, a pass that applies them.

Statistics are means and squares about them, a channel and a chunk of positions at a time, put together with the formula of
Chan, Golub and LeVeque (1979) in a fixed order. Within a chunk, values are shifted by the mean of its first few, so that
large means cost no digits. The second pass walks memory backwards: what the first read last is still in L2.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl, triton
from gpupipe.ops.activations import activated
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.planes import (
    channel_values,
    chunks,
    count_of,
    empty,
    map_candidates,
    map_us,
    place,
    planes,
    positions,
    sum_candidates,
    sum_us,
    tile_of,
)  # fmt: skip

FINISH = 2048
"""Partial sums that a finishing program loads at a time."""


@jit
def group_norm_stats(
    x_ptr, partial_ptr, size, chunks, blocks, x_batch, x_channel, x_position,
    C: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Mean and squares about it of one chunk, a channel: to ``partial`` (B, chunks, 2, C)."""
    sample, block, chunk = place(tl.program_id(0), chunks, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    x_ptr += sample * x_batch
    slab = tl.arange(0, POSITIONS)
    at = chunk * (UNROLL * POSITIONS) + slab
    ahead = at.to(tl.int64)[:, None] * x_position + channel.to(tl.int64)[None, :] * x_channel
    first = tl.load(x_ptr + ahead, mask=(at < size)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    shift = tl.sum(first, 0) / tl.minimum(size - chunk * (UNROLL * POSITIONS), POSITIONS)

    ones = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    squares = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    for start in tl.range(chunk.to(tl.int64) * (UNROLL * POSITIONS), size, chunks * (UNROLL * POSITIONS), num_stages=STAGES):
        pointer = x_ptr + start * x_position + channel.to(tl.int64)[None, :] * x_channel
        for step in tl.static_range(UNROLL):
            local = (step * POSITIONS + slab)[:, None]
            live = local < size - start
            x = tl.load(pointer + local * x_position, mask=live & inside[None, :], other=0.0).to(tl.float32)
            x = tl.where(live, x - shift[None, :], 0.0)
            ones += x
            squares += x * x

    count = count_of(chunk, chunks, size, UNROLL * POSITIONS).to(tl.float32)
    off = tl.sum(ones, 0) / count
    partial_ptr += (sample * chunks + chunk) * (2 * C)
    tl.store(partial_ptr + channel, shift + off, mask=inside)
    tl.store(partial_ptr + C + channel, tl.maximum(tl.sum(squares, 0) - off * off * count, 0.0), mask=inside)


@jit
def group_norm_finish(
    partial_ptr, weight_ptr, mean_ptr, rstd_ptr, channel_ptr, size, chunks, eps,
    C: tl.constexpr, EACH: tl.constexpr, EACH_PADDED: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (sample, group): mean and 1 / deviation of its ``EACH`` channels.

    To ``channel`` (B, 2, C) the mean, and what the difference from it is multiplied by: ready for wide loads.
    """
    group = tl.program_id(0) % (C // EACH)
    sample = tl.program_id(0) // (C // EACH)
    partial_ptr += sample.to(tl.int64) * chunks * (2 * C) + group * EACH
    within = tl.arange(0, EACH_PADDED)
    shift = tl.load(partial_ptr)
    total = size * 1.0 * EACH

    sums = tl.zeros((AT_ONCE, EACH_PADDED), tl.float32)
    for at in range(0, chunks, AT_ONCE):
        chunk = at + tl.arange(0, AT_ONCE)
        live = (chunk < chunks)[:, None] & (within < EACH)[None, :]
        count = count_of(chunk, chunks, size, TILE).to(tl.float32)[:, None]
        mean = tl.load(partial_ptr + chunk[:, None] * (2 * C) + within[None, :], mask=live, other=0.0)
        sums += tl.where(live, count * (mean - shift), 0.0)
    middle = shift + tl.sum(tl.sum(sums, 0), 0) / total

    sums = tl.zeros((AT_ONCE, EACH_PADDED), tl.float32)
    for at in range(0, chunks, AT_ONCE):
        chunk = at + tl.arange(0, AT_ONCE)
        live = (chunk < chunks)[:, None] & (within < EACH)[None, :]
        count = count_of(chunk, chunks, size, TILE).to(tl.float32)[:, None]
        pointer = partial_ptr + chunk[:, None] * (2 * C) + within[None, :]
        off = tl.load(pointer, mask=live, other=0.0) - middle
        sums += tl.where(live, tl.load(pointer + C, mask=live, other=0.0) + count * off * off, 0.0)
    variance = tl.sum(tl.sum(sums, 0), 0) / total
    rstd = tl.rsqrt(variance + eps)
    tl.store(mean_ptr + tl.program_id(0), middle)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    channel = group * EACH + within
    inside = within < EACH
    channel_ptr += sample.to(tl.int64) * (2 * C) + channel
    tl.store(channel_ptr, middle + tl.zeros((EACH_PADDED,), tl.float32), mask=inside)
    tl.store(channel_ptr + C, rstd * channel_values(weight_ptr, channel, inside, 1.0), mask=inside)


@jit
def group_norm_apply(
    x_ptr, channel_ptr, bias_ptr, y_ptr, size, tiles, blocks, x_batch, x_channel, x_position, y_channel, y_position,
    C: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr,
    ROUND: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Normalises one tile. The first programs take the last tiles. ``WHOLE``: none goes beyond the end, and nothing is masked:
    where bytes and instructions take as long, masks are felt."""
    sample, block, tile = place(tl.num_programs(0) - 1 - tl.program_id(0), tiles, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    local = tl.arange(0, POSITIONS)
    start = tile.to(tl.int64) * POSITIONS
    mask = (local < size - start)[:, None] & inside[None, :]
    wide_channel = channel.to(tl.int64)
    at = x_ptr + sample * x_batch + start * x_position + (wide_channel * x_channel)[None, :] + local[:, None] * x_position
    if WHOLE:
        x = tl.load(at, eviction_policy="evict_first").to(tl.float32)
    else:
        x = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    channel_ptr += sample * (2 * C) + channel
    mean = tl.load(channel_ptr, mask=inside, other=0.0)
    factor = tl.load(channel_ptr + C, mask=inside, other=0.0)
    y = (x - mean[None, :]) * factor[None, :] + channel_values(bias_ptr, channel, inside, 0.0)[None, :]
    if ROUND:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = activated(y, x_ptr.dtype.element_ty, ACT)
    to = y_ptr + sample * size * C + start * y_position + (wide_channel * y_channel)[None, :] + local[:, None] * y_position
    if WHOLE:
        tl.store(to, y.to(y_ptr.dtype.element_ty))
    else:
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_forward(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    last: bool,
    conservative: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, in the memory order ``last`` says, and mean and 1 / deviation (B, groups)."""
    batch, channels = x.shape[:2]
    size, each = positions(x), channels // groups
    y = empty(x.shape, x, last)
    mean = torch.empty((batch, groups), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    parts = planes(x, last)
    weight, bias = (None if value is None else value.contiguous() for value in (weight, bias))
    gpu, item = machine(x.device), x.element_size()
    key = (str(x.dtype), batch, channels, bucket(size), last)
    partials: list[torch.Tensor] = []

    def stats(config: Config) -> None:
        shares, blocks = chunks(gpu, config, batch, channels, size, each), ceil_div(channels, config["CHANNELS"])
        partials[:] = [torch.empty((batch, shares, 2, channels), dtype=torch.float32, device=x.device)]
        launch(
            group_norm_stats, (batch * shares * blocks,),
            parts.tensor, partials[0], size, shares, blocks, *parts.strides, C=channels, LAST=last, **tile_of(config),
        )  # fmt: skip

    config = choose(
        "group_norm_stats", (*key, each), x.device,
        lambda: sum_candidates(channels, size, item, last, unrolls=(2, 4, 8)),
        lambda config: sum_us(gpu, config, batch, channels, size, item, each, reads=1, writes=0, sums=2),
        stats,
    )  # fmt: skip
    stats(config)
    ready = torch.empty((batch, 2, channels), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(each)
    launch(
        group_norm_finish, (batch * groups,), partials[0], weight, mean, rstd, ready, size, partials[0].shape[1], eps,
        C=channels, EACH=each, EACH_PADDED=padded, TILE=config["POSITIONS"] * config["UNROLL"],
        AT_ONCE=max(1, FINISH // padded), num_warps=4,
    )  # fmt: skip

    def apply(config: Config) -> None:
        tiles, blocks = ceil_div(size, config["POSITIONS"]), ceil_div(channels, config["CHANNELS"])
        whole = size % config["POSITIONS"] == 0 and channels % config["CHANNELS"] == 0
        launch(
            group_norm_apply, (batch * tiles * blocks,),
            parts.tensor, ready, bias, y, size, tiles, blocks, *parts.strides,
            *((1, channels) if last else (size, 1)),
            C=channels, ACT=activation, ROUND=conservative, LAST=last, WHOLE=whole, **config,
        )  # fmt: skip

    apply(
        choose(
            "group_norm_apply", (*key, activation), x.device,
            lambda: map_candidates(channels, size, item, last),
            lambda config: map_us(gpu, config, batch, channels, size, item, 2),
            apply,
        )
    )  # fmt: skip
    return y, mean, rstd
