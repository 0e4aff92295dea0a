"""Which frames make a clip: every sampling mode and padding policy, on real indices and on made-up ones."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.config import ClipConfig
from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity
from gpupipe.data.index import VideoIndex
from gpupipe.data.sample import fills, pick_frames, shortage
from gpupipe.errors import ConfigError, SampleError
from gpupipe.types import FramePick, VideoInfo


def made_index(frames: int, fps: float = 30.0, keys: tuple[int, ...] = (0,), start: float = 0.0) -> VideoIndex:
    """A video of ``frames`` frames at a constant rate whose frames come in display order."""
    info = VideoInfo(
        path="made.mp4", container="mp4", codec="h264", pix_fmt="yuv420p", width=64, height=64, frames=frames,
        time_base=1 / Fraction(fps), fps=fps, start_seconds=round(start * fps) / fps, duration_seconds=frames / fps,
    )  # fmt: skip
    numbers = np.arange(frames)
    key = np.isin(numbers, keys)
    pts = numbers + round(start * fps)
    none = np.zeros(frames, np.bool_)
    arrays = (numbers, numbers + 1, pts, key, key, none, numbers)
    return VideoIndex(Identity("made.mp4", 1, 1), info, 0, *arrays, b"", 0)


def pick(index: VideoIndex, seed: int = 0, start_frame: int | None = None, **fields: Any) -> FramePick:
    return pick_frames(ClipConfig(**fields), index, np.random.default_rng(seed), start_frame)


@settings(deadline=None, max_examples=150)
@given(
    count=st.integers(1, 80),
    frames=st.integers(1, 24),
    stride=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    pad=st.sampled_from(["repeat-last", "loop"]),
)
def test_random_clips_step_by_the_stride_and_pad_as_asked(count: int, frames: int, stride: int, seed: int, pad: str) -> None:
    found = pick(made_index(count), seed, frames=frames, stride=stride, pad=pad)
    assert len(found.indices) == frames
    assert all(0 <= i < count for i in found.indices)
    real = [i for i, shown in zip(found.indices, found.mask, strict=True) if shown]
    assert found.mask == (True,) * len(real) + (False,) * (frames - len(real))
    assert real == list(range(real[0], real[0] + stride * len(real), stride))
    if (frames - 1) * stride < count:
        assert all(found.mask), "a clip that fits is never padded"
    else:
        assert real[0] == 0, "a clip that does not fit takes all it can"
        padding = found.indices[len(real) :]
        if pad == "loop":
            assert padding == tuple(real[k % len(real)] for k in range(len(padding)))
        else:
            assert padding == (real[-1],) * len(padding)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 200), st.integers(1, 40), st.sampled_from(["uniform", "stratified"]), st.integers(0, 2**32))
def test_segment_modes_span_the_video(count: int, frames: int, sampling: str, seed: int) -> None:
    found = pick(made_index(count), seed, frames=frames, sampling=sampling)
    if count < frames:
        assert found.indices[:count] == tuple(range(count))
        assert sum(found.mask) == count
        return
    assert all(found.mask)
    for k, i in enumerate(found.indices):
        if sampling == "uniform":
            assert i == (2 * k + 1) * count // (2 * frames), "the frame on show in the middle of the segment"
        else:
            assert k * count // frames <= i < (k + 1) * count // frames, "one frame out of each segment"


def test_every_start_and_every_frame_of_a_segment_can_come() -> None:
    index = made_index(12)
    assert {pick(index, seed, frames=4, stride=3).indices[0] for seed in range(60)} == {0, 1, 2}
    strata = [pick(index, seed, frames=3, sampling="stratified").indices for seed in range(200)]
    assert [{indices[k] for indices in strata} for k in range(3)] == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]


def test_equal_generators_give_equal_picks() -> None:
    index = made_index(300)
    for sampling in ("random", "stratified", "keyframe", "uniform"):
        assert pick(index, 5, sampling=sampling) == pick(index, 5, sampling=sampling)
    assert pick(index, 5, sampling="uniform") == pick(index, 6, sampling="uniform"), "no chance in it"


def test_keyframe_clips_start_on_keyframes_that_leave_room() -> None:
    index = made_index(100, keys=(0, 25, 50, 75, 95))
    starts = {pick(index, seed, frames=16, sampling="keyframe").indices[0] for seed in range(80)}
    assert starts == {0, 25, 50, 75}
    assert {pick(index, seed, frames=40, stride=2, sampling="keyframe").indices[0] for seed in range(20)} == {0}
    too_short = pick(made_index(10, keys=(3, 7)), frames=16, sampling="keyframe")
    assert too_short.indices[0] == 3
    assert sum(too_short.mask) == 7


def test_keyframe_clips_of_a_real_file(clips: dict[str, Path]) -> None:
    index = indices.load(str(clips["h264"]))
    assert {pick(index, seed, frames=8, sampling="keyframe").indices[0] for seed in range(30)} == {0, 30}


def test_too_short_is_an_error_where_asked_and_says_how_short() -> None:
    with pytest.raises(SampleError) as caught:
        pick(made_index(10), frames=16, pad="error")
    assert "made.mp4 is too short: 10 frames at 30 fps give 10 of the 16" in str(caught.value)
    assert caught.value.path == "made.mp4"
    assert pick(made_index(16), frames=16, pad="error").indices == tuple(range(16))


def test_too_short_from_the_start_that_a_row_says_names_that_start() -> None:
    with pytest.raises(SampleError) as caught:
        pick(made_index(60), start_frame=50, frames=16, pad="error")
    assert "made.mp4 is too short from start_frame=50 on: 10 of its 60 frames at 30 fps give 10 of the 16" in str(caught.value)
    assert caught.value.fix is not None
    assert "correct the row's start_frame" in caught.value.fix
    assert "stride" not in caught.value.fix, "there is none to make smaller"
    assert pick(made_index(60), start_frame=44, frames=16, pad="error").indices == tuple(range(44, 60))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 120), st.integers(1, 20), st.floats(0.5, 120), st.sampled_from([12.5, 25.0, 30.0]), st.integers(0, 99))
def test_clips_by_rate_show_what_a_player_would(count: int, frames: int, fps: float, video_fps: float, seed: int) -> None:
    index = made_index(count, video_fps, start=8.3)
    found = pick(index, seed, frames=frames, fps=fps)
    start = index.seconds[found.indices[0]]
    for k, (i, shown) in enumerate(zip(found.indices, found.mask, strict=True)):
        time = start + k / fps
        if shown:
            assert index.seconds[i] <= time + 1e-6
            assert i == count - 1 or index.seconds[i + 1] > time - 1e-6
        else:
            assert time >= index.seconds[-1] + 1 / video_fps - 1e-4, "padding only after the end of the last frame"
    if (frames - 1) / fps <= index.seconds[-1] - index.seconds[0]:
        assert all(found.mask)


def test_clips_by_rate_follow_the_clock_of_variable_rate_video(tricky: Path) -> None:
    index = indices.load(str(tricky / "t05_vfr.mp4"))
    for seed in range(20):
        found = pick(index, seed, frames=12, fps=15)
        start = index.seconds[found.indices[0]]
        expected = [int(np.flatnonzero(index.seconds <= start + k / 15 + 1e-9).max()) for k in range(12)]
        assert list(found.indices) == expected
        assert all(found.mask)
    by_rate, by_stride = pick(index, 0, frames=12, fps=15), pick(index, 0, frames=12, stride=2)
    assert np.diff(by_rate.indices).tolist() != np.diff(by_stride.indices).tolist(), "the steps are not all alike"


def test_a_row_may_fix_the_start(tricky: Path) -> None:
    index = made_index(50, keys=(0, 30))
    for sampling in ("random", "keyframe", "uniform", "stratified"):
        assert pick(index, 1, 7, frames=4, sampling=sampling).indices == (7, 8, 9, 10)
    assert pick(index, 1, 7, frames=4, stride=5).indices == (7, 12, 17, 22)
    assert pick(index, 1, 48, frames=4) == FramePick((48, 49, 49, 49), (True, True, False, False))
    assert pick(index, 1, 48, frames=5, pad="loop").indices == (48, 49, 48, 49, 48)
    assert pick(index, 1, 10, frames=3, fps=15).indices == (10, 12, 14)
    one = indices.load(str(tricky / "t15_1frame.mp4"))
    assert pick(one, frames=4) == FramePick((0, 0, 0, 0), (True, False, False, False))


@pytest.mark.parametrize("start", [-1, 50])
def test_a_start_outside_the_video_is_named(start: int) -> None:
    with pytest.raises(SampleError, match=rf"start_frame={start} of made.mp4: the video has frames 0 to 49"):
        pick(made_index(50), 0, start)


def test_a_video_without_a_marked_start_point_still_gives_clips() -> None:
    index = replace(made_index(20), start=np.zeros(20, np.bool_))
    assert pick(index, frames=8, sampling="keyframe").indices == tuple(range(8))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), stride=st.integers(1, 4))
def test_speed_stretches_the_steps(seed: int, stride: int) -> None:
    found = pick(made_index(500), seed, frames=8, stride=stride, speed=(0.5, 2))
    span = found.indices[-1] - found.indices[0]
    assert 7 * stride * 0.5 - 0.5 <= span <= 7 * stride * 2 + 0.5
    steps = np.diff(found.indices)
    assert abs(steps - span / 7).max() <= 1 + 1e-9, "evenly, but for the rounding to whole frames"
    assert all(found.mask)


@pytest.mark.parametrize(("speed", "expected"), [(2, (0, 6, 12, 18)), (0.5, (0, 2, 3, 4)), (1, (0, 3, 6, 9))])
def test_one_speed_for_all(speed: float, expected: tuple[int, ...]) -> None:
    assert pick(made_index(40), frames=4, stride=3, speed=speed, start_frame=0).indices == expected
    assert pick(made_index(40), frames=4, fps=10, speed=speed, start_frame=0).indices in (expected, (0, 1, 3, 4))


def test_a_clip_that_just_fits_at_its_speed_is_never_padded() -> None:
    for seed in range(50):
        found = pick(made_index(15), seed, frames=8, speed=2)
        assert found.indices == tuple(range(0, 15, 2))
        assert all(found.mask)


def test_a_blended_clip_is_not_padded_where_one_that_fits_can_be_had() -> None:
    """The last frame lies at 3 * 1.1 = 3.3 from the start: it is made of two frames, the latter of them the fourth."""
    assert all(all(pick(made_index(9), seed, frames=4, speed=1.1, blend=True).mask) for seed in range(50))


@pytest.mark.parametrize(("frames", "stride", "speed"), [(16, 3, 2.2), (26, 2, 1.1), (26, 4, 0.55), (26, 1, 2.2)])
def test_a_blended_clip_whose_last_frame_is_the_videos_last_but_for_rounding(frames: int, stride: int, speed: float) -> None:
    """15 * 3 * 2.2 is a little more than 99: that is frame 99, and nothing of the one after it."""
    fields = {"frames": frames, "stride": stride, "speed": speed, "blend": True}
    span = round((frames - 1) * stride * speed)
    for start in (0, 100):
        found = pick(made_index(start + span + 1), start_frame=start or None, **fields)
        assert all(found.mask)
        assert max(found.decoded) == start + span
        short = pick(made_index(start + span), start_frame=start or None, **fields)
        assert (sum(short.mask), max(short.decoded) < start + span) == (frames - 1, True)
    assert f"spans {span + 1} at speed" in shortage(ClipConfig(**fields), made_index(span).info, 0)


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(1, 80),
    frames=st.integers(1, 24),
    speed=st.integers(2, 400).map(lambda hundredths: hundredths / 100),
    step=st.one_of(st.fixed_dictionaries({"stride": st.integers(1, 5)}), st.fixed_dictionaries({"fps": st.integers(1, 60)})),
    blend=st.booleans(),
    sampling=st.sampled_from(["random", "regular", "keyframe"]),
    keys=st.sampled_from([(0, 30), (3, 40)]),
    start=st.one_of(st.none(), st.integers(0, 79)),
    seed=st.integers(0, 2**32),
)
def test_a_video_fills_a_clip_exactly_where_no_frame_of_it_is_padded(
    count: int, frames: int, speed: float, step: dict[str, int], blend: bool, sampling: Any, keys: tuple[int, ...],
    start: int | None, seed: int,
) -> None:  # fmt: skip
    index = made_index(count, fps=10, keys=keys)
    config = ClipConfig(frames=frames, speed=speed, blend=blend, sampling=sampling, **step)
    if start is not None and start >= count:
        assert not fills(config, index, frames, start)
        return
    found = pick_frames(config, index, np.random.default_rng(seed), start)
    assert all(0 <= k < count for k in found.decoded)
    assert fills(config, index, frames, start) == all(found.mask)


def test_a_video_whose_last_frame_lasts_to_the_end_of_a_clip_by_rate_fills_it() -> None:
    clip, index = ClipConfig(frames=8, fps=20), made_index(12, fps=10)
    assert [fills(clip, index, frames) for frames in (8, 24, 25)] == [True, True, False]


def test_reversed_clips_run_backwards_now_and_then() -> None:
    found = [pick(made_index(100), seed, frames=5, stride=2, reverse=0.5).indices for seed in range(200)]
    backwards = sum(indices[0] > indices[-1] for indices in found)
    assert 60 < backwards < 140
    assert all(abs(np.diff(indices)).tolist() == [2] * 4 for indices in found)
    short = pick(made_index(3), frames=5, reverse=1)
    assert short.indices == (2, 1, 0, 0, 0)
    assert short.mask == (True, True, True, False, False)


def test_a_speed_of_one_draws_as_before() -> None:
    """So that runs of before can be repeated: nothing is drawn for what is not asked for."""
    assert pick(made_index(100), 5, frames=4).indices == pick(made_index(100), 5, frames=4, speed=1, reverse=0).indices
    start = int(np.random.default_rng(5).integers(97))
    assert pick(made_index(100), 5, frames=4).indices[0] == start


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speed": (2, 1)}, r"speed must be \(low, high\)"),
        ({"speed": 0}, "speed"),
        ({"speed": (1, 2), "sampling": "uniform"}, "speed does not apply"),
        ({"reverse": 2}, "reverse"),
    ],
)
def test_speeds_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClipConfig(**fields)


def test_blended_places_lie_where_the_time_does() -> None:
    found = pick(made_index(40), frames=4, stride=1, speed=0.5, blend=True, start_frame=3)
    assert (found.indices, found.blend) == ((3, 3, 4, 4), (0, 0.5, 0, 0.5))
    assert found.decoded == (3, 3, 4, 4, 3, 4, 4, 5)
    index = made_index(40, fps=30)
    assert index.seconds_shown(found) == pytest.approx([3 / 30, 3.5 / 30, 4 / 30, 4.5 / 30])
    by_time = pick(index, frames=4, fps=20, blend=True, start_frame=3)
    assert by_time.indices == (3, 4, 6, 7)
    assert by_time.blend == pytest.approx((0, 0.5, 0, 0.5), abs=1e-6)
    assert pick(index, frames=4, stride=2, blend=True).blend == (), "nothing lies between two frames"


@settings(deadline=None, max_examples=100)
@given(count=st.integers(1, 30), seed=st.integers(0, 2**32), fps=st.sampled_from([None, 7.0, 24.0, 60.0]))
def test_blends_stay_within_the_video(count: int, seed: int, fps: float | None) -> None:
    found = pick(made_index(count), seed, frames=6, fps=fps, speed=(0.3, 3), blend=True, reverse=0.5)
    assert all(0 <= k < count for k in found.decoded)
    assert all(0 <= share < 1 for share in found.blend)
    if fps is None and all(found.mask) and found.blend:
        places = np.add(found.indices, found.blend)
        assert np.ptp(np.diff(places)) < 1e-9


def test_regular_clips_span_the_video(clips: dict[str, Path]) -> None:
    index = indices.load(str(clips["h264"]))  # 60 frames
    config = ClipConfig(frames=4, stride=2, sampling="regular", clips_per_video=4)
    starts = [pick_frames(config, index, np.random.default_rng(0), place=(k, 4)).indices[0] for k in range(4)]
    assert starts == [0, 18, 35, 53], "the last one fits: 53 + 3 * 2 = 59"
    assert pick_frames(config, index, np.random.default_rng(0)).indices == (26, 28, 30, 32), "one alone lies in the middle"
    long = ClipConfig(frames=100, sampling="regular")
    assert pick_frames(long, index, np.random.default_rng(0), place=(1, 2)).indices[0] == 0
