"""Mixtures: shares are exact to rounding, each source comes in rounds over the epochs, and (seed, epoch) fixes it all."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe import VideoLoader
from gpupipe.data.mixture import Mixture
from gpupipe.data.order import Order
from gpupipe.errors import ConfigError, SourceError
from gpupipe.types import ClipRequest

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 1, "device": "cpu"}


def counted(mixture: Mixture, drawn: np.ndarray) -> list[int]:
    """Samples of each source among the entries drawn."""
    edges = np.cumsum([0, *mixture.sizes])
    return [int(((drawn >= low) & (drawn < high)).sum()) for low, high in itertools.pairwise(edges)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(0, 9),
    st.booleans(),
)
def test_shares_are_exact_to_rounding(sources: list[tuple[int, float]], length: int, epoch: int, shuffle: bool) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixture = Mixture.of(sizes, weights, length)
    drawn = mixture.entries(3, epoch, shuffle)
    counts = counted(mixture, drawn)
    assert len(drawn) == len(mixture) == sum(counts) == length
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - weight / sum(weights) * length) < 1 + 1e-6


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0.1, 0.3, 0.7, 1.0, 7.0])), min_size=1, max_size=4))
def test_epochs_end_with_the_first_or_the_last_source(sources: list[tuple[int, float]]) -> None:
    """Decimal weights are what is written, not the nearest binary fraction: 7 videos of weight 0.7 are 10 samples, not 11."""
    sizes, weights = zip(*sources, strict=True)
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    first = Mixture.of(sizes, weights, "first_exhausted")
    assert all(count <= size for count, size in zip(first.counts, sizes, strict=True)), "no source repeats"
    assert any((len(first) + 1) * share > size for share, size in zip(shares, sizes, strict=True)), "and no longer one fits"
    last = Mixture.of(sizes, weights, "all_exhausted")
    assert all(count >= size for count, size in zip(last.counts, sizes, strict=True)), "each source comes whole"
    assert any((len(last) - 1) * share < size for share, size in zip(shares, sizes, strict=True)), "and no shorter one does"
    assert len(Mixture.of(sizes, weights, "total")) == sum(sizes)


def test_lengths_by_hand() -> None:
    lengths = {rule: len(Mixture.of([7, 9], [0.7, 0.3], rule)) for rule in ("first_exhausted", "all_exhausted", "total")}  # type: ignore[arg-type]
    assert lengths == {"first_exhausted": 10, "all_exhausted": 30, "total": 16}
    assert Mixture.of([7, 9], [0.7, 0.3], "total").counts == (11, 5)
    assert Mixture.of([5, 5, 5], [1, 1, 1], 10).counts == (4, 3, 3)
    assert Mixture.of([5, 5], [1, 1e-12], 10).counts == (10, 0)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "count"), [(5, 3), (3, 5), (1, 9000), (5000, 700), (4096, 4096)])
def test_a_source_comes_in_rounds_over_the_epochs(size: int, count: int, shuffle: bool) -> None:
    """Whatever is cut from one epoch comes in the next: no video comes again before all of its source have come."""
    mixture = Mixture.of([2, size], [1, count], count + 1)
    drawn = [mixture.entries(7, epoch, shuffle) for epoch in range(8)]
    sequence = np.concatenate([epoch[epoch >= 2] for epoch in drawn]) - 2
    assert len(sequence) == 8 * count
    whole = len(sequence) // size
    for turn in range(whole):
        assert sorted(sequence[turn * size : (turn + 1) * size]) == list(range(size))
    assert len(set(sequence[whole * size :])) == len(sequence) - whole * size


def test_the_sequence_depends_on_seed_and_epoch_alone() -> None:
    mixture = Mixture.of([50, 70], [1, 2], "total")
    later = mixture.entries(3, 5, True)
    assert np.array_equal(Mixture.of([50, 70], [1, 2], "total").entries(3, 5, True), later)
    for seed, epoch in ((4, 5), (3, 6)):
        other = mixture.entries(seed, epoch, True)
        assert not np.array_equal(other, later)
        assert not np.array_equal(other < 50, later < 50), "which source comes when differs too"
    rounds = Mixture.of([50, 50], [1, 1], "total").entries(3, 0, True)
    assert not np.array_equal(rounds[rounds < 50], rounds[rounds >= 50] - 50), "sources are shuffled each by itself"


def test_without_shuffle_sources_alternate_in_their_order() -> None:
    assert Mixture.of([4, 2], [2, 1], "total").entries(0, 0, False).tolist() == [0, 4, 1, 2, 5, 3]
    assert Mixture.of([4, 2], [1, 1], 4).entries(0, 1, False).tolist() == [2, 4, 3, 5]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.integers(0, 3))
def test_ranks_share_the_mixture(world: int, epoch: int) -> None:
    mixture = Mixture.of([5, 30], [0.5, 0.5], 41)
    order = Order(35, 1, mixture=mixture)
    assert len(order) == 41
    whole = order.requests(epoch, 0, 41)
    parts = [Order(35, 1, True, rank, world, mixture).requests(epoch, 0, 41 // world) for rank in range(world)]
    woven = [request for turn in zip(*parts, strict=True) for request in turn]
    assert woven == whole[: 41 // world * world]


def test_a_substitute_is_of_the_same_source() -> None:
    order = Order(30, 5, mixture=Mixture.of([10, 20], [1, 1], "total"))
    for entry, low, high in ((3, 0, 10), (9, 0, 10), (10, 10, 30), (29, 10, 30)):
        drawn = {order.substitute(ClipRequest(5, 0, sample, entry)).entry for sample in range(300)}
        assert drawn == set(range(low, high))


@pytest.mark.parametrize(
    ("videos", "source", "says"),
    [
        (["a.mp4", "b.mp4"], {"weights": [1.0]}, "source.weights has 1 numbers, videos has 2 items"),
        ("a.mp4", {"weights": [1.0, 2.0]}, "source.weights has 2 numbers, videos has 1 items"),
        (["a.mp4", "b.mp4"], {"weights": [0, 0]}, "all weights are 0"),
        (["a.mp4", "b.mp4"], {"weights": [1, -1]}, "greater than or equal to 0"),
        (["a.mp4"], {"epoch_length": "longest"}, "epoch_length"),
    ],
)
def test_weights_that_do_not_fit_are_told(
    videos: Any, source: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").touch()
    with pytest.raises(ConfigError) as caught:
        VideoLoader(videos, **SMALL, source=source)
    assert says in str(caught.value)


def test_weights_in_the_place_of_rows_are_shown_the_way() -> None:
    with pytest.raises(SourceError, match=r"no 'path'; its columns are a\.csv, b\n.*for a mixture give a list"):
        VideoLoader({"a.csv": 0.7, "b": 0.3}, **SMALL)


@pytest.fixture
def videos(clips: dict[str, Path], tmp_path: Path) -> list[Any]:
    """A table of two videos, a row, and a file: three items of four videos."""
    (tmp_path / "t.csv").write_text(f"path,label\n{clips['h264']},0\n{clips['vp9']},0\n")
    return [tmp_path / "t.csv", {"path": str(clips["mpeg4"]), "label": 1}, {"path": str(clips["h264_odd"]), "label": 2}]


def test_a_loader_of_a_mixture(videos: list[Any]) -> None:
    source = {"weights": [2, 1, 0], "epoch_length": 9}
    with VideoLoader(videos, **SMALL, source=source) as loader, VideoLoader(videos, **SMALL, source=source) as again:
        assert len(loader) == 9
        labels = [int(batch["label"]) for batch in loader]
        paths = [batch.paths[0] for batch in again]
        again.set_epoch(0)
        assert [batch.paths[0] for batch in again] == paths
    assert Counter(labels) == {0: 6, 1: 3}
    assert Counter(Counter(paths).values()) == {3: 3}, "the two videos of the table come equally often"


def test_an_epoch_may_be_shorter_or_longer_than_the_list(videos: list[Any]) -> None:
    with VideoLoader(videos, **SMALL, source={"epoch_length": 3}) as loader:
        assert len(loader) == 3
        drawn = [batch.paths[0] for _ in range(4) for batch in loader]
    assert set(Counter(drawn).values()) == {3}, "over the epochs all come equally often"
