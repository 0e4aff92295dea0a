"""How the heads of a token are cut and shared out: parts, the launches that may serve, and what each should cost."""

from __future__ import annotations

import math

from gpupipe.device.autotune import Config, Machine, issue_us, overlapped_us, resident, streaming_us, unlike

LARGEST = 16384
"""Elements of a token's queries; more do not fit in the registers of a program."""


def _two(size: int) -> tuple[int, int]:
    """The two powers of two (the second may be 0) that ``size`` is cut into."""
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    if rest == 0:
        return first, 0
    second = 1 << (rest - 1).bit_length()
    return (2 * first, 0) if second >= first else (first, second)


def _whole(size: int) -> int:
    return 1 << (size - 1).bit_length()


def parts(heads: int, dim: int) -> dict[str, int]:
    """Heads and pairs of the first and second part, and the head and pair where the second begins.

    One of heads and pairs is cut in two, whichever leaves fewer lanes waiting.
    """
    pairs = (dim + 1) // 2
    (h_first, h_second), (p_first, p_second) = _two(heads), _two(pairs)
    by_heads = (h_first + h_second) * _whole(pairs)
    by_pairs = (p_first + p_second) * _whole(heads)
    if by_heads <= by_pairs:
        return {"HA": h_first, "PA": _whole(pairs), "HB": h_second, "PB": _whole(pairs), "H1": h_first, "F1": 0}
    wide = _whole(heads)
    return {"HA": wide, "PA": p_first, "HB": wide if p_second else 0, "PB": max(p_second, 1), "H1": 0, "F1": p_first}


def _elements(config: Config) -> int:
    return 2 * (config["HA"] * config["PA"] + config["HB"] * config["PB"])


def _shares_well(per_thread: float, warps: int, most: int) -> bool:
    """Enough elements a thread for wide loads, and few enough for its registers; else the nearest number of warps."""
    return 4 <= per_thread <= most or (per_thread < 4 and warps == 1) or (per_thread > most and warps == 16)


def forward_candidates(heads: int, dim: int) -> list[dict[str, int]]:
    """Tokens a program, warps, and how many tokens are loaded ahead."""
    cut = parts(heads, dim)
    found = []
    for warps in (1, 2, 4, 8, 16):
        per_thread = _elements(cut) / (warps * 32)
        if _shares_well(per_thread, warps, 48):
            for tokens, stages in ((1, 1), (2, 1), (4, 1), (4, 2)):
                found.append({**cut, "TOKENS": tokens, "num_warps": warps, "num_stages": stages})
    return found


def forward_us(gpu: Machine, config: Config, count: int, size: int, item_bytes: int, *, interleaved: bool) -> float:
    """Estimated time of the forward kernel, which reads and writes queries and keys once.

    Halves are loaded each by itself, so that with many threads the smaller part's loads are of less than 16 bytes: a tenth more
    for 8, a quarter for 4.
    """
    warps, ahead = config["num_warps"], config["num_stages"]
    per_thread = _elements(config) / (warps * 32)
    smallest = (config["HB"] or config["HA"]) * config["PB" if config["HB"] else "PA"] * (2 if interleaved else 1)
    narrow = max(0.0, math.log2(16 * warps * 32 / (smallest * item_bytes)))
    return streaming_us(
        gpu,
        total_bytes=4 * count * size * item_bytes,
        programs=2 * -(-count // config["TOKENS"]),
        tile_bytes=size * item_bytes * ahead,
        warps=warps,
        registers=int(36 + 1.6 * per_thread),
        shared_bytes=size * item_bytes * (ahead - 1),
    ) * (1 + 0.01 * (config["TOKENS"] > 1) + 0.12 * narrow)


def backward_candidates(gpu: Machine, heads: int, dim: int, count: int) -> list[dict[str, int]]:
    """Programs a tensor, warps, and how many tokens are loaded ahead."""
    cut = parts(heads, dim)
    found = []
    for warps in (1, 2, 4, 8, 16):
        per_thread = _elements(cut) / (warps * 32)
        if not _shares_well(per_thread, warps, 24):
            continue
        for per_sm in (1, 2, 3, 4, 6, 8):
            if warps * per_sm <= gpu.warps:
                config = {**cut, "PER_SM": per_sm, "num_warps": warps}
                found += [{**config, "num_stages": stages} for stages in (1, 2)]
    return unlike(found, lambda config: programs(gpu, config, count))


def programs(gpu: Machine, config: Config, count: int) -> int:
    """How many share the tokens of a tensor: as many as the GPU is to hold, but no more than there are tokens."""
    return max(1, min(count, gpu.sms * config["PER_SM"] // 2))


def backward_us(
    gpu: Machine, config: Config, count: int, size: int, item_bytes: int, reads: int, summed: int
) -> float:  # fmt: skip
    """Estimated time of the backward kernel: ``reads`` reads and one write of queries and keys; ``summed`` columns of sums."""
    warps, sharing, ahead = config["num_warps"], programs(gpu, config, count), config["num_stages"]
    per_thread = _elements(config) / (warps * 32)
    registers = int(32 + per_thread * (1 + reads + (summed > 0)))
    shared_bytes = size * item_bytes * reads * (ahead - 1)
    streaming = streaming_us(
        gpu,
        total_bytes=2 * (reads + 1) * count * size * item_bytes + 2 * 4 * 2 * sharing * summed,
        programs=2 * sharing,
        tile_bytes=size * item_bytes * reads * ahead,
        warps=warps,
        registers=registers,
        shared_bytes=shared_bytes,
    )
    held = resident(gpu, warps, registers, shared_bytes)
    issuing = issue_us(
        gpu,
        instructions=2 * count * warps * (110 + 17 * per_thread),
        warps=warps * min(config["PER_SM"], held),
    )
    narrower = 1.3 if ahead > 1 else 1.0  # loads that go ahead are narrower
    unlikely = narrower * (1.05 if config["PER_SM"] > held else 1.0)
    return overlapped_us(streaming, issuing) * unlikely
