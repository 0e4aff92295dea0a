"""The order of an epoch, which depends on (seed, epoch) alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gpupipe.data.draws import ORDER, SUBSTITUTE, generator
from gpupipe.data.mixture import Mixture
from gpupipe.data.shuffle import shuffled
from gpupipe.types import ClipRequest

_NEAR_ATTEMPTS = 8
"""Stand-ins of the same source and shape that are tried before any other."""


@dataclass(frozen=True, slots=True)
class Order:
    """The sequence of requests that one rank makes in an epoch.

    Samples are numbered over all ranks; rank r takes r, r + world_size, … so that the global sequence is the same for any
    number of ranks, and a run that goes on under another number of them still has each sample once.
    """

    entries: int
    seed: int
    shuffle: bool | int = True
    rank: int = 0
    world_size: int = 1
    mixture: Mixture | None = None
    """Which entries an epoch visits; None: each once."""

    def __len__(self) -> int:
        """Samples of an epoch, over all ranks."""
        return self.entries if self.mixture is None else len(self.mixture)

    def sequence(self, epoch: int) -> np.ndarray:
        """(n,) int64: the entry of each sample of ``epoch``, over all ranks."""
        if self.mixture is not None:
            return self.mixture.entries(self.seed, epoch, self.shuffle)
        return shuffled(generator(self.seed, ORDER, epoch), self.entries, self.shuffle)

    def requests(self, epoch: int, start: int, count: int) -> list[ClipRequest]:
        """``count`` requests of this rank, in the order in which they are delivered, behind the first ``start`` of all ranks.

        Past the last sample the sequence begins again. Numbers go on, so that a video's second clip is not the first one again.
        """
        order = self.sequence(epoch)
        first = start + self.rank
        samples = range(first, first + count * self.world_size, self.world_size)
        return [ClipRequest(self.seed, epoch, sample, int(order[sample % len(order)])) for sample in samples]

    def substitute(
        self, request: ClipRequest, among: np.ndarray | None = None, usable: np.ndarray | None = None
    ) -> ClipRequest:
        """The request that stands in when ``request`` cannot be served: a function of (seed, epoch, sample, attempt).

        In a mixture it is one of the same source, so that the shares stay as they are, as long as there are others in it.

        Args:
            among: ascending entries of which it is one; None: of all.
            usable: entries of which it is one where these are too few, or have failed several times; None: all.
        """
        attempt = request.attempt + 1
        first, behind = (0, self.entries) if self.mixture is None else self.mixture.peers(request.entry)
        draws = generator(request.seed, SUBSTITUTE, request.epoch, request.sample, attempt)
        if among is not None:
            among = among[np.searchsorted(among, first) : np.searchsorted(among, behind)]
        near = behind - first if among is None else len(among)
        if attempt <= _NEAR_ATTEMPTS and near > 1:
            entry = int(draws.integers(first, behind)) if among is None else int(draws.choice(among))
        else:  # there is no other such one, or none that is any good
            entry = int(draws.integers(self.entries)) if usable is None else int(draws.choice(usable))
        return replace(request, entry=entry, attempt=attempt)
