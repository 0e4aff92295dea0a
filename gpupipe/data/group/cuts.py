"""Clips of unlike shapes cut into batches: within a budget, of like cost for all ranks, as a function of the sequence alone."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import Field

from gpupipe.config import LoaderConfig
from gpupipe.config.stage import StageConfig
from gpupipe.data.shape import Shape
from gpupipe.data.transform.picture import CHANNELS
from gpupipe.errors import ConfigError

Step = list[list[int]]
"""The samples of one batch of each rank."""
ShapeOf = Callable[[int], Shape | None]
"""The shape of a sample's clips; None where it has none, and is left out."""
_Count = Annotated[int, Field(ge=1)]


class Rule(StageConfig):
    """All that cuts depend on beside the sequence and the shapes."""

    world_size: Annotated[int, Field(ge=1, le=1 << 16)]
    clips: _Count
    """Clips of a visit to a video, which share a batch."""
    size: _Count
    """Clips in a batch, at most."""
    layout: Literal["stack", "pad", "pack"]
    last: Literal["drop", "partial", "fill"]
    max_tokens: _Count | None
    patch: tuple[_Count, _Count, _Count]
    max_bytes: _Count | None
    item_bytes: _Count
    wait: _Count
    prompt: bool = False
    """A step that has all the clips it may have is given at once, whatever its layout; not so in states of before there was
    this, whose steps must be cut again as they were."""

    @classmethod
    def of(cls, config: LoaderConfig, world_size: int, item_bytes: int) -> Self:
        batch = config.batch
        return cls(
            world_size=world_size,
            clips=config.clip.clips_per_video,
            size=batch.size,
            layout=batch.layout,
            last=batch.last,
            max_tokens=batch.max_tokens,
            patch=batch.patch,
            max_bytes=max(1, int(batch.max_gib * 2**30)) if batch.max_gib is not None else None,
            item_bytes=item_bytes,
            wait=batch.wait,
            prompt=True,
        )

    def key(self, shape: Shape) -> tuple[int, ...]:
        """Clips of equal keys may share a batch."""
        return {"stack": tuple(shape), "pad": shape[1:], "pack": ()}[self.layout]

    def check(self, shape: Shape) -> None:
        """Raises: ConfigError: when not even the clips of one visit of this shape fit a batch, or make no whole patches."""
        uneven = [size % step for size, step in zip(shape, self.patch, strict=True)]
        if self.layout == "pack" and any(uneven):
            raise ConfigError(
                f"clips of {shape.frames} frames of {shape.height}x{shape.width} are not made up of patches of {self.patch}",
                fix="for layout='pack' lengths and sizes must be multiples of batch.patch",
            )
        alone = _Bin()
        if not alone.takes(shape, self):
            tokens, size = shape.tokens(self.patch) * self.clips, shape.values * self.item_bytes * self.clips
            raise ConfigError(
                f"clips of {shape.frames} frames of {shape.height}x{shape.width} do not fit a batch: those of one video have "
                f"{self.clips} clips, {tokens} tokens and {size / 2**30:.3g} GiB",
                fix="raise batch.max_tokens or batch.max_gib, or leave this shape out of batch.buckets",
            )


class Cut(StageConfig):
    """Some steps that were cut by one rule."""

    rule: Rule
    steps: Annotated[int, Field(ge=0)] = 0


@dataclass(slots=True)
class _Bin:
    """One batch under construction."""

    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    longest: Shape | None = None

    def with_one(self, shape: Shape, rule: Rule) -> tuple[int, Shape]:
        """(tokens, the longest clip) with the clips of one more visit."""
        longest = max(shape, self.longest or shape)
        if rule.layout == "pack":
            return self.tokens + rule.clips * shape.tokens(rule.patch), longest
        return (len(self.samples) + 1) * rule.clips * longest.tokens(rule.patch), longest

    def takes(self, shape: Shape, rule: Rule) -> bool:
        clips = (len(self.samples) + 1) * rule.clips
        tokens, longest = self.with_one(shape, rule)
        packed = tokens * CHANNELS * rule.patch[0] * rule.patch[1] * rule.patch[2]
        values = packed if rule.layout == "pack" else clips * longest.values
        return (
            clips <= rule.size
            and (rule.max_tokens is None or tokens <= rule.max_tokens)
            and (rule.max_bytes is None or values * rule.item_bytes <= rule.max_bytes)
        )

    def add(self, sample: int, shape: Shape, rule: Rule) -> None:
        self.tokens, self.longest = self.with_one(shape, rule)
        self.samples.append(sample)


class _Open:
    """A step under construction: a clip goes to the batch that has the fewest tokens so far."""

    def __init__(self, rule: Rule, since: int) -> None:
        self.rule = rule
        self.since = since
        """Place in the sequence of its first sample."""
        self.bins = [_Bin() for _ in range(rule.world_size)]
        self._least = [(0, rank) for rank in range(rule.world_size)]
        self.count = 0

    def takes(self, shape: Shape) -> bool:
        return self.bins[self._least[0][1]].takes(shape, self.rule)

    @property
    def full(self) -> bool:
        """Whether not even the smallest clip finds room: it would go to a batch that has as many as it may have."""
        return (len(self.bins[self._least[0][1]].samples) + 1) * self.rule.clips > self.rule.size

    def add(self, sample: int, shape: Shape) -> None:
        rank = self._least[0][1]
        self.bins[rank].add(sample, shape, self.rule)
        heapq.heapreplace(self._least, (self.bins[rank].tokens, rank))
        self.count += 1

    def taken_out(self) -> tuple[Step, list[int]]:
        """The step as it is, equally many clips for each rank where they are stacked; and the samples that this leaves."""
        if self.rule.layout != "stack":
            return [each.samples for each in self.bins], []
        each_has = self.count // self.rule.world_size
        left = [each.samples[each_has] for each in self.bins if len(each.samples) > each_has]
        return [each.samples[:each_has] for each in self.bins], left


def cut(
    samples: Iterable[int], shape_of: ShapeOf, rule: Rule, total: int, taken: AbstractSet[int] = frozenset()
) -> Iterator[Step]:
    """Cuts a sequence of samples into steps.

    Clips that may share a batch are collected until no more fit; then the step is given. So steps come in the order in which
    they are filled, and none waits longer than ``rule.wait`` samples for clips that are rare.

    Args:
        samples: numbers of the samples that are left of an epoch, ascending.
        total: samples of the epoch. What fills up the last steps are its first ones again, under numbers from there on.
        taken: numbers that were given before, by other rules.
    """
    opened: OrderedDict[tuple[int, ...], _Open] = OrderedDict()
    for place, sample in enumerate(samples):
        shape = shape_of(sample)
        if shape is not None:
            key = rule.key(shape)
            if key in opened and not opened[key].takes(shape):
                yield opened.pop(key).taken_out()[0]
            step = opened.setdefault(key, _Open(rule, place))
            step.add(sample, shape)
            # Where clips are stacked no other shape will come.
            if (rule.layout == "stack" and not step.takes(shape)) or (rule.prompt and step.full):
                yield opened.pop(key).taken_out()[0]
        yield from _overdue(opened, shape_of, place)
    for key, step in opened.items():
        if rule.last == "fill":
            yield from _filled_up(key, step, shape_of, total, taken)
        elif rule.last == "partial" and step.count >= rule.world_size:
            yield step.taken_out()[0]


def _overdue(opened: OrderedDict[tuple[int, ...], _Open], shape_of: ShapeOf, place: int) -> Iterator[Step]:
    """Steps that have waited long enough; one that has not a clip for each rank begins to wait anew."""
    while opened:
        key, oldest = next(iter(opened.items()))
        if place - oldest.since < oldest.rule.wait:
            return
        del opened[key]
        left: Sequence[int] = [sample for each in oldest.bins for sample in each.samples]
        if oldest.count >= oldest.rule.world_size:
            step, left = oldest.taken_out()
            yield step
        if left:
            opened[key] = _Open(oldest.rule, place)
            for sample in sorted(left):
                shape = shape_of(sample)
                assert shape is not None
                opened[key].add(sample, shape)


def _filled_up(key: tuple[int, ...], step: _Open, shape_of: ShapeOf, total: int, taken: AbstractSet[int]) -> Iterator[Step]:
    """A step with as many of the epoch's first clips of its kind as it takes."""
    again = 0
    while True:
        again += total
        for sample in range(total):
            shape = shape_of(sample)
            if shape is None or step.rule.key(shape) != key or sample + again in taken:
                continue
            if not step.takes(shape):
                yield step.taken_out()[0]
                return
            step.add(sample + again, shape)
