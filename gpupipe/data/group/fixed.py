"""Batches of a number of clips of one shape."""

from __future__ import annotations

from gpupipe.config import LoaderConfig
from gpupipe.data.group.base import Group, Position, bad_position
from gpupipe.data.order import Order
from gpupipe.types import ClipRequest


class Fixed:
    """Cuts the sequence of samples into batches of ``batch.size`` clips; what remains at its end, as ``batch.last`` says."""

    def __init__(self, order: Order, config: LoaderConfig) -> None:
        self._order = order
        self._last = config.batch.last
        self._visits = config.batch.size // config.clip.clips_per_video

    @property
    def step(self) -> int:
        return self._visits * self._order.world_size

    def count(self, epoch: int) -> int:
        return -(-self._left(0) // self._visits)

    def groups(self, position: Position) -> list[Group]:
        start = position.samples
        requests = self._order.requests(position.epoch, start, self._left(start))
        cuts = range(0, len(requests), self._visits)
        groups = [Group(start // self.step + number, requests[cut : cut + self._visits]) for number, cut in enumerate(cuts)]
        return [group for group in groups if group.index not in position.ahead]

    def after(self, position: Position, index: int) -> Position:
        samples, ahead = position.samples, {*position.ahead, index}
        while samples // self.step in ahead:
            ahead.remove(samples // self.step)
            samples += self.step
        return Position(position.epoch, samples, frozenset(ahead))

    def visits(self, position: Position, index: int) -> list[int]:
        return []

    def check(self, position: Position) -> None:
        most = len(self._order) + self.step  # a last one that was filled up
        if position.samples > most or any(index * self.step > most for index in position.ahead):
            raise bad_position(f"it has more than the {len(self._order)} samples of an epoch")

    def substitute(self, request: ClipRequest) -> ClipRequest:
        return self._order.substitute(request)

    def _left(self, start: int) -> int:
        """Visits to videos that each rank makes in what is left of an epoch of which ``start`` samples are received."""
        left = max(0, len(self._order) - start)
        if self._last == "partial":
            return left // self._order.world_size
        steps = -(-left // self.step) if self._last == "fill" else left // self.step
        return steps * self._visits
