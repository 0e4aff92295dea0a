"""The source of all randomness: generators that are functions of what they are for."""

from __future__ import annotations

import numpy as np

from gpupipe.types import ClipRequest

ORDER, SUBSTITUTE, FRAMES, AUGMENT, MIX, BEFORE, AFTER, SLOTS, ROUNDS = range(9)
"""Independent streams of random numbers, one a purpose."""


def generator(seed: int, *key: int) -> np.random.Generator:
    """A generator for one purpose: equal keys give equal numbers, on any machine and in any order of calls.

    Seeded through NumPy's SeedSequence, which keeps streams of different keys independent.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed & 0xFFFF_FFFF_FFFF_FFFF, *key])))


def clip_generator(request: ClipRequest, purpose: int, clip: int = 0) -> np.random.Generator:
    """The generator of one of a request's clips for a purpose; for ``MIX`` that of the batch whose first clip it is."""
    return generator(request.seed, purpose, request.epoch, request.sample, request.attempt, clip)
