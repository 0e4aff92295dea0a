"""The order of an epoch depends on (seed, epoch) alone, and every random number on (seed, purpose, epoch, sample, attempt)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.config import LoaderConfig
from gpupipe.data.draws import AUGMENT, FRAMES, clip_generator, generator
from gpupipe.data.group import Fixed, Position
from gpupipe.data.order import Order
from gpupipe.errors import ConfigError
from gpupipe.types import ClipRequest


def entries(order: Order, epoch: int) -> list[int]:
    return [request.entry for request in order.requests(epoch, 0, order.entries // order.world_size)]


def test_an_epoch_visits_every_entry_once() -> None:
    assert sorted(entries(Order(50, seed=3), 0)) == list(range(50))
    assert entries(Order(50, seed=3, shuffle=False), 4) == list(range(50))


def test_the_permutation_depends_on_seed_and_epoch_alone() -> None:
    order = Order(50, seed=3)
    later = entries(order, 7)
    assert entries(Order(50, seed=3), 7) == later, "asking for other epochs before changes nothing"
    different = [tuple(entries(Order(50, seed), epoch)) for seed in (3, 4, -3, 3 + 2**40) for epoch in range(3)]
    assert len(set(different)) == len(different)
    assert later != list(range(50))


LAST = st.sampled_from(["drop", "partial", "fill"])


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 45), st.booleans(), LAST)
def test_ranks_share_what_is_left_of_the_global_sequence(
    count: int, world: int, size: int, start: int, shuffle: bool, last: str
) -> None:
    whole = Order(count, 1, shuffle).requests(2, 0, 2 * count + world * size)
    config = LoaderConfig(batch={"size": size, "last": last})
    ranks = [Order(count, 1, shuffle, rank, world) for rank in range(world)]
    parts = [Fixed(order, config).groups(Position(2, start)) for order in ranks]
    assert {len(part) for part in parts} == {len(Fixed(ranks[0], config).groups(Position(0, start)))}, (
        "ranks that differ would wait for each other"
    )
    woven = [
        request
        for step in zip(*parts, strict=True)
        for turn in zip(*(one.requests for one in step), strict=True)
        for request in turn
    ]
    assert woven == whole[start : start + len(woven)], "the same samples in the same order whatever the number of ranks"
    left = max(0, count - start)
    if last == "drop":
        assert len(woven) == left // (world * size) * world * size
    elif last == "partial":
        assert len(woven) == left // world * world
    else:
        assert 0 <= len(woven) - left < world * size
    sizes = [len(one.requests) for one in parts[0]]
    assert start or len(sizes) == Fixed(ranks[-1], config).count(2)
    assert all(held == size for held in sizes[: None if last != "partial" else -1])
    assert [one.index for one in parts[0]] == list(range(start // (world * size), start // (world * size) + len(sizes)))


def test_substitutes_are_a_function_of_seed_epoch_sample_and_attempt() -> None:
    order = Order(1000, seed=9)
    request = ClipRequest(9, epoch=2, sample=5, entry=17)
    chain = list(itertools.accumulate(range(5), lambda last, _: order.substitute(last), initial=request))
    again = Order(1000, seed=9, rank=1, world_size=2).substitute(ClipRequest(9, 2, 5, entry=999))
    assert again == chain[1], "neither the rank nor the bad entry matters"
    assert [link.attempt for link in chain] == list(range(6))
    assert all((link.seed, link.epoch, link.sample) == (9, 2, 5) for link in chain)
    others = [order.substitute(ClipRequest(*key, entry=17)).entry for key in ((9, 2, 6), (9, 3, 5), (8, 2, 5))]
    assert len({link.entry for link in chain} | set(others)) == 9, "each key draws anew"


def test_generators_of_different_keys_are_independent() -> None:
    keys = [(seed, *key) for seed in (0, 1, 2**33) for key in itertools.product(range(3), repeat=3)]
    first = [generator(*key).integers(2**63) for key in keys]
    assert len(set(first)) == len(first)
    draws = np.array([generator(*key).random(200) for key in keys])
    correlation = np.corrcoef(draws) - np.eye(len(keys))
    assert np.abs(correlation).max() < 0.35  # 5 sigma of 200 independent draws


def test_a_clip_has_separate_generators_for_frames_and_augmentation() -> None:
    request = ClipRequest(0, 0, 0, entry=0)
    draws = {purpose: clip_generator(request, purpose).random() for purpose in (FRAMES, AUGMENT)}
    assert draws[FRAMES] != draws[AUGMENT]
    assert clip_generator(request, FRAMES).random() == draws[FRAMES]
    moved = ClipRequest(0, 0, 0, entry=1)
    assert clip_generator(moved, FRAMES).random() == draws[FRAMES], "which entry it is does not matter"
    assert clip_generator(ClipRequest(0, 0, 0, 0, attempt=1), FRAMES).random() != draws[FRAMES]
    assert clip_generator(request, FRAMES, 1).random() != draws[FRAMES], "further clips of a visit differ"


def test_several_clips_a_visit_take_as_many_places_of_a_batch() -> None:
    config = LoaderConfig(batch={"size": 6, "last": "partial"}, clip={"clips_per_video": 3})
    assert [len(part.requests) for part in Fixed(Order(5, 0), config).groups(Position())] == [2, 2, 1]
    with pytest.raises(ConfigError, match="no multiple of clips_per_video=4"):
        LoaderConfig(batch=6, clip={"clips_per_video": 4})
