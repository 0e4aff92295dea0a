"""Plans: runs of packets that cover what is wanted, from start points on, at the least cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import STREAMS
from test_sample import made_index

from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, make_plan
from gpupipe.data.scan.record import record
from gpupipe.data.scan.scan import scan


def shuffled(index: VideoIndex, seed: int) -> VideoIndex:
    """The same video with frames reordered between start points, as B-frames are."""
    rng = np.random.default_rng(seed)
    display = index.display.copy()
    edges = [*np.flatnonzero(index.start), len(display)]
    for low, high in itertools.pairwise(edges):
        display[low + 1 : high] = rng.permutation(display[low + 1 : high])
    pts = index.pts.copy()
    pts[display] = np.sort(index.pts)
    return replace(index, display=display, pts=pts)


@settings(deadline=None, max_examples=200)
@given(
    wanted=st.lists(st.integers(0, 59), min_size=1, max_size=20),
    keys=st.sets(st.integers(1, 59), max_size=8),
    seed=st.integers(0, 9),
    interlaced=st.booleans(),
)
def test_passes_cover_the_targets_and_do_not_touch(wanted: list[int], keys: set[int], seed: int, interlaced: bool) -> None:
    index = shuffled(made_index(60, keys=(0, *keys)), seed)
    index = replace(index, info=replace(index.info, interlaced=interlaced))
    plan = make_plan(index, wanted)
    assert [plan.frames[slot] for slot in plan.frame_map] == wanted
    assert list(plan.frames) == sorted(set(wanted))
    assert {packet: plan.frames[slot] for packet, slot in plan.slots.items()} == {int(index.display[f]): f for f in set(wanted)}
    for one, following in zip(plan.passes[:-1], plan.passes[1:], strict=True):
        assert one.last + 1 < following.first, "runs that touch are one"
    for run in plan.passes:
        assert index.start[run.first]
        assert run.first <= run.last < 60
        assert any(run.first <= packet <= run.last for packet in plan.slots), "no run without a target"
    for packet, slot in plan.slots.items():
        run = next(run for run in plan.passes if run.first <= packet <= run.last)
        assert run.first <= index.start_for(plan.frames[slot])
        assert not interlaced or run.last >= min(packet + 1, 59), "a second field comes along"
    fed = {packet for run in plan.passes for packet in run.packets}
    assert plan.packets == len(fed) <= 60
    spanned = {packet for run in plan.passes for packet in range(run.first, run.last + 1)}
    assert all(index.droppable[packet] for packet in spanned - fed), "only what no other picture refers to is left out"
    assert not any(index.droppable[packet] for packet in fed - set(plan.slots)), "and all of that, unless it is wanted"


def test_cost_is_the_distance_from_the_start_point(tricky: Path) -> None:
    long = indices.load(str(tricky / "t18_longgop.mp4"))
    assert make_plan(long, [0]).packets == 1
    target = int(long.display[599])
    needed = ~long.droppable[: target + 1]
    needed[target] = True
    assert make_plan(long, [599]).packets == needed.sum()
    assert needed.sum() < 0.8 * 600, "x264 makes every other picture one that no other refers to"
    intra = indices.load(str(tricky / "t18_intra.mp4"))
    assert make_plan(intra, [7, 40, 7, 22]).packets == 3
    assert make_plan(intra, [8, 7, 9]).passes == (Pass((7, 8, 9)),)


def test_far_frames_take_runs_of_their_own(clips: dict[str, Path]) -> None:
    plan = make_plan(indices.load(str(clips["h264"])), [33, 2])
    assert len(plan.passes) == 2
    assert plan.packets < 12
    assert plan.frame_map == (1, 0)


@pytest.mark.skipif("libx265" not in av.codecs_available, reason="this PyAV has no encoder libx265")
def test_no_pass_goes_on_behind_an_ended_sequence(tmp_path: Path) -> None:
    """Where pictures are lost at a sequence's end, a decoder that shows them all the same would shift those behind."""
    index = indices.load(str(STREAMS["hevc_ended_bare"].make(tmp_path, "hevc_ended_bare")))
    ends = [int(packet) for packet in np.flatnonzero(index.start) if packet]
    assert ends
    for run in make_plan(index, range(index.info.frames)).passes:
        assert not [packet for packet in ends if run.first < packet <= run.last]
        shown = index.in_show_order(run.packets)
        frames = [packet for packet in index.display.tolist() if packet in run.packets]
        assert [packet for packet in shown if packet not in index.unshown] == frames
        if run.first == 0:
            assert set(shown[-2:]) == {19, 20}, "still to be shown when the sequence ended"


def test_frames_before_the_first_start_point_are_tried_from_the_first_packet() -> None:
    index = made_index(40, keys=(20,))
    assert make_plan(index, [5]).passes == (Pass((0, 1, 2, 3, 4, 5)),)
    assert make_plan(index, [5, 25]).passes == (Pass((0, 1, 2, 3, 4, 5)), Pass((20, 21, 22, 23, 24, 25)))


@pytest.mark.parametrize("name", ["t01_opengop_h264.mp4", "t02_opengop_hevc.mp4"])
def test_a_leading_picture_is_reached_from_the_start_point_before(name: str, tricky: Path) -> None:
    index = indices.load(str(tricky / name))
    second = int(index.keyframes[1])
    assert make_plan(index, [second]).passes[0].first == index.display[second]
    assert make_plan(index, [second - 1]).passes[0].first == 0


def test_a_lower_layer_is_kept_when_a_higher_one_may_refer_to_it(clips: dict[str, Path]) -> None:
    """HEVC: unreferenced within its own temporal layer is not enough below the highest layer of the stream."""
    found = scan(Identity.of(str(clips["hevc"])))

    def droppable() -> int:
        parsed = VideoIndex.parse(record(found), found.identity)
        assert parsed is not None
        return int(parsed.droppable.sum())

    assert droppable() > 10
    found.packets.layer[1] = 1
    assert not found.packets.unreferenced[1]
    assert droppable() == 0
