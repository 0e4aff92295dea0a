"""The depth of the jitter buffer: traces of arrivals, replayed on paper, move it as the design says."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import MAKE_MS
from hypothesis import given
from hypothesis import strategies as st

from gpupipe import VideoLoader
from gpupipe.data.decode import cpu
from gpupipe.data.depth import DepthControl
from gpupipe.data.jitter import JitterBuffer
from gpupipe.telemetry import Telemetry

Seconds = Callable[[int], float]


@dataclass
class Replay:
    """Workers that make one batch each at a time, and a consumer, on a clock of their own; with the real buffer."""

    control: DepthControl
    make: Seconds
    """What batch k takes."""
    think: Seconds = lambda k: 0.1
    """What the consumer does with batch k."""
    workers: int = 8
    stopped: tuple[float, float] = (0.0, 0.0)
    """From when to when all workers stand still."""
    depths: list[int] = field(default_factory=list)
    """The depth after each batch taken."""
    stalls: list[int] = field(default_factory=list)
    """Batches that were waited for."""
    stall_seconds: float = 0.0
    now: float = 0.0

    def run(self, count: int) -> Replay:
        telemetry = Telemetry()
        buffer: JitterBuffer[int] = JitterBuffer(self.control, telemetry, clock=lambda: self.now)
        buffer.finish(count)
        at_work: list[tuple[float, int]] = []
        next_take, waits_since = self.now, None
        for taken in range(count):
            while True:
                while len(at_work) < self.workers and (number := self._reserve(buffer, count)) is not None:
                    heapq.heappush(at_work, (self._done(self.now, self.make(number)), number))
                if not buffer.behind and self.now >= next_take:
                    break
                if buffer.behind and self.now >= next_take and waits_since is None:
                    waits_since = self.now
                    assert buffer._misses(self.now)
                    continue
                moments = [at_work[0][0]] if at_work else []
                moments += [next_take] if self.now < next_take else []
                self.now = min(moments)
                while at_work and at_work[0][0] <= self.now:
                    number = heapq.heappop(at_work)[1]
                    buffer.put(number, number)
            if waits_since is not None and taken:
                self.stalls.append(taken)
                self.stall_seconds += self.now - waits_since
            waits_since = None
            assert buffer.take() == taken
            self.depths.append(self.control.depth)
            next_take = self.now + self.think(taken)
        return self

    def _reserve(self, buffer: JitterBuffer[int], count: int) -> int | None:
        return buffer.reserve() if buffer.in_flight + buffer.taken < count else None

    def _done(self, begin: float, seconds: float) -> float:
        first, last = self.stopped
        return begin + seconds + (last - first if begin < last and begin + seconds > first else 0.0)


def often(usual: float, slow: float, every: int) -> Seconds:
    """Each ``every``-th batch takes ``slow`` seconds."""
    return lambda k: slow if k % every == every - 1 else usual


def heavy_tail(seed: int = 0, scale: float = 0.1, shape: float = 2.0) -> Seconds:
    """Pareto: a disk that now and then takes many times as long as usual."""
    return lambda k: scale * random.Random(f"{seed} {k}").paretovariate(shape)


# What moves it


def test_a_steady_trace_needs_no_more_than_the_work_under_way() -> None:
    """Batches take 0.25 s and one is taken each 0.1 s: three under construction, and one on its way."""
    replay = Replay(DepthControl(2, 32), lambda k: 0.25).run(2000)
    assert replay.stalls == []
    assert replay.control.low_water == 4
    assert set(replay.depths[10:]) == {4}, "it has nothing to flap about"


def test_the_depth_is_the_rate_times_a_late_batchs_time() -> None:
    """One batch in 16 takes 1.45 s, 15 steps of the loop: it must be begun 15 batches ahead, and one is on its way."""
    replay = Replay(DepthControl(2, 32), often(0.1, 1.45, 16)).run(2000)
    assert replay.control.low_water == 16
    assert 16 <= replay.control.depth <= 20
    assert not [k for k in replay.stalls if k > 100], "after it has learnt that, none is waited for"
    small = Replay(DepthControl.fixed(4), often(0.1, 1.45, 16)).run(2000)
    assert len(small.stalls) > 100, "which is not the trace's own merit"


def test_a_first_stall_raises_it_at_once_and_calm_lowers_it_step_by_step() -> None:
    replay = Replay(DepthControl(2, 32), lambda k: 1.0 if k == 40 else 0.05).run(1500)
    assert len(replay.stalls) == 1
    assert replay.depths[39] <= 4
    assert replay.depths[41] >= 8, "what would have bridged the stall"
    falls = [k for k in range(1, 1500) if replay.depths[k] < replay.depths[k - 1]]
    assert all(replay.depths[k] == replay.depths[k - 1] - 1 for k in falls)
    assert min(b - a for a, b in itertools.pairwise(falls)) >= 32
    assert replay.control.depth == replay.control.high_water == 3


def test_times_that_grow_are_followed_before_anyone_waits() -> None:
    replay = Replay(DepthControl(2, 32), lambda k: 0.1 + k / 1000, workers=16).run(1000)
    assert replay.stalls == []
    assert replay.depths[-1] >= 11
    fixed = Replay(DepthControl.fixed(4), lambda k: 0.1 + k / 1000, workers=16).run(1000)
    assert len(fixed.stalls) > 100


def test_a_pause_of_everything_is_bridged_the_next_time() -> None:
    control = DepthControl(2, 32)
    first = Replay(control, lambda k: 0.2, stopped=(10.0, 12.0)).run(150)
    assert first.stall_seconds > 1.5
    assert control.depth >= 20, "two seconds are 20 batches"
    again = Replay(control, lambda k: 0.2, stopped=(10.0, 12.0)).run(150)
    assert again.stall_seconds < 0.25 * first.stall_seconds


def test_a_heavy_tail_is_met_with_depth() -> None:
    ours = Replay(DepthControl(2, 32), heavy_tail()).run(4000)
    shallow, deep = (Replay(DepthControl.fixed(depth), heavy_tail()).run(4000) for depth in (3, 32))
    assert ours.stall_seconds < 0.2 * shallow.stall_seconds
    assert ours.stall_seconds < deep.stall_seconds + 10
    assert sum(ours.depths) / len(ours.depths) < 0.75 * 32


def test_a_recorded_trace_is_met_with_depth() -> None:
    """Three times over, as epochs are."""
    make = [MAKE_MS[k % len(MAKE_MS)] / 1000 for k in range(3 * len(MAKE_MS))]
    seconds = {}
    for name, bounds in {"ours": (2, 32), "shallow": (4, 4), "deep": (32, 32)}.items():
        replay = Replay(DepthControl(*bounds), make.__getitem__, think=lambda k: 0.06).run(len(make))
        seconds[name] = replay.stall_seconds
        if name == "ours":
            assert 8 < sum(replay.depths) / len(replay.depths) < 0.95 * 32
    assert seconds["deep"] <= seconds["ours"] < 0.3 * seconds["shallow"]


def test_a_consumer_that_takes_several_at_once_has_them_ready() -> None:
    """As gradient accumulation does: the mean pace alone would ask for two."""
    replay = Replay(DepthControl(2, 32), lambda k: 0.1, think=lambda k: 0.8 if k % 8 == 7 else 0.0).run(2400)
    assert replay.depths[-1] >= 8
    assert len([k for k in replay.stalls if k > 200]) <= 2, "it does not forget between the bursts"


def test_a_consumer_that_slows_down_is_followed_down_and_one_that_speeds_up_at_once() -> None:
    def think(k: int) -> float:
        return 0.05 if k < 500 or k >= 1500 else 1.0

    replay = Replay(DepthControl(2, 32), lambda k: 0.4, think=think, workers=16).run(2000)
    assert 9 <= replay.depths[499] <= 12
    assert replay.depths[1499] == 3, "ten steps down, and more than 32 batches each"
    assert replay.depths[560] >= 7, "but slowly"
    assert replay.depths[1550] >= 9
    assert not [k for k in replay.stalls if k > 1600]


def test_where_the_producers_are_the_slow_ones_depth_is_no_remedy() -> None:
    """Two workers of 0.4 s a batch give five a second to a loop that could take a hundred."""
    replay = Replay(DepthControl(2, 32), lambda k: 0.4, think=lambda k: 0.01, workers=2).run(500)
    assert len(replay.stalls) > 200
    assert max(replay.depths) <= 5


def test_more_workers_than_the_depth_gives_work_to_raise_it() -> None:
    """Sixteen workers could make 40 batches a second; four at a time make ten."""
    replay = Replay(DepthControl(2, 32), lambda k: 0.4, think=lambda k: 0.03, workers=16).run(500)
    assert replay.depths[-1] >= 14
    assert not [k for k in replay.stalls if k > 250]


def test_noise_does_not_make_it_flap() -> None:
    rng = random.Random(1)
    times = [rng.uniform(0.2, 0.3) for _ in range(3000)]
    steps = [rng.uniform(0.08, 0.12) for _ in range(3000)]
    replay = Replay(DepthControl(2, 32), times.__getitem__, think=steps.__getitem__).run(3000)
    changes = sum(a != b for a, b in itertools.pairwise(replay.depths[100:]))
    assert changes <= 4
    assert len(replay.stalls) <= 3


def test_what_is_learnt_serves_the_next_epoch() -> None:
    control = DepthControl(2, 32)
    Replay(control, often(0.1, 1.45, 16)).run(300)
    learnt = control.depth
    assert learnt >= 16
    second = Replay(control, often(0.1, 1.45, 16)).run(300)
    assert min(second.depths) >= 16
    assert len(second.stalls) <= 1


def test_the_cold_start_is_not_taken_for_the_usual_time() -> None:
    """The first batches wait for decoders to be made; the first one is no stall."""
    replay = Replay(DepthControl(2, 32), lambda k: 5.0 if k < 4 else 0.1).run(200)
    assert replay.control.low_water == 2
    assert max(replay.depths) == 4


@pytest.mark.parametrize(("more", "full", "rises"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_wait_raises_it_only_where_it_was_the_limit(more: bool, full: bool, rises: bool) -> None:
    """Not when all batches of the epoch are begun, nor when the producers had not used the room that there was."""
    control = DepthControl(2, 32)
    control.taken(0.0, ready=0)
    control.taken(1.0, ready=0)
    if full:
        control.refused()
    control.waits(2.0, more=more)
    assert control.depth == (5 if rises else 4), "by a quarter when it begins"
    control.taken(8.0, ready=0, more=more)
    assert control.depth == (10 if rises else 4), "and in the end by the six batches of its seconds"


def test_a_fixed_depth_stays_and_tells_its_marks() -> None:
    replay = Replay(DepthControl.fixed(4), often(0.1, 1.45, 16)).run(300)
    assert set(replay.depths) == {4}
    assert replay.control.levels == {"jitter_depth": 4, "jitter_low_water": 4, "jitter_high_water": 4}


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4), (-1, 1)])
def test_bounds_that_cannot_be_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a depth of"):
        DepthControl(*bounds)


# Whatever happens


TIMES = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=40)


@given(st.integers(1, 8), st.integers(0, 12), st.integers(1, 12), TIMES, TIMES, st.booleans())
def test_it_stays_within_its_bounds_and_never_stops_the_flow(
    lowest: int, more: int, workers: int, makes: list[float], thinks: list[float], paused: bool
) -> None:
    replay = Replay(
        DepthControl(lowest, lowest + more),
        lambda k: makes[k % len(makes)],
        lambda k: thinks[k % len(thinks)],
        workers,
        stopped=(3.0, 9.0) if paused else (0.0, 0.0),
    ).run(150)
    assert len(replay.depths) == 150, "all of them came"
    assert all(lowest <= depth <= lowest + more for depth in replay.depths)
    assert lowest <= replay.control.low_water <= replay.control.high_water <= lowest + more


@given(st.lists(st.tuples(st.sampled_from(["begun", "arrived", "refused", "waits", "taken"]), st.floats(0, 1)), max_size=300))
def test_no_order_of_events_leads_it_astray(events: list[tuple[str, float]]) -> None:
    """Threads that end late, epochs left early: it may be told of what it does not expect."""
    control, now, number = DepthControl(2, 9), 0.0, 0
    for event, seconds in events:
        now += seconds
        if event == "begun":
            control.begun(number := number + 1, now)
        elif event == "arrived":
            control.arrived(number, now)
        elif event == "refused":
            control.refused()
        elif event == "waits":
            control.waits(now)
        else:
            control.taken(now, ready=number % 3)
        assert 2 <= control.depth <= 9


# In a pipeline


SMALL: dict[str, Any] = {
    "clip": {"frames": 4},
    "transform": {"size": 16, "dtype": "float32"},
    "device": "cpu",
    "batch": 2,
    "decode": {"threads": 6},
    "seed": 3,
}
BATCH_BYTES = 2 * 3 * 4 * 16 * 16 * 4


def shaky(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str], float]) -> None:
    """Software decodes take so much longer, by path."""
    original = cpu.decode

    def decode(index: Any, *rest: Any) -> Any:
        time.sleep(seconds(index.info.path))
        return original(index, *rest)

    monkeypatch.setattr(cpu, "decode", decode)


def linked(source: Path, folder: Path, count: int) -> list[Path]:
    """``count`` files of their own names, all of them the same video."""
    paths = [folder / f"{number:03d}.mp4" for number in range(count)]
    for path in paths:
        os.link(source, path)
    return paths


@pytest.mark.parametrize(
    "jitter",
    [{}, {"min_depth": 1, "max_depth": 2}, {"max_gib": 1e-9}, {"max_gib": 3.5 * BATCH_BYTES / 2**30}, {"max_depth": 64}],
    ids=str,
)
def test_no_bit_depends_on_it(
    jitter: dict[str, Any], clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = linked(clips["h264"], tmp_path, 32)
    with VideoLoader(videos, **SMALL, jitter={"depth": 1}) as loader:
        expected = [(batch.video, batch.clips) for _ in range(2) for batch in loader]
    rng = random.Random(0)
    shaky(monkeypatch, lambda path: min(0.1, 0.002 * rng.paretovariate(1.2)))
    with VideoLoader(videos, **SMALL, jitter=jitter) as loader:
        ours = [(batch.video, batch.clips) for _ in range(2) for batch in loader]
        peak = loader.stats()["jitter_peak_bytes"]
    assert len(ours) == len(expected) == 32
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(ours, expected, strict=True))
    if "max_gib" in jitter:
        assert BATCH_BYTES <= peak <= max(BATCH_BYTES, jitter["max_gib"] * 2**30)


def test_one_slow_file_in_sixteen_is_met_with_depth(
    clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as thirteen steps of the loop, which a depth of two cannot bridge."""
    videos = linked(clips["h264"], tmp_path, 128)
    slow = {str(path) for path in videos[8::16]}
    shaky(monkeypatch, lambda path: 0.2 if path in slow else 0.0)
    found = {}
    for name, jitter in {"ours": {"min_depth": 2, "max_depth": 32}, "fixed": {"depth": 2}}.items():
        with VideoLoader(videos, **{**SMALL, "batch": 1}, shuffle=False, jitter=jitter) as loader:
            for _ in loader:
                time.sleep(0.015)
            found[name] = loader.stats()
    assert found["fixed"]["stalls"] >= 7, "each slow file was waited for"
    assert found["ours"]["stall_seconds"] < 0.6 * found["fixed"]["stall_seconds"]
    assert found["ours"]["jitter_depth"] >= 8
    assert found["ours"]["jitter_peak_bytes"] > found["fixed"]["jitter_peak_bytes"]


def test_statistics_tell_the_levels_at_any_time(clips: dict[str, Path], tmp_path: Path) -> None:
    names = {
        "stalls", "stall_seconds", "occupancy", "in_flight", "jitter_bytes", "jitter_peak_bytes", "jitter_depth",
        "jitter_low_water", "jitter_high_water",
    }  # fmt: skip
    with VideoLoader(linked(clips["h264"], tmp_path, 24), **SMALL, jitter={"depth": 3}) as loader:
        assert names - {"stalls", "jitter_peak_bytes"} <= loader.stats().keys()
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + 20
        while loader.stats()["occupancy"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        during = loader.stats()
        assert (during["occupancy"], during["in_flight"], during["jitter_bytes"]) == (3, 3, 3 * BATCH_BYTES)
        list(iterator)
        after = loader.stats()
        assert (after["occupancy"], after["in_flight"], after["jitter_bytes"]) == (0, 0, 0)
        assert after["jitter_peak_bytes"] == 3 * BATCH_BYTES
        assert names <= after.keys()


def test_loops_that_are_left_anywhere_end(clips: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under bounds that are tight, lie apart, or are smaller than a batch; what hangs here would run into the time limit."""
    videos = linked(clips["h264"], tmp_path, 32)
    rng = random.Random(2)
    shaky(monkeypatch, lambda path: 0.01 * (rng.random() < 0.1))
    for _ in range(20):
        lowest = rng.randint(1, 4)
        jitter = {
            "min_depth": lowest,
            "max_depth": lowest + rng.randint(0, 12),
            "max_gib": rng.choice([None, 1e-9, 1.5 * BATCH_BYTES / 2**30, 5 * BATCH_BYTES / 2**30]),
            "in_order": rng.random() < 0.7,
        }
        stop = rng.choice([0, 1, 3, 9, 99])
        with VideoLoader(videos, **SMALL, jitter=jitter, timeout_seconds=30) as loader:
            taken = 0
            for taken, _ in enumerate(loader, 1):
                if taken == stop:
                    break
            assert taken == (stop if 0 < stop <= 16 else 16)
