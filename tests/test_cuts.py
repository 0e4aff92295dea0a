"""Batches planned from shapes: within their budget, of like cost for all ranks, complete, and a function of the sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.config import BucketsConfig, LoaderConfig
from gpupipe.data.group import Cut, Planned, Position
from gpupipe.data.group.base import parts_of
from gpupipe.data.group.cuts import Rule, cut
from gpupipe.data.order import Order
from gpupipe.data.shape import Shape
from gpupipe.errors import ConfigError
from gpupipe.types import ClipRequest

KINDS = [Shape(4, 32, 32), Shape(8, 32, 32), Shape(16, 32, 32), Shape(8, 16, 64), Shape(4, 64, 16)]
PATCH = (1, 16, 16)


def config(**batch: Any) -> LoaderConfig:
    return LoaderConfig(batch={"size": 6, "buckets": {"frames": [4, 8]}, "patch": PATCH, **batch})


def planned(shapes: list[Shape | None], rank: int = 0, world: int = 1, seed: int = 3, **batch: Any) -> Planned:
    return Planned(Order(len(shapes), seed, True, rank, world), config(**batch), shapes, item_bytes=2)


LISTS = st.lists(st.sampled_from([*KINDS, None]), min_size=1, max_size=60)
LAYOUTS = st.sampled_from(["stack", "pad", "pack"])
LAST = st.sampled_from(["drop", "partial", "fill"])


@settings(max_examples=300)
@given(LISTS, LAYOUTS, LAST, st.integers(1, 4), st.sampled_from([None, 64, 100, 200]), st.integers(1, 40))
def test_every_batch_keeps_to_the_rules(
    shapes: list[Shape | None], layout: str, last: str, world: int, tokens: int | None, wait: int
) -> None:
    if not any(shapes):
        return
    ranks = [planned(shapes, rank, world, layout=layout, last=last, max_tokens=tokens, wait=wait) for rank in range(world)]
    found = [each.groups(Position()) for each in ranks]
    assert {len(groups) for groups in found} == {ranks[0].count(0)}, "ranks that differ would wait for each other"
    samples = Counter(request.sample for groups in found for group in groups for request in group.requests)
    assert max(samples.values(), default=1) == 1, "no sample twice"
    for step in zip(*found, strict=True):
        for group in step:
            assert group.requests, "no empty batch"
            assert len(group.requests) <= 6
            mine = [Shape(*request.shape) for request in group.requests if request.shape is not None]
            assert mine == [shapes[request.entry] for request in group.requests]
            if layout == "stack":
                assert len(set(mine)) == 1
            elif layout == "pad":
                assert len({shape[1:] for shape in mine}) == 1
            if tokens is not None:
                longest = max(mine)
                cost = sum(shape.tokens(PATCH) for shape in mine) if layout == "pack" else len(mine) * longest.tokens(PATCH)
                assert cost <= tokens
        if layout == "stack":
            assert len({(len(group.requests), group.requests[0].shape) for group in step}) == 1, "all ranks do like work"
    usable = sum(shape is not None for shape in shapes)
    if last == "fill":
        base = {sample for sample in samples if sample < len(shapes)}
        assert len(base) == usable, "no video is left out"


@pytest.mark.parametrize("layout", ["stack", "pad", "pack"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_full_batch_is_given_though_no_clip_comes_after_it(layout: str, world: int) -> None:
    for videos, full in ((6 * world, 1), (12 * world, 2), (12 * world - 1, 1)):
        groups = planned([KINDS[0]] * videos, world=world, layout=layout).groups(Position())
        assert [len(group.requests) for group in groups] == [6] * full


def test_an_epoch_that_was_cut_before_goes_on_as_it_was_cut_there() -> None:
    """Before full steps were given at once, one waited for the next clip: states tell of steps in that order."""
    shapes: list[Shape | None] = [KINDS[0]] * 6 + [KINDS[3]] * 6 + [KINDS[0], KINDS[3]]
    new = Rule.of(config(layout="pad", last="partial"), 1, 2)
    old = Rule.parse({name: value for name, value in new.model_dump().items() if name != "prompt"})
    assert [step[0] for step in cut(range(14), shapes.__getitem__, new, 14)] == [[*range(6)], [*range(6, 12)], [12], [13]]
    assert [step[0] for step in cut(range(14), shapes.__getitem__, old, 14)] == [[*range(6)], [*range(6, 12)], [12], [13]]
    shapes = [KINDS[0]] * 6 + [KINDS[3]] * 7 + [KINDS[0]]
    assert [step[0][0] for step in cut(range(14), shapes.__getitem__, new, 14)][:2] == [0, 6]
    assert [step[0][0] for step in cut(range(14), shapes.__getitem__, old, 14)][:2] == [6, 0]


@settings(max_examples=100)
@given(LISTS, LAYOUTS, LAST, st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6))
def test_another_number_of_ranks_takes_up_what_is_left(
    shapes: list[Shape | None], layout: str, last: str, before: int, after: int, steps: int, more: int
) -> None:
    """Each sample once, whatever was planned before; twice interrupted."""
    position, seen = Position(), list[int]()
    for world, count in ((before, steps), (after, more), (before, 100)):
        ranks = [planned(shapes, rank, world, layout=layout, last=last) for rank in range(world)]
        groups = [each.groups(position) for each in ranks]
        for step in list(zip(*groups, strict=True))[:count]:
            seen += [request.sample for group in step for request in group.requests]
            position = ranks[0].after(position, step[0].index)
            assert position.samples == len(seen)
    assert len(seen) == len(set(seen))
    if last == "fill":
        assert {sample for sample in seen if sample < len(shapes)} == {k for k, shape in enumerate(by_sample(shapes)) if shape}


def by_sample(shapes: list[Shape | None]) -> list[Shape | None]:
    return [shapes[entry] for entry in Order(len(shapes), 3).sequence(0)]


@given(LISTS, LAYOUTS, LAST, st.integers(0, 10))
def test_what_is_left_after_an_interruption_is_what_would_have_come(
    shapes: list[Shape | None], layout: str, last: str, steps: int
) -> None:
    one = planned(shapes, layout=layout, last=last)
    whole, position = one.groups(Position()), Position()
    for group in whole[:steps]:
        position = one.after(position, group.index)
    assert planned(shapes, layout=layout, last=last).groups(position) == whole[steps:]


@given(LISTS, st.randoms(use_true_random=False))
def test_batches_received_out_of_order_do_not_come_again(shapes: list[Shape | None], chance: Any) -> None:
    one = planned(shapes, layout="pack", max_tokens=100)
    whole = one.groups(Position())
    shuffled = chance.sample(whole, len(whole))
    position = Position()
    for number, group in enumerate(shuffled):
        position = one.after(position, group.index)
        left = planned(shapes, layout="pack", max_tokens=100).groups(position)
        assert sorted(each.index for each in left) == sorted(each.index for each in shuffled[number + 1 :])


def test_a_rare_shape_waits_for_a_bounded_number_of_samples() -> None:
    rare, common = KINDS[3], KINDS[0]
    shapes = [common] * 100
    shapes[10] = rare
    rule = Rule.of(config(wait=30), 1, 2)
    steps = list(cut(range(100), shapes.__getitem__, rule, 100))
    at = next(number for number, step in enumerate(steps) if 10 in step[0])
    assert steps[at] == [[10]]
    assert max(max(step[0]) for step in steps[:at]) <= 41
    never = list(cut(range(100), shapes.__getitem__, Rule.of(config(wait=1000), 1, 2), 100))
    assert all(10 not in step[0] for step in never), "at the end it makes no full batch"


def test_clips_of_unlike_length_are_spread_over_the_ranks_evenly() -> None:
    shapes: list[Shape | None] = [KINDS[k % 3] for k in range(600)]
    ranks = [planned(shapes, rank, 4, layout="pack", max_tokens=512, size=1000) for rank in range(4)]
    for step in zip(*(each.groups(Position()) for each in ranks), strict=True):
        costs = [sum(Shape(*request.shape).tokens(PATCH) for request in group.requests if request.shape) for group in step]
        assert max(costs) - min(costs) <= KINDS[2].tokens(PATCH)
        assert min(costs) > 512 - 2 * KINDS[2].tokens(PATCH), "and the budget is used"


def test_a_shape_that_fits_no_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"clips of 16 frames of 32x32 do not fit a batch.* 64 tokens"):
        planned([KINDS[2]], max_tokens=63)
    with pytest.raises(ConfigError, match="GiB"):
        planned([KINDS[2]], max_gib=1e-6)


def test_a_stand_in_has_the_shape_of_the_clip_that_it_stands_for() -> None:
    shapes: list[Shape | None] = [KINDS[k % 5] for k in range(50)]
    one = planned(shapes)
    for group in one.groups(Position()):
        for request in group.requests:
            chain = [request]
            for _ in range(5):
                chain.append(one.substitute(chain[-1]))
            assert all(shapes[link.entry] == Shape(*request.shape or ()) == Shape(*link.shape or ()) for link in chain)
            assert [link.attempt for link in chain] == list(range(6))
            assert len({link.entry for link in chain}) > 2


def test_a_position_of_another_rule_is_told_apart() -> None:
    one = planned([*KINDS])
    position = one.after(Position(), one.groups(Position())[0].index) if one.count(0) else Position()
    assert one.fits(position)
    assert not planned([*KINDS], size=5).fits(Position(cuts=(Cut(rule=Rule.of(config(), 1, 2), steps=1),)))


@pytest.mark.parametrize(("size", "multiple"), [((512, 512), 64), ((480, 832), 16), ((256, 256), 32), ((224, 224), 14)])
def test_aspect_buckets_have_the_area_and_the_multiples_asked_for(size: tuple[int, int], multiple: int) -> None:
    sizes = BucketsConfig(multiple=multiple, max_ratio=2.5).sizes_for(size)
    area = size[0] * size[1]
    assert len(sizes) > 4
    for height, width in sizes:
        assert height % multiple == width % multiple == 0
        assert max(height, width) <= 2.5 * min(height, width)
        assert area - multiple * max(height, width) < height * width <= area
        assert (width, height) in sizes


@pytest.mark.parametrize(
    ("buckets", "match"),
    [
        ({}, "make no difference"),
        ({"sizes": [[32, 32]], "multiple": 16}, "not both"),
        ({"frames": [4, 4]}, "twice"),
        ({"frames": [0]}, "greater than or equal to 1"),
        ({"multiple": 32, "max_ratio": 0.5}, "max_ratio"),
    ],
)
def test_buckets_that_cannot_be_meant_are_refused(buckets: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LoaderConfig(batch={"buckets": buckets})


def test_the_only_video_of_a_shape_has_another_for_a_stand_in() -> None:
    shapes: list[Shape | None] = [KINDS[0]] * 6 + [KINDS[1], None]
    one = planned(shapes)
    request = ClipRequest(3, 0, 2, entry=6, shape=KINDS[1])
    stand_in = one.substitute(request)
    assert stand_in.entry in range(7), "one that can be indexed"
    assert stand_in.shape == KINDS[1], "in the shape of the slot"
    last = request
    for _ in range(20):
        last = one.substitute(last)
    assert {one.substitute(replace(request, attempt=k)).entry for k in range(8, 30)} > {0, 1}


@settings(max_examples=60)
@given(LISTS, st.sampled_from(["pad", "pack"]), st.integers(1, 3), st.integers(1, 4))
def test_all_ranks_cut_a_step_into_as_many_parts(shapes: list[Shape | None], layout: str, world: int, size: int) -> None:
    if not any(shapes):
        return
    ranks = [planned(shapes, rank, world, layout=layout, last="partial") for rank in range(world)]
    for step in zip(*(each.groups(Position()) for each in ranks), strict=True):
        visits = [rank.visits(Position(), group.index) for rank, group in zip(ranks, step, strict=True)]
        assert visits == [[len(group.requests) for group in step]] * world
        count = parts_of(visits[0], 2, size)
        assert 1 <= count <= min(visits[0]) * 2


@pytest.mark.parametrize(
    "change", [{"cuts": ()}, {"ahead": frozenset({99})}, {"cuts": (Cut(rule=Rule.of(config(), 1, 2), steps=10**6),)}]
)
def test_a_position_that_no_run_can_have_come_to_is_refused(change: dict[str, Any]) -> None:
    one = planned([KINDS[0]] * 30)
    position = one.after(Position(), 0)
    one.check(position)
    with pytest.raises(ConfigError, match="this state is damaged"):
        one.check(replace(position, **change))


def test_a_length_asked_for_amid_an_epoch_does_not_plan_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one, plans = planned([KINDS[0]] * 30), []
    original = Planned._plan
    monkeypatch.setattr(Planned, "_plan", lambda *given: (plans.append(given[1]), original(*given))[1])
    position = Position()
    for group in one.groups(position):
        position = one.after(position, group.index)
        one.count(1)
    assert plans == [0, 1]
