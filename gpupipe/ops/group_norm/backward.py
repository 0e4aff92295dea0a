"""The kernels of group norm, backward: a pass that sums over positions, a small one that finishes, a pass that writes dx.

With n the normalised value, z = n * weight + bias and dz = dy * act'(z), the gradients of bias and weight are the sums of dz
and dz * n, a channel; and dx = (dz * weight - mean(dz * weight) - n * mean(dz * weight * n)) / deviation, with means over a
group (Wu and He 2018, by the chain rule). Sums are kept a chunk of positions in float32 and added in a fixed order: no atomics.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl, triton
from gpupipe.ops.activations import curve
from gpupipe.ops.group_norm.forward import FINISH
from gpupipe.ops.layout import bucket, ceil_div
from gpupipe.ops.planes import (
    channel_values,
    chunks,
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


@jit
def _group_values(pointer, sample, channel, inside, C: tl.constexpr, EACH: tl.constexpr):
    """What is one value a group, for channels."""
    return tl.load(pointer + sample * (C // EACH) + channel // EACH, mask=inside, other=0.0)


@jit
def _dz(dy, off, factor, bias, narrow, ACT: tl.constexpr, ROUND: tl.constexpr):
    """The gradient before the activation, of ``off`` from the mean."""
    if ACT != "none":
        z = off * factor + bias
        if ROUND:
            z = z.to(narrow).to(tl.float32)
        _, slope = curve(z, ACT)
        dy = dy * slope
        if ROUND:
            dy = dy.to(narrow).to(tl.float32)
    return dy


@jit
def group_norm_sums(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, partial_ptr, size, chunks, blocks,
    dy_batch, dy_channel, dy_position, x_batch, x_channel, x_position,
    C: tl.constexpr, EACH: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sums of dz and dz * n over one chunk, a channel: to ``partial`` (B, chunks, 2, C)."""
    sample, block, chunk = place(tl.program_id(0), chunks, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    wide_channel = channel.to(tl.int64)[None, :]
    dy_ptr += sample * dy_batch
    x_ptr += sample * x_batch
    mean = _group_values(mean_ptr, sample, channel, inside, C, EACH)
    rstd = _group_values(rstd_ptr, sample, channel, inside, C, EACH)
    factor = (rstd * channel_values(weight_ptr, channel, inside, 1.0))[None, :]
    bias = channel_values(bias_ptr, channel, inside, 0.0)[None, :]
    ones = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    products = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    slab = tl.arange(0, POSITIONS)
    for start in tl.range(chunk.to(tl.int64) * (UNROLL * POSITIONS), size, chunks * (UNROLL * POSITIONS), num_stages=STAGES):
        x_at = x_ptr + start * x_position + wide_channel * x_channel
        dy_at = dy_ptr + start * dy_position + wide_channel * dy_channel
        for step in tl.static_range(UNROLL):
            local = (step * POSITIONS + slab)[:, None]
            mask = (local < size - start) & inside[None, :]
            off = tl.load(x_at + local * x_position, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
            dz = tl.load(dy_at + local * dy_position, mask=mask, other=0.0).to(tl.float32)
            dz = _dz(dz, off, factor, bias, x_ptr.dtype.element_ty, ACT, ROUND)
            ones += tl.where(mask, dz, 0.0)
            products += tl.where(mask, dz * off, 0.0)
    partial_ptr += (sample * chunks + chunk) * (2 * C)
    tl.store(partial_ptr + channel, tl.sum(ones, 0), mask=inside)
    tl.store(partial_ptr + C + channel, tl.sum(products, 0) * rstd, mask=inside)


@jit
def group_norm_finish_sums(
    partial_ptr, weight_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, channel_ptr, size, chunks,
    C: tl.constexpr, EACH: tl.constexpr, EACH_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (sample, group): the sums of its channels, and what dx needs, a channel.

    To ``channel`` (B, 4, C) the mean, what the difference from it was multiplied by, and two values of which the first and that
    difference times the second are taken off.
    """
    group = tl.program_id(0) % (C // EACH)
    sample = (tl.program_id(0) // (C // EACH)).to(tl.int64)
    within = tl.arange(0, EACH_PADDED)
    inside = within < EACH
    channel = group * EACH + within
    partial_ptr += sample * chunks * (2 * C)
    ones = tl.zeros((AT_ONCE, EACH_PADDED), tl.float32)
    products = tl.zeros((AT_ONCE, EACH_PADDED), tl.float32)
    for at in range(0, chunks, AT_ONCE):
        chunk = at + tl.arange(0, AT_ONCE)
        live = (chunk < chunks)[:, None] & inside[None, :]
        pointer = partial_ptr + chunk[:, None] * (2 * C) + channel[None, :]
        ones += tl.load(pointer, mask=live, other=0.0)
        products += tl.load(pointer + C, mask=live, other=0.0)
    one = tl.sum(ones, 0)
    product = tl.sum(products, 0)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + sample * C + channel, one.to(dbias_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + sample * C + channel, product.to(dweight_ptr.dtype.element_ty), mask=inside)
    weight = channel_values(weight_ptr, channel, inside, 1.0)
    rstd = tl.load(rstd_ptr + tl.program_id(0))
    total = size * 1.0 * EACH
    level = tl.sum(tl.where(inside, weight * one, 0.0), 0) / total * rstd
    tilt = tl.sum(tl.where(inside, weight * product, 0.0), 0) / total * rstd * rstd
    spread = tl.zeros((EACH_PADDED,), tl.float32)
    channel_ptr += sample * (4 * C) + channel
    tl.store(channel_ptr, tl.load(mean_ptr + tl.program_id(0)) + spread, mask=inside)
    tl.store(channel_ptr + C, rstd * weight, mask=inside)
    tl.store(channel_ptr + 2 * C, level + spread, mask=inside)
    tl.store(channel_ptr + 3 * C, tilt + spread, mask=inside)


@jit
def group_norm_dx(
    dy_ptr, x_ptr, channel_ptr, bias_ptr, dx_ptr, size, tiles, blocks,
    dy_batch, dy_channel, dy_position, x_batch, x_channel, x_position, dx_channel, dx_position,
    C: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """dx of one tile. The first programs take the last tiles."""
    sample, block, tile = place(tl.num_programs(0) - 1 - tl.program_id(0), tiles, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    local = tl.arange(0, POSITIONS)
    start = tile.to(tl.int64) * POSITIONS
    mask = (local < size - start)[:, None] & inside[None, :]
    wide_channel = channel.to(tl.int64)[None, :]
    dy_ptr += sample * dy_batch + start * dy_position + wide_channel * dy_channel
    x_ptr += sample * x_batch + start * x_position + wide_channel * x_channel
    x = tl.load(x_ptr + local[:, None] * x_position, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dz = tl.load(dy_ptr + local[:, None] * dy_position, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    channel_ptr += sample * (4 * C) + channel
    off = x - tl.load(channel_ptr, mask=inside, other=0.0)[None, :]
    factor = tl.load(channel_ptr + C, mask=inside, other=0.0)[None, :]
    narrow = dx_ptr.dtype.element_ty
    dz = _dz(dz, off, factor, channel_values(bias_ptr, channel, inside, 0.0)[None, :], narrow, ACT, ROUND)
    level = tl.load(channel_ptr + 2 * C, mask=inside, other=0.0)[None, :]
    tilt = tl.load(channel_ptr + 3 * C, mask=inside, other=0.0)[None, :]
    dx = dz * factor - level - off * tilt
    dx_ptr += sample * size * C + start * dx_position + wide_channel * dx_channel
    tl.store(dx_ptr + local[:, None] * dx_position, dx.to(narrow), mask=mask)


def launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    activation: str,
    last: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and bias; empty where ``needs`` (in that order) says so."""
    batch, channels = x.shape[:2]
    size, each = positions(x), channels // groups
    dx = empty(x.shape, x, last) if needs[0] else x.new_empty(0)
    dweight, dbias = (
        torch.empty(value.shape, dtype=value.dtype, device=x.device) if need and value is not None else None
        for value, need in ((weight, needs[1]), (bias, needs[2]))
    )
    if x.numel() == 0:
        return dx, *(x.new_empty(0) if value is None else value.zero_() for value in (dweight, dbias))  # type: ignore[return-value]
    of_dy, of_x = planes(dy, last), planes(x, last)
    weight, bias = (None if value is None else value.contiguous() for value in (weight, bias))
    gpu, item = machine(x.device), x.element_size()
    key = (str(x.dtype), batch, channels, bucket(size), last)
    partials: list[torch.Tensor] = []

    def sums(config: Config) -> None:
        shares, blocks = chunks(gpu, config, batch, channels, size, each), ceil_div(channels, config["CHANNELS"])
        partials[:] = [torch.empty((batch, shares, 2, channels), dtype=torch.float32, device=x.device)]
        launch(
            group_norm_sums, (batch * shares * blocks,),
            of_dy.tensor, of_x.tensor, weight, bias, mean, rstd, partials[0], size, shares, blocks,
            *of_dy.strides, *of_x.strides,
            C=channels, EACH=each, ACT=activation, ROUND=conservative, LAST=last, **tile_of(config),
        )  # fmt: skip

    sums(
        choose(
            "group_norm_sums", (*key, each, activation), x.device,
            lambda: sum_candidates(channels, size, item, last, unrolls=(1, 2, 4)),
            lambda config: sum_us(gpu, config, batch, channels, size, item, each, reads=2, writes=0, sums=2),
            sums,
        )
    )  # fmt: skip
    padded = triton.next_power_of_2(each)
    ready = torch.empty((batch, 4, channels), dtype=torch.float32, device=x.device)
    alone = batch == 1
    each_weight, each_bias = (
        value if value is None or alone else torch.empty((batch, channels), dtype=torch.float32, device=x.device)
        for value in (dweight, dbias)
    )
    launch(
        group_norm_finish_sums, (batch * groups,),
        partials[0], weight, mean, rstd, each_weight, each_bias, ready, size, partials[0].shape[1],
        C=channels, EACH=each, EACH_PADDED=padded, AT_ONCE=max(1, FINISH // padded), num_warps=4,
    )  # fmt: skip

    def write(config: Config) -> None:
        tiles, blocks = ceil_div(size, config["POSITIONS"]), ceil_div(channels, config["CHANNELS"])
        launch(
            group_norm_dx, (batch * tiles * blocks,),
            of_dy.tensor, of_x.tensor, ready, bias, dx, size, tiles, blocks, *of_dy.strides, *of_x.strides,
            *((1, channels) if last else (size, 1)),
            C=channels, ACT=activation, ROUND=conservative, LAST=last, **config,
        )  # fmt: skip

    if needs[0]:
        write(
            choose(
                "group_norm_dx", (*key, activation), x.device,
                lambda: map_candidates(channels, size, item, last),
                lambda config: map_us(gpu, config, batch, channels, size, item, 3),
                write,
            )
        )  # fmt: skip
    if not alone:
        dweight = None if each_weight is None or weight is None else each_weight.sum(0).to(weight.dtype)
        dbias = None if each_bias is None or bias is None else each_bias.sum(0).to(bias.dtype)
    return dx, *(x.new_empty(0) if value is None else value for value in (dweight, dbias))  # type: ignore[return-value]
