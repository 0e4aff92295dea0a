"""Permutations, of a whole list or window by window."""

from __future__ import annotations

import numpy as np


def shuffled(draw: np.random.Generator, size: int, shuffle: bool | int) -> np.ndarray:
    """(size,) int64: each number below ``size`` once.

    With a window of W, numbers are cut into runs of W neighbours, the first one shorter by a draw, so that the cuts lie
    elsewhere in each epoch. The runs come in random order, one after the other, and each of them is shuffled.

    Args:
        shuffle: True: a permutation of all; False: none; a number: the window.
    """
    if shuffle is False or shuffle == 0:
        return np.arange(size)
    if shuffle is True or shuffle == 1 or shuffle >= size:
        return draw.permutation(size)
    window = int(shuffle)
    runs = (np.arange(size) + draw.integers(window)) // window
    turn = draw.permutation(int(runs[-1]) + 1)
    keys = draw.random(size)
    sequence: np.ndarray = np.lexsort((keys, turn[runs]))
    return sequence
