"""Which elements dropout keeps: drawn in the kernel, from a seed on the device, the same in a backward."""

from __future__ import annotations

from gpupipe.device.jit import jit, tl


@jit
def kept(seed, row, first, COLUMNS: tl.constexpr, threshold):
    """True where dropout keeps an element: by Philox 4x32 (Salmon et al. 2011) with 7 rounds, the fewest that pass BigCrush.

    The element's row and column are the counter, so that the backward draws the same; four columns share one.
    """
    quad = first // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    c0 = quad + tl.zeros((row.shape[0], 1), tl.int32)
    c1 = (row & 0x7FFFFFFF).to(tl.int32)[:, None] + quad * 0
    c2 = (row >> 31).to(tl.int32)[:, None] + quad * 0
    a, b, c, d = tl.philox(seed, c0, c1, c2, c0 * 0, 7)
    draws = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (row.shape[0], COLUMNS))
    return draws.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold


def dropping(p: float) -> tuple[int, float]:
    """Draws (32 bits) below the first are dropped; what is kept is multiplied by the second. ``p`` = 1 drops all."""
    return round(p * 2**32), 0.0 if p == 1 else 1 / (1 - p)
