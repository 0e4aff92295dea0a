"""The order of an epoch depends on (seed, epoch) alone, and every random number on (seed, purpose, epoch, sample, attempt)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.config import LoaderConfig
from gpupipe.data.group import batch_count, group
from gpupipe.data.order import AUGMENT, FRAMES, Order, clip_generator, generator
from gpupipe.errors import ConfigError
from gpupipe.types import ClipRequest


def entries(order: Order, epoch: int) -> list[int]:
    return [request.entry for request in order.requests(epoch)]


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


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_ranks_share_the_global_sequence_equally(count: int, world: int, epoch: int, shuffle: bool) -> None:
    whole = Order(count, 1, shuffle).requests(epoch)
    ranks = [Order(count, 1, shuffle, rank, world) for rank in range(world)]
    parts = [order.requests(epoch) for order in ranks]
    assert {len(part) for part in parts} == {len(ranks[0])} == {count // world}
    woven = [request for turn in zip(*parts, strict=True) for request in turn]
    assert woven == whole[: count // world * world], "the same samples whatever the number of ranks"


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


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_groups_cut_the_sequence(drop_last: bool, sizes: list[int]) -> None:
    requests = Order(10, 0).requests(0)
    config = LoaderConfig(batch={"size": 4, "drop_last": drop_last})
    groups = group(requests, config)
    assert [len(part) for part in groups] == sizes
    assert len(groups) == batch_count(10, config)
    assert [request for part in groups for request in part] == requests[: sum(sizes)]


def test_several_clips_a_visit_take_as_many_places_of_a_batch() -> None:
    config = LoaderConfig(batch={"size": 6, "drop_last": False}, clip={"clips_per_video": 3})
    assert [len(part) for part in group(Order(5, 0).requests(0), config)] == [2, 2, 1]
    with pytest.raises(ConfigError, match="no multiple of clips_per_video=4"):
        LoaderConfig(batch=6, clip={"clips_per_video": 4})
