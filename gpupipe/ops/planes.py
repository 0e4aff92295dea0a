"""Tensors (B, C, ...) as batch x channels x positions, in either memory order, and the tiles that kernels cut them into.

Positions (frames, rows and columns) are one dimension to a kernel; either they lie next to each other in memory, or the
channels do (torch's channels-last formats). A tile is positions x channels in both cases; only its proportions differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpupipe.device.autotune import Config, Machine, streaming_us
from gpupipe.device.jit import jit, tl

_VECTOR_BYTES = 16
_WIDEST = 256
"""Channels of a tile, at most, where channels lie next to each other."""
LARGEST = 2**31 - 2**20
"""Positions of a plane, at most: a kernel counts them in 32 bits."""
_PARTIALS = 16384
"""Partial sums, at most, that one program of a finishing kernel adds up."""


@dataclass(frozen=True, slots=True)
class Planes:
    """A tensor that a kernel can step through by three strides, in elements."""

    tensor: torch.Tensor
    batch: int
    channel: int
    position: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.batch, self.channel, self.position


def channels_last(x: torch.Tensor) -> bool:
    """True for a tensor (B, C, ...) whose channels lie next to each other."""
    return x.dim() > 2 and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


def empty(shape: Sequence[int], like: torch.Tensor, last: bool) -> torch.Tensor:
    """A dense tensor of this shape and of the type and device of ``like``, in one of the two memory orders."""
    order = [0, *range(2, len(shape)), 1] if last else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for place in reversed(order):
        strides[place] = step
        step = step * max(shape[place], 1)
    return torch.empty_strided(tuple(shape), strides, dtype=like.dtype, device=like.device)


def planes(x: torch.Tensor, last: bool) -> Planes:
    """A tensor as planes in the memory order asked for: copied where it has another, or gaps between rows of pixels."""
    step = 0  # from one position to the next
    expected = None
    fits = x.shape[1] == 1 or not last or x.stride(1) == 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = stride
            fits = fits and (last or step == 1) and step > 0
        else:
            fits = fits and stride == expected
        expected = stride * size
    if not fits:
        return planes(empty(x.shape, x, last).copy_(x), last)
    return Planes(x, x.stride(0), x.stride(1), step or 1)


def positions(x: torch.Tensor) -> int:
    """How many positions a tensor (B, C, ...) has."""
    return math.prod(x.shape[2:])


@jit
def place(pid, tiles, blocks, LAST: tl.constexpr):
    """Sample, block of channels and tile of positions of a program, counted in the order of memory."""
    if LAST:
        block = pid % blocks
        tile = pid // blocks % tiles
    else:
        tile = pid % tiles
        block = pid // tiles % blocks
    sample = pid // (tiles * blocks)
    return sample.to(tl.int64), block, tile


@jit
def channel_values(pointer, channel, mask, other):
    """One float32 a channel, ``other`` where there is no such tensor."""
    if pointer is None:
        return tl.zeros(channel.shape, tl.float32) + other
    else:
        return tl.load(pointer + channel, mask=mask, other=0.0).to(tl.float32)


@jit
def count_of(chunk, chunks, size, TILE: tl.constexpr):
    """How many of ``size`` positions the program has that takes every ``chunks``-th tile, from ``chunk`` on."""
    tiles = (size + TILE - 1) // TILE
    mine = (tiles - chunk + chunks - 1) // chunks
    return mine * TILE - tl.where(chunk == (tiles - 1) % chunks, tiles * TILE - size, 0)


_HALF_THE_TIME = 0.4
"""Share of the time for which a program that loads nothing ahead has loads under way."""


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _widths(channels: int) -> list[int]:
    """Widths of a tile where channels lie together: the two largest that leave the fewest lanes empty."""
    widths = [16, 32, 64, 128, _WIDEST]
    widths = [width for width in widths if width <= max(16, _power(channels))]
    padded = {width: -(-channels // width) * width for width in widths}
    fewest = min(padded.values())
    return [width for width in reversed(widths) if padded[width] <= 1.05 * fewest][:2]


def _shapes(channels: int, size: int, last: bool, elements: int) -> list[tuple[int, int]]:
    """Positions and channels of tiles with ``elements``."""
    if last:
        return [(min(max(1, elements // width), _power(size)), width) for width in _widths(channels)]
    found = []
    along = [min(elements, _power(size))]
    if -(-size // along[0]) * along[0] > 1.1 * size and along[0] > 64:
        along.append(along[0] // 2)  # fewer empty lanes at the end of each plane
    for steps in along:
        found.append((steps, min(max(1, elements // steps), _power(channels))))
    return found


def map_candidates(channels: int, size: int, item_bytes: int, last: bool) -> list[dict[str, int]]:
    """Tiles for a kernel that turns each element into one other."""
    found = []
    for warps in (4, 8):
        for vectors in (4, 2):
            for steps, width in _shapes(channels, size, last, 32 * warps * vectors * (_VECTOR_BYTES // item_bytes)):
                found.append({"POSITIONS": steps, "CHANNELS": width, "num_warps": warps})
    return [dict(pairs) for pairs in dict.fromkeys(tuple(config.items()) for config in found)]


def map_us(gpu: Machine, config: Config, batch: int, channels: int, size: int, item_bytes: int, passes: int) -> float:
    """Estimated time of such a kernel with so many reads and writes of all elements."""
    steps, width, warps = config["POSITIONS"], config["CHANNELS"], config["num_warps"]
    tiles, blocks = -(-size // steps), -(-channels // width)
    padded = tiles * steps * blocks * width / (size * channels)
    per_thread = steps * width / (32 * warps)
    slow = 0.00125 * per_thread * item_bytes + 0.0035 * warps  # short programs of few warps make way for each other sooner
    return (1 + slow) * streaming_us(
        gpu,
        total_bytes=batch * channels * size * item_bytes * passes * padded,
        programs=batch * tiles * blocks,
        tile_bytes=steps * width * item_bytes * (passes - 1),
        warps=warps,
        registers=int(36 + per_thread * item_bytes * 0.3 * (passes - 1)),
    )


def sum_candidates(channels: int, size: int, item_bytes: int, last: bool, *, unrolls: Sequence[int]) -> list[dict[str, int]]:
    """Tiles for a kernel that sums over positions, and how many programs an SM shall have."""
    found = []
    for warps in (4, 8):
        for steps, width in _shapes(channels, size, last, 32 * warps * (_VECTOR_BYTES // item_bytes)):
            for unroll in unrolls:
                config = {"POSITIONS": steps, "CHANNELS": width, "UNROLL": unroll, "num_warps": warps}
                found += [{**config, "PER_SM": per_sm, "STAGES": stages} for per_sm in (2, 4, 8) for stages in (1, 3)]
    return [dict(pairs) for pairs in dict.fromkeys(tuple(config.items()) for config in found)]


def chunks(gpu: Machine, config: Config, batch: int, channels: int, size: int, together: int) -> int:
    """How many programs share the positions of one block of channels.

    ``together``: channels whose partial sums one program of the finishing kernel adds up.
    """
    tiles = -(-size // (config["POSITIONS"] * config["UNROLL"]))
    wanted = gpu.sms * config["PER_SM"] // (batch * -(-channels // config["CHANNELS"]))
    return max(1, min(tiles, wanted, _PARTIALS // together))


def tile_of(config: Config) -> dict[str, int]:
    """What a launch takes of a candidate of :func:`sum_candidates`."""
    return {name: config[name] for name in ("POSITIONS", "CHANNELS", "UNROLL", "STAGES", "num_warps")}


def sum_us(
    gpu: Machine, config: Config, batch: int, channels: int, size: int, item_bytes: int, together: int,
    *, reads: int, writes: int, sums: int,
) -> float:  # fmt: skip
    """Estimated time of such a kernel, with its partial sums written and read."""
    steps, width, warps, unroll = config["POSITIONS"], config["CHANNELS"], config["num_warps"], config["UNROLL"]
    tiles, blocks = -(-size // (steps * unroll)), -(-channels // width)
    padded = tiles * unroll * steps * blocks * width / (size * channels)
    per_thread, stages = steps * width / (32 * warps), config["STAGES"]
    shares = chunks(gpu, config, batch, channels, size, together)
    return (1 + 0.02 / unroll) * streaming_us(
        gpu,
        total_bytes=batch * channels * (size * item_bytes * (reads + writes) * padded + 8 * sums * shares),
        programs=batch * blocks * shares,
        tile_bytes=steps * width * unroll * item_bytes * reads * (stages - 1 if stages > 1 else _HALF_THE_TIME),
        warps=warps,
        registers=int(40 + per_thread * (unroll * reads * item_bytes * 0.4 + 2 * reads + sums)),
        shared_bytes=steps * width * unroll * item_bytes * reads * (stages - 1),
    )
