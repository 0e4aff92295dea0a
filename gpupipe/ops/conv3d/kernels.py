"""The pass after a convolution: bias, activation and residual at once; and the same backward, with the sums for the bias.

Both walk memory so that what the convolution (or the op that made the gradient) wrote last comes first: it is still in L2.
"""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, choose, machine
from gpupipe.device.jit import jit, launch, tl
from gpupipe.ops.activations import activated, curve
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

_TOGETHER = 1
"""Each channel's partial sums are added up by themselves."""


@jit
def conv_finish(
    c_ptr, bias_ptr, residual_ptr, y_ptr, size, tiles, blocks, c_batch, c_channel, c_position,
    residual_batch, residual_channel, residual_position, y_channel, y_position,
    C: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """act(c + bias) + residual of one tile."""
    sample, block, tile = place(tl.num_programs(0) - 1 - tl.program_id(0), tiles, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    local = tl.arange(0, POSITIONS)[:, None]
    start = tile.to(tl.int64) * POSITIONS
    mask = (local < size - start) & inside[None, :]
    wide_channel = channel.to(tl.int64)[None, :]
    narrow = c_ptr.dtype.element_ty
    c_ptr += sample * c_batch + start * c_position + wide_channel * c_channel
    y = tl.load(c_ptr + local * c_position, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if bias_ptr is not None:
        y += channel_values(bias_ptr, channel, inside, 0.0)[None, :]
        if ROUND:
            y = y.to(narrow).to(tl.float32)
    y = activated(y, narrow, ACT)
    if residual_ptr is not None:
        if ROUND:
            y = y.to(narrow).to(tl.float32)
        residual_ptr += sample * residual_batch + start * residual_position + wide_channel * residual_channel
        y += tl.load(residual_ptr + local * residual_position, mask=mask, other=0.0).to(tl.float32)
    y_ptr += sample * size * C + start * y_position + wide_channel * y_channel
    tl.store(y_ptr + local * y_position, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def conv_finish_backward(
    dy_ptr, c_ptr, bias_ptr, dz_ptr, partial_ptr, size, chunks, blocks, dy_batch, dy_channel, dy_position,
    c_batch, c_channel, c_position, dz_channel, dz_position,
    C: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    ACT: tl.constexpr, ROUND: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The gradient before the activation, and its sums over one chunk, a channel: to ``partial`` (B, chunks, C)."""
    sample, block, chunk = place(tl.num_programs(0) - 1 - tl.program_id(0), chunks, blocks, LAST)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    wide_channel = channel.to(tl.int64)[None, :]
    bias = channel_values(bias_ptr, channel, inside, 0.0)[None, :]
    sums = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    slab = tl.arange(0, POSITIONS)
    for start in tl.range(chunk.to(tl.int64) * (UNROLL * POSITIONS), size, chunks * (UNROLL * POSITIONS), num_stages=STAGES):
        dy_at = dy_ptr + sample * dy_batch + start * dy_position + wide_channel * dy_channel
        for step in tl.static_range(UNROLL):
            local = (step * POSITIONS + slab)[:, None]
            mask = (local < size - start) & inside[None, :]
            dz = tl.load(dy_at + local * dy_position, mask=mask, other=0.0).to(tl.float32)
            if ACT != "none":
                c_at = c_ptr + sample * c_batch + start * c_position + wide_channel * c_channel
                z = tl.load(c_at + local * c_position, mask=mask, other=0.0).to(tl.float32) + bias
                if ROUND:
                    z = z.to(c_ptr.dtype.element_ty).to(tl.float32)
                _, slope = curve(z, ACT)
                dz = dz * slope
                if ROUND:
                    dz = dz.to(c_ptr.dtype.element_ty).to(tl.float32)
                if dz_ptr is not None:
                    dz_at = dz_ptr + sample * size * C + start * dz_position + wide_channel * dz_channel
                    tl.store(dz_at + local * dz_position, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            if partial_ptr is not None:
                sums += tl.where(mask, dz, 0.0)
    if partial_ptr is not None:
        partial_ptr += (sample * chunks + chunk) * C
        tl.store(partial_ptr + channel, tl.sum(sums, 0), mask=inside)


def launch_finish(
    c: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    last: bool,
    conservative: bool,
) -> torch.Tensor:
    """act(c + bias) + residual, in the memory order ``last`` says, of the residual's type if there is one."""
    return finish_into(
        empty(c.shape, c if residual is None else residual, last), c, bias, residual, activation, last, conservative
    )


def finish_into(
    y: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    last: bool,
    conservative: bool,
) -> torch.Tensor:
    """The same into ``y``, a dense tensor, which may be ``c`` itself."""
    if c.numel() == 0:
        return y
    batch, channels, size = c.shape[0], c.shape[1], positions(c)
    bias = None if bias is None else bias.contiguous()
    of_c = planes(c, last)
    of_residual = None if residual is None else planes(residual, last)
    gpu, item = machine(c.device), c.element_size()

    def run(config: Config, into: torch.Tensor) -> None:
        tiles, blocks = ceil_div(size, config["POSITIONS"]), ceil_div(channels, config["CHANNELS"])
        launch(
            conv_finish, (batch * tiles * blocks,),
            of_c.tensor, bias, None if of_residual is None else of_residual.tensor, into, size, tiles, blocks, *of_c.strides,
            *((0, 0, 0) if of_residual is None else of_residual.strides), *((1, channels) if last else (size, 1)),
            C=channels, ACT=activation, ROUND=conservative, LAST=last, **config,
        )  # fmt: skip

    passes = 2 + (residual is not None)
    config = choose(
        "conv_finish", (str(c.dtype), batch, channels, bucket(size), last, passes, activation), c.device,
        lambda: map_candidates(channels, size, item, last),
        lambda config: map_us(gpu, config, batch, channels, size, item, passes),
        lambda config: run(config, torch.empty_like(y) if y is c else y),  # timing must not change what is read
    )  # fmt: skip
    run(config, y)
    return y


def launch_backward(
    dy: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    last: bool,
    conservative: bool,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of c and bias; empty where ``needs`` says so. ``c`` is None without activation: its gradient is dy then."""
    batch, channels, size = dy.shape[0], dy.shape[1], positions(dy)
    dz = empty(dy.shape, dy if c is None else c, last) if needs[0] else dy.new_empty(0)
    if dy.numel() == 0:
        return dz, dy.new_empty(0) if bias is None or not needs[1] else torch.zeros_like(bias)
    bias = None if bias is None else bias.contiguous()
    of_dy = planes(dy, last)
    of_c = of_dy if c is None else planes(c, last)
    gpu, item = machine(dy.device), dy.element_size()
    partials: list[torch.Tensor | None] = [None]

    def run(config: Config) -> None:
        shares, blocks = chunks(gpu, config, batch, channels, size, _TOGETHER), ceil_div(channels, config["CHANNELS"])
        partials[0] = torch.empty((batch, shares, channels), dtype=torch.float32, device=dy.device) if needs[1] else None
        launch(
            conv_finish_backward, (batch * shares * blocks,),
            of_dy.tensor, None if c is None else of_c.tensor, bias, dz if needs[0] else None, partials[0], size, shares, blocks,
            *of_dy.strides, *of_c.strides, *((1, channels) if last else (size, 1)),
            C=channels, ACT=activation, ROUND=conservative, LAST=last, **tile_of(config),
        )  # fmt: skip

    reads, writes, sums = 1 + (c is not None), int(needs[0]), int(needs[1])
    key = (str(dy.dtype), batch, channels, bucket(size), last, activation, reads, writes, sums)
    run(
        choose(
            "conv_finish_backward", key, dy.device,
            lambda: sum_candidates(channels, size, item, last, unrolls=(1, 2, 4)),
            lambda config: sum_us(
                gpu, config, batch, channels, size, item, _TOGETHER, reads=reads, writes=writes, sums=sums
            ),
            run,
        )
    )  # fmt: skip
    if partials[0] is None or bias is None:
        return dz, dy.new_empty(0)
    return dz, partials[0].sum((0, 1)).to(bias.dtype)
