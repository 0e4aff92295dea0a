"""Sources mixed by weight: which entries an epoch visits, and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

import numpy as np

from gpupipe.data.draws import ROUNDS, SLOTS, generator
from gpupipe.data.shuffle import shuffled
from gpupipe.errors import ConfigError

Length = int | Literal["total", "first_exhausted", "all_exhausted"]

_TOGETHER = 4096
"""Samples for which one generator draws the rounds, where these are shorter."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources that follow one another in the list of entries, and how many samples of an epoch each of them gives.

    Each source is gone through in rounds, every round a new permutation of all of it, and an epoch takes up each where the one
    before left it. So a source that is cut short in one epoch goes on in the next, and none of its videos comes again before
    all have come. That too is a function of (seed, epoch) alone.

    Attributes:
        sizes: entries of each source.
        counts: samples of it in an epoch.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float], length: Length) -> Self:
        """The mixture of these weights: shares of an epoch of ``length`` samples are exact to rounding.

        Raises:
            ConfigError: when a source with a weight is empty.
        """
        shares = [Fraction(repr(float(weight))) for weight in weights]
        shares = [share / sum(shares) for share in shares]
        empty = next((k for k, share in enumerate(shares) if share and not sizes[k]), None)
        if empty is not None:
            raise ConfigError(
                f"source.weights gives {weights[empty]} to item {empty} of videos, of which nothing is left",
                fix="give it the weight 0, or loosen source.filter",
            )
        needs = [size / share for size, share in zip(sizes, shares, strict=True) if share]
        if length == "total":
            total = sum(sizes)
        elif length == "first_exhausted":
            total = math.floor(min(needs))
        elif length == "all_exhausted":
            total = math.ceil(max(needs))
        else:
            total = length
        return cls(tuple(sizes), _rounded([share * total for share in shares], total))

    def __len__(self) -> int:
        return sum(self.counts)

    def entries(self, seed: int, epoch: int, shuffle: bool | int) -> np.ndarray:
        """(N,) int64: the entry of each sample of an epoch. Without ``shuffle`` sources alternate as evenly as they can."""
        places = np.repeat(np.arange(len(self.sizes)), self.counts)
        if shuffle:
            places = generator(seed, SLOTS, epoch).permutation(places)
        else:
            due = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts if count])
            places = places[np.argsort(due, kind="stable")]
        result = np.empty(len(places), np.int64)
        first = 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            result[places == source] = first + _stretch(size, epoch * count, count, seed, source, shuffle)
            first += size
        return result

    def peers(self, entry: int) -> tuple[int, int]:
        """The entries of the same source: (first, behind the last)."""
        first = 0
        for size in self.sizes:
            if entry < first + size:
                return first, first + size
            first += size
        raise IndexError(entry)


def _rounded(exact: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Whole numbers of the given sum, each the one above or below its exact value: the largest remainders are rounded up."""
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


def _stretch(size: int, begin: int, count: int, seed: int, source: int, shuffle: bool | int) -> np.ndarray:
    """``count`` samples of a source's endless sequence of rounds, from sample ``begin`` on."""
    if not shuffle or not count:
        return (np.arange(count) + begin % max(size, 1)) % max(size, 1)
    rounds = -(-_TOGETHER // size)
    block = size * rounds
    parts = []
    for number in range(begin // block, -(-(begin + count) // block)):
        draw = generator(seed, ROUNDS, source, number)
        if shuffle > 1:  # a window
            parts += [shuffled(draw, size, shuffle) for _ in range(rounds)]
        else:
            parts.append(draw.permuted(np.tile(np.arange(size), (rounds, 1)), axis=1).ravel())
    sequence: np.ndarray = np.concatenate(parts)
    return sequence[begin % block :][:count]
