"""Batches planned from the shapes of their clips."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from gpupipe.config import LoaderConfig
from gpupipe.data.group.base import Group, Position, bad_position
from gpupipe.data.group.cuts import Cut, Rule, Step, cut
from gpupipe.data.order import Order
from gpupipe.data.shape import Shape
from gpupipe.types import ClipRequest

_KEPT_PLANS = 3
"""Of this epoch, of what is left of it for another rule, and of the next one, whose length is asked for."""


class Planned:
    """Cuts the sequence of samples so that the clips of a batch fit each other and a budget.

    Args:
        shapes: of the clips of each entry; None for one that cannot be indexed, which is left out.
        item_bytes: of a number in a batch.

    Raises:
        ConfigError: when a shape does not fit a batch.
    """

    step = 1

    def __init__(self, order: Order, config: LoaderConfig, shapes: Sequence[Shape | None], item_bytes: int) -> None:
        self._order = order
        self._shapes = shapes
        self._rule = Rule.of(config, order.world_size, item_bytes)
        self._planned: OrderedDict[tuple[int, tuple[Cut, ...]], list[Step]] = OrderedDict()
        self._usable = np.array([entry for entry, shape in enumerate(shapes) if shape is not None])
        self._entries: dict[Shape, np.ndarray] = {}
        for shape in set(filter(None, shapes)):
            self._rule.check(shape)
            self._entries[shape] = np.array([entry for entry, each in enumerate(shapes) if each == shape])

    def count(self, epoch: int) -> int:
        return len(self._steps(epoch, ()))

    def groups(self, position: Position) -> list[Group]:
        done = self._cuts(position)
        steps = self._steps(position.epoch, done[:-1])
        sequence = self._order.sequence(position.epoch)
        first = sum(each.steps for each in done[:-1])
        return [
            Group(
                first + number, [self._request(position.epoch, sample, sequence) for sample in steps[number][self._order.rank]]
            )
            for number in range(done[-1].steps, len(steps))
            if first + number not in position.ahead
        ]

    def after(self, position: Position, index: int) -> Position:
        done = self._cuts(position)
        steps = self._steps(position.epoch, done[:-1])
        first, count = sum(each.steps for each in done[:-1]), done[-1].steps
        samples, ahead = position.samples, {*position.ahead, index}
        while first + count in ahead:
            ahead.remove(first + count)
            samples += sum(map(len, steps[count]))
            count += 1
        cuts = (*done[:-1], Cut(rule=self._rule, steps=count))
        return Position(position.epoch, samples, frozenset(ahead), cuts)

    def visits(self, position: Position, index: int) -> list[int]:
        done = self._cuts(position)
        step = self._steps(position.epoch, done[:-1])[index - sum(each.steps for each in done[:-1])]
        return [len(batch) for batch in step]

    def check(self, position: Position) -> None:
        done = self._cuts(position)
        if position.samples and not position.cuts:
            raise bad_position("it does not say how batches were cut")
        for number, each in enumerate(done):
            if each.steps > len(self._plan(position.epoch, done[:number], each.rule)):
                raise bad_position(f"it counts {each.steps} steps, of which there are fewer")
        first, steps = sum(each.steps for each in done[:-1]), self._steps(position.epoch, done[:-1])
        if any(index - first >= len(steps) for index in position.ahead):
            raise bad_position(f"it has batch {max(position.ahead)}, of {first + len(steps)}")

    def substitute(self, request: ClipRequest) -> ClipRequest:
        assert request.shape is not None
        return self._order.substitute(request, self._entries[Shape(*request.shape)], self._usable)

    def fits(self, position: Position) -> bool:
        """Whether this loader cuts as the position's last steps were cut."""
        return not position.cuts or position.cuts[-1].rule == self._rule

    def _cuts(self, position: Position) -> tuple[Cut, ...]:
        """What was done, the last of it by this loader's own rule."""
        done = position.cuts
        return done if done and done[-1].rule == self._rule else (*done, Cut(rule=self._rule))

    def _request(self, epoch: int, sample: int, sequence: np.ndarray) -> ClipRequest:
        entry = int(sequence[sample % len(sequence)])
        return ClipRequest(self._order.seed, epoch, sample, entry, shape=self._shapes[entry])

    def _steps(self, epoch: int, done: tuple[Cut, ...]) -> list[Step]:
        """The steps of what ``done`` has left of an epoch."""
        key = epoch, done
        if key not in self._planned:
            self._planned[key] = self._plan(epoch, done)
            while len(self._planned) > _KEPT_PLANS:
                self._planned.popitem(last=False)
        self._planned.move_to_end(key)
        return self._planned[key]

    def _plan(self, epoch: int, done: tuple[Cut, ...], rule: Rule | None = None) -> list[Step]:
        sequence = self._order.sequence(epoch)
        total = len(sequence)
        of_samples: list[Shape | None] = [self._shapes[int(entry)] for entry in sequence]
        left, taken = list(range(total)), set[int]()

        def shape_of(sample: int) -> Shape | None:
            return of_samples[sample]

        for before in done:
            for step in islice(cut(left, shape_of, before.rule, total, taken), before.steps):
                taken.update(sample for batch in step for sample in batch)
            left = [sample for sample in left if sample not in taken]
        return list(cut(left, shape_of, rule or self._rule, total, taken))
