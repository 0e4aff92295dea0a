"""Which tiles may serve attention along time, and what each should cost."""

from __future__ import annotations

import torch

from gpupipe.device.autotune import Config, Machine, overlapped_us, streaming_us

_LONGEST = 64
"""Frames whose scores fit in one tile. More fill the tiles of torch's own attention, which then wastes nothing."""
FUSED = 32
"""Frames up to which the norm and the turning fit beside the scores in the registers of the backward."""
WIDEST = 128
"""Columns of a head."""
_FLOPS_PER_US = 2.5e8
"""Products as such small tiles reach them: a quarter of what the tensor cores can."""


_L2_BYTES_PER_US = 5.5e6


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def longest(device: torch.device) -> int:
    """Frames that the kernels take. Before Hopper, products have their operands in registers, too few for 64 rows."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)
    return FUSED if old else _LONGEST


def padded_pairs(dim: int) -> int:
    """Columns of half a head, up to a power of two that a product takes."""
    return max(16, 1 << ((dim + 1) // 2 - 1).bit_length())


def candidates(frames: int, dim: int, share: int) -> list[dict[str, int]]:
    """Rows of a tile, and warps: so many that no thread has more than ``share`` values of a tensor, and never under four."""
    return [
        {"ROWS": rows, "num_warps": warps, "num_stages": 1}
        for rows in (32, 64)
        for warps in (4, 8)
        if rows >= frames and rows * 2 * padded_pairs(dim) <= share * 32 * warps
    ]


def forward_candidates(frames: int, dim: int, heads: int) -> list[dict[str, int]]:
    """The same, with heads that a program takes one after the other, and how many of these are loaded ahead."""
    return [
        {**tile, "AT": at, "STAGES": stages}
        for tile in candidates(frames, dim, FORWARD_SHARE)
        for at in (1, 2, 4, 8)
        for stages in (1, 2, 3)
        if heads % at == 0 and stages <= at
    ]


def backward_candidates(frames: int, dim: int) -> list[dict[str, int]]:
    """The same, with registers that a thread may have at most: a few that spill may cost less than warps that are not there."""
    return [{**tile, "maxnreg": most} for tile in candidates(frames, dim, BACKWARD_SHARE) for most in (255, 168, 128, 96, 80)]


FORWARD_SHARE, BACKWARD_SHARE = 64, 32
"""Values of a tensor in a thread that still leave registers for the rest: more spill."""


def _us(
    gpu: Machine, config: Config, sequences: int, heads: int, dim: int, frames: int, item_bytes: int, *, passes: int,
    reads: int, products: int, tiles: float, turned: bool,
) -> float:  # fmt: skip
    """``passes`` over all tokens; ``tiles`` of float32 (rows x rows or rows x pairs) that a thread's share must hold."""
    rows, warps = config["ROWS"], config["num_warps"]
    pairs = padded_pairs(dim)
    programs = heads * -(-sequences // (rows // frames))
    tile_bytes = rows * dim * item_bytes
    flops = programs * products * 2 * rows * rows * 2 * pairs
    registers = 40 + tiles * rows * max(rows, pairs) / (32 * warps)
    most = config.get("maxnreg", 255)
    angles = turned * programs * rows * pairs * 2 * 4 / config.get("AT", 1)
    streaming = streaming_us(
        gpu,
        total_bytes=passes * sequences * frames * heads * dim * item_bytes,
        programs=programs,
        tile_bytes=tile_bytes * reads,
        warps=warps,
        registers=int(min(registers, most)),
        shared_bytes=int(tile_bytes * (reads + 0.5)),
    )
    spilling = 1 + 0.3 * max(0.0, registers / most - 1)
    return spilling * overlapped_us(streaming + angles / _L2_BYTES_PER_US, flops / _FLOPS_PER_US)


def forward_us(
    gpu: Machine, config: Config, sequences: int, heads: int, dim: int, frames: int, item_bytes: int, turned: bool,
    interleaved: bool,
) -> float:  # fmt: skip
    """Estimated time of the forward kernel: three reads and one write of every token."""
    us = _us(gpu, config, sequences, heads, dim, frames, item_bytes, passes=4, reads=3, products=2, tiles=4, turned=turned)
    if interleaved and config["STAGES"] > 1:  # pairs that are loaded ahead are held in the layout of products, and spill
        us *= 1.5
    elif config["AT"] > 1 and config["STAGES"] == 1:  # nothing is under way while a head is worked on
        us *= 1.35
    return us * (1.0 if config["num_warps"] == 4 else 1.4)


def backward_us(
    gpu: Machine, config: Config, sequences: int, heads: int, dim: int, frames: int, item_bytes: int, turned: bool,
    interleaved: bool,
) -> float:  # fmt: skip
    """Estimated time of the backward kernel: four reads and three writes of every token."""
    us = _us(
        gpu,
        config,
        sequences,
        heads,
        dim,
        frames,
        item_bytes,
        passes=7,
        reads=4,
        products=5,
        tiles=(9 if interleaved else 8) if turned else 2,
        turned=turned,
    )
    us *= 1.0 if config["num_warps"] == 4 else 1.5  # more warps wait for each other longer
    return us * (1.02 if config["maxnreg"] == 255 else 1.0)  # the compiler may take one register too many for one program more
