"""Which elements dropout keeps: drawn in the kernel, from a seed on the device, the same in a backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpupipe.device.jit import jit, tl

_here = threading.local()


def drawn_seed(device: torch.device) -> torch.Tensor:
    """The seed of one call, of torch's generator: on the device, so that no host waits and a graph replays other ones."""
    seed = torch.randint(2**62, (1,), device=device)
    own: int = getattr(_here, "own", 0)
    return seed + own if own else seed


@contextmanager
def own_draws(rank: int, device: torch.device, *, when: bool = True) -> Iterator[None]:
    """In this block each rank drops other elements, for each has other columns, though their generators are at one place.

    Afterwards they are at one place again, so that what the ranks do alike stays alike; and a checkpoint that puts the
    generators back makes the same draws once more.

    Args:
        rank: 0 and up.
        device: where is drawn.
        when: False: nothing changes.
    """
    if not when:
        yield
        return
    before = getattr(_here, "own", 0)
    _here.own = rank + 1
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    try:
        if capturing:  # kernels alone run here, which draw by their seed
            yield
            return
        fresh = int(torch.randint(2**62, (1,)))  # of the host's generator, which waits for no device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(fresh + rank)
            if device.type == "cuda":
                torch.cuda.manual_seed(fresh + rank)
            yield
    finally:
        _here.own = before


@jit
def _halves(a, b):
    """The lower and the upper 32 bits of a product, which one instruction makes; Triton's own philox multiplies for each."""
    both = a.to(tl.uint64) * b
    return both.to(tl.uint32), (both >> 32).to(tl.uint32)


@jit
def philox(seed, c0, c1, c2):
    """Four draws of 32 bits a counter (c0, c1, c2, 0), which are int32: as ``tl.philox`` makes them.

    Philox 4x32 (Salmon et al. 2011) with 7 rounds, the fewest that pass BigCrush.
    """
    seed = seed.to(tl.uint64)
    low_key, high_key = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b, c = c0.to(tl.uint32, bitcast=True), c1.to(tl.uint32, bitcast=True), c2.to(tl.uint32, bitcast=True)
    d = a * 0
    for _ in tl.static_range(7):
        low_a, high_a = _halves(a, 0xD2511F53)
        low_c, high_c = _halves(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ low_key, low_c, high_a ^ d ^ high_key, low_a
        low_key = tl.add(low_key, 0x9E3779B9, sanitize_overflow=False)
        high_key = tl.add(high_key, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@jit
def kept(seed, row, first, COLUMNS: tl.constexpr, threshold):
    """True where dropout keeps an element.

    Its row and column are the counter, so that the backward draws the same; four columns share one.
    """
    quad = first // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    c0 = quad + tl.zeros((row.shape[0], 1), tl.int32)
    c1 = (row & 0x7FFFFFFF).to(tl.int32)[:, None] + quad * 0
    c2 = (row >> 31).to(tl.int32)[:, None] + quad * 0
    a, b, c, d = philox(seed, c0, c1, c2)
    draws = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (row.shape[0], COLUMNS))
    return draws.to(tl.int64) >= threshold


def dropping(p: float) -> tuple[int, float]:
    """Draws (32 bits) below the first are dropped; what is kept is multiplied by the second. ``p`` = 1 drops all."""
    return round(p * 2**32), 0.0 if p == 1 else 1 / (1 - p)
