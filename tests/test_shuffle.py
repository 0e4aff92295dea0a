"""Shuffling by windows: exact, reproducible, and as local as it says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe import VideoLoader
from gpupipe.config import LoaderConfig
from gpupipe.data.draws import generator
from gpupipe.data.mixture import Mixture
from gpupipe.data.order import Order
from gpupipe.data.shuffle import shuffled
from gpupipe.errors import ConfigError


def runs_of(sequence: np.ndarray, window: int) -> list[list[int]]:
    """The runs that a sequence is made of: every stretch in which the values lie together, as long as it can be."""
    cuts = [0]
    for place in range(1, len(sequence) + 1):
        if place == len(sequence) or np.ptp(sequence[cuts[-1] : place + 1]) >= window:
            cuts.append(place)
    return [sorted(sequence[a:b].tolist()) for a, b in itertools.pairwise(cuts)]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 300), st.integers(2, 320), st.integers(0, 50))
def test_each_number_comes_once_and_runs_stay_together(size: int, window: int, seed: int) -> None:
    sequence = shuffled(generator(seed, 0), size, window)
    assert sorted(sequence.tolist()) == list(range(size))
    if window >= size:
        return
    places = np.argsort(sequence)
    offsets = [
        offset
        for offset in range(window)
        if all(np.ptp(places[max(0, cut) : cut + window]) < min(size, cut + window) - max(0, cut)
               for cut in range(-offset, size, window))
    ]  # fmt: skip
    assert offsets, "there is a way to cut the list into runs whose samples come one after the other"


def test_runs_are_shuffled_and_come_in_random_order() -> None:
    sequence = shuffled(generator(3, 0), 1000, 100)
    blocks = [run for run in runs_of(sequence, 100) if len(run) > 1]
    assert [run[0] for run in blocks] != sorted(run[0] for run in blocks), "the runs themselves are out of order"
    first = sequence[: len(blocks[0])]
    assert not np.array_equal(first, np.sort(first)), "and so are the samples within"
    pairs = [abs(int(a) - int(b)) for a, b in itertools.pairwise(sequence)]
    far = sum(distance >= 100 for distance in pairs)
    assert far <= 10, f"{far} steps lead out of a run, of which there are 11 at most"


def test_runs_are_cut_elsewhere_in_each_epoch() -> None:
    """So that over the epochs a sample shares its run with all its neighbours, not with the same ones for ever."""
    together = 0
    for epoch in range(200):
        places = np.argsort(Order(200, 1, 20).sequence(epoch))
        together += abs(int(places[99]) - int(places[100])) < 20
    assert 150 < together < 200, "samples 99 and 100 are cut apart in one epoch of twenty, and lie together in the others"


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    order = Order(500, 7, 50)
    later = order.sequence(9)
    assert np.array_equal(Order(500, 7, 50).sequence(9), later)
    for other in (Order(500, 8, 50).sequence(9), order.sequence(8), Order(500, 7, 49).sequence(9), Order(500, 7).sequence(9)):
        assert not np.array_equal(other, later)


def test_a_window_of_all_is_the_permutation_of_always() -> None:
    for window in (True, 30, 1000):
        assert np.array_equal(Order(30, 7, window).sequence(2), generator(7, 0, 2).permutation(30))
    assert np.array_equal(Order(30, 7, False).sequence(2), np.arange(30))


def test_items_of_a_mixture_are_shuffled_by_windows_each_by_itself() -> None:
    mixture = Mixture.of([400, 600], [1, 1], 800)
    drawn = np.concatenate([mixture.entries(5, epoch, 40) for epoch in range(3)])
    for low, high in ((0, 400), (400, 1000)):
        sequence = drawn[(drawn >= low) & (drawn < high)] - low
        size = high - low
        assert sorted(sequence[:size].tolist()) == list(range(size)), "a round is all of it"
        far = sum(abs(int(a) - int(b)) >= 40 for a, b in itertools.pairwise(sequence[:size]))
        assert far <= size // 40 + 1


@pytest.mark.parametrize(("given_value", "kept"), [(True, True), (False, False), (64, 64)])
def test_a_configuration_keeps_the_window(given_value: Any, kept: Any, tmp_path: Path) -> None:
    config = LoaderConfig(shuffle=given_value)
    assert config.shuffle is kept or config.shuffle == kept
    assert type(config.shuffle) is type(kept)
    (tmp_path / "c.yaml").write_text(f"shuffle: {json.dumps(given_value)}\n")
    assert LoaderConfig.parse(tmp_path / "c.yaml") == config


@pytest.mark.parametrize("value", [-1, 2.5, "window"])
def test_what_is_no_window_is_told(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"LoaderConfig\.shuffle"):
        LoaderConfig(shuffle=value)


def test_a_loader_goes_on_within_a_window(clips: dict[str, Path]) -> None:
    videos = [str(clips["h264"]), str(clips["vp9"]), str(clips["mpeg4"])] * 4
    options: dict[str, Any] = {
        "clip": {"frames": 1}, "transform": {"size": 16}, "batch": 2, "device": "cpu", "seed": 3, "shuffle": 4,
    }  # fmt: skip
    with VideoLoader(videos, **options) as loader:
        batches = list(loader)
        state = json.loads(json.dumps(batches[2].state))
    with VideoLoader(videos, **options) as again:
        again.load_state_dict(state)
        assert [batch.clips for batch in again] == [batch.clips for batch in batches[3:]]
    with VideoLoader(videos, **(options | {"shuffle": True})) as other, pytest.raises(ConfigError, match="shuffle=4"):
        other.load_state_dict(state)
