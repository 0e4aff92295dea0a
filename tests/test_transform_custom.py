"""A user's own transforms: what they see, what they may give, and what becomes of their errors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plane_cases import make_format, make_info, make_planes

from gpupipe import Batch, ConfigError, VideoLoader, VideoReader
from gpupipe.data import pipeline
from gpupipe.data.transform import to_rgb
from gpupipe.data.transform.custom import Custom, _as_planes
from gpupipe.errors import GpupipeError, GraphError, OpenError
from gpupipe.types import Clip, ClipRequest, FramePick

TRANSFORM: dict[str, Any] = {"size": (20, 24), "dtype": "float32"}
PLAIN: dict[str, Any] = {"clip": {"frames": 3}, "transform": TRANSFORM, "batch": 2, "device": "cpu"}


def load(clips: dict[str, Path], **given: Any) -> Batch:
    with VideoLoader([str(clips["h264"])] * 2, **PLAIN | given) as loader:
        return next(iter(loader))


def test_before_sees_the_displayed_frames_in_order(clips: dict[str, Path]) -> None:
    seen: list[Clip] = []
    batch = load(clips, before=seen.append)
    assert len(seen) == 2
    with VideoReader(clips["h264"], device="cpu") as reader:
        for clip in seen:
            assert torch.equal(clip.video, reader.frames(clip.pick.indices))
            assert clip.params is None
            assert clip.info.path == str(clips["h264"])
    assert {c.pick for c in seen} == {r.pick for r in batch.clips}


def test_before_that_does_nothing_costs_eight_bits_and_no_more(clips: dict[str, Path]) -> None:
    plain, through = load(clips), load(clips, before=lambda clip: clip)
    assert plain.params == through.params
    assert float((plain.video - through.video).abs().max()) < 0.05 / 0.224
    assert float((plain.video - through.video).abs().mean()) < 0.01


def test_floats_of_codes_are_an_error(clips: dict[str, Path]) -> None:
    with pytest.raises(GraphError, match=r"floats are RGB in \[0, 1\]"):
        load(clips, before=lambda clip: clip.video.float())


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "gave NaN"), (200.0, "values up to 200")])
def test_floats_are_looked_at_in_every_clip(clips: dict[str, Path], value: float, says: str) -> None:
    given: list[int] = []

    def spoils_the_second(clip: Clip) -> torch.Tensor:
        given.append(1)
        video = clip.video.float() / 255
        video[0, 0, 0, 0] = value if len(given) == 2 else 0.5
        return video

    with pytest.raises(GraphError, match=says):
        load(clips, before=spoils_the_second, decode={"threads": 1})


def test_frames_of_another_size_are_cropped_as_such(clips: dict[str, Path]) -> None:
    def halved(clip: Clip) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(clip.video.float() / 255, 2)

    batch = load(clips, before=halved, transform=TRANSFORM | {"crop": "none", "hflip": 0})
    with VideoReader(clips["h264"], device="cpu") as reader:
        height, width = reader.info.display_size
    assert {(p.frame, p.displayed) for p in batch.params} == {((height // 2, width // 2), (height, width))}
    assert {p.crop for p in batch.params} == {(0, 0, height // 2, width // 2)}


def test_deep_video_comes_in_eight_bits() -> None:
    info, planes = make_info(20, 14), make_planes(make_format(20, 14, bits=10), 4)
    seen: list[Clip] = []
    pick, request = FramePick((7, 3, 7), (True,) * 3), ClipRequest(0, 0, 0, 0)
    made, plain, frames, _ = Custom(before=seen.append).prepare(planes, info, [3, 1, 3], pick, request, 0)
    assert torch.equal(seen[0].video, to_rgb(planes, info)[[3, 1, 3]])
    assert torch.equal(to_rgb(made, plain)[list(frames)], seen[0].video)
    assert Custom().prepare(planes, info, [3, 1, 3], pick, request, 0) == (planes, info, [3, 1, 3], ())


def test_blended_frames_are_seen_blended() -> None:
    info, planes = make_info(20, 14), make_planes(make_format(20, 14), 3)
    seen: list[Clip] = []
    pick = FramePick((0, 1), (True, True), (0.25, 0.0))
    source = Custom(before=seen.append).prepare(planes, info, [0, 1, 1, 1], pick, ClipRequest(0, 0, 0, 0), 0)
    rgb = to_rgb(planes, info).float()
    assert float((seen[0].video[0] - (0.75 * rgb[0] + 0.25 * rgb[1])).abs().max()) <= 0.5
    assert torch.equal(seen[0].video[1].float(), rgb[1])
    assert source.blend == ()
    assert list(source.frame_map) == [0, 1]


@pytest.mark.parametrize("size", [(5, 7), (16, 512), (31, 513)])
def test_rgb_as_planes_loses_nothing(size: tuple[int, int]) -> None:
    rgb = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    assert torch.equal(to_rgb(*_as_planes(rgb, make_info(9, 9, rotation=90))), rgb)
    planes = make_planes(make_format(12, 10), 2)
    shown = to_rgb(planes, make_info(12, 10, rotation=90))
    assert torch.equal(to_rgb(*_as_planes(shown, make_info(12, 10, rotation=90))), shown)


def test_after_has_the_last_word(clips: dict[str, Path]) -> None:
    plain = load(clips)
    assert torch.equal(load(clips, after=lambda clip: -clip.video).video, -plain.video)

    def in_place(clip: Clip) -> None:
        assert clip.params is not None
        clip.video += 1

    assert torch.equal(load(clips, after=in_place).video, plain.video + 1)


def test_its_random_numbers_are_repeated(clips: dict[str, Path]) -> None:
    def noisy(clip: Clip) -> Clip:
        clip.video *= float(clip.rng.random())
        return clip

    first, second = load(clips, after=noisy), load(clips, after=noisy)
    assert torch.equal(first.video, second.video)
    other = load(clips, after=noisy, seed=5)
    assert not torch.equal(first.video, other.video)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"before": lambda clip: clip.video[:1]}, r"before= gave \(1, 3"),
        ({"before": lambda clip: clip.video.int()}, "before= gave torch.int32"),
        ({"before": lambda clip: "frames"}, "gave a str"),
        ({"after": lambda clip: clip.video[:, :, 1:]}, "the batch has torch.float32"),
        ({"after": lambda clip: clip.video.half()}, "after= gave torch.float16"),
    ],
)
def test_what_does_not_fit_is_named(clips: dict[str, Path], given: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        load(clips, **given)


def test_an_exception_reaches_the_loop_with_the_video(clips: dict[str, Path]) -> None:
    def broken(clip: Clip) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        load(clips, after=broken)
    assert any(str(clips["h264"]) in note for note in caught.value.__notes__)
    with pytest.raises(ConfigError, match="before=3 cannot be called"):
        load(clips, before=3)


@pytest.mark.parametrize("call", ["iter", "next", "close", "close of the iterator"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_transform_that_uses_its_own_loader_is_refused(place: str, call: str, clips: dict[str, Path]) -> None:
    """Its thread would wait for itself."""
    made: list[Any] = []
    ready = threading.Event()

    def greedy(clip: Clip) -> None:
        assert ready.wait(60)
        loader, iterator = made
        {"iter": loader.__iter__, "next": iterator.__next__, "close": loader.close}.get(call, iterator.close)()

    settings: dict[str, Any] = {"clip": {"frames": 3}, "transform": TRANSFORM, "batch": 2, "device": "cpu", place: greedy}
    with VideoLoader([str(clips["h264"])] * 2, **settings) as loader:
        made.extend([loader, iter(loader)])
        ready.set()
        with pytest.raises(
            GraphError, match=f"{call.split(' of ')[0]}.*called while it makes a clip, in its own before= or after="
        ):
            next(made[1])
        assert len(list(VideoLoader([str(clips["h264"])] * 2, **{**settings, place: None}))) == 1, "the process goes on"
    made.clear()


def test_a_transform_may_iterate_another_loader(clips: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"clip": {"frames": 3}, "transform": TRANSFORM, "batch": 1, "device": "cpu"}

    def partner(clip: Clip) -> torch.Tensor:
        with VideoLoader(str(clips["vp9"]), **settings) as other:
            return (clip.video + next(iter(other)).video[0]) / 2

    assert load(clips, after=partner).video.shape == (2, 3, 3, 20, 24)


def test_the_end_of_its_own_iterator_is_not_the_loops(clips: dict[str, Path]) -> None:
    numbers = iter(range(1))
    with pytest.raises(RuntimeError, match=f"StopIteration was raised by the transform before=.* for {clips['h264']}"):
        load(clips, before=lambda clip: next(numbers) or None)


def test_an_error_of_gpupipe_in_it_is_not_the_videos(clips: dict[str, Path], tmp_path: Path) -> None:
    def reads_another(clip: Clip) -> None:
        VideoReader(tmp_path / "missing.mp4", device="cpu")

    with VideoLoader([str(clips["h264"])] * 2, before=reads_another, **PLAIN) as loader:
        with pytest.raises(OpenError, match=r"missing\.mp4") as caught:
            next(iter(loader))
        assert any(str(clips["h264"]) in note for note in caught.value.__notes__)
        assert loader.bad_files == {}


def test_an_error_of_it_in_a_replay_is_the_callers(clips: dict[str, Path]) -> None:
    calls: list[int] = []

    def fails_later(clip: Clip) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("of my own")

    with VideoLoader([str(clips["h264"])], before=fails_later, **PLAIN | {"batch": 1}) as loader:
        record = next(iter(loader)).clips[0]
        with pytest.raises(ValueError, match="of my own") as caught:
            loader.replay(record)
    assert any(str(clips["h264"]) in note for note in caught.value.__notes__)


def test_one_that_makes_another_clip_again_is_still_inside_of_its_loader(clips: dict[str, Path]) -> None:
    calls: list[int] = []

    def greedy(clip: Clip) -> None:
        calls.append(1)
        if len(calls) == 2:
            loader.replay(record)
            loader.close()

    with VideoLoader([str(clips["h264"])], before=greedy, **PLAIN | {"batch": 1}) as loader:
        record = next(iter(loader)).clips[0]
        with pytest.raises(GraphError, match="called while it makes a clip"):
            loader.replay(record)
    assert len(calls) == 3


class Hangs:
    """A transform that waits for what does not come, until the test is over."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __call__(self, clip: Clip) -> None:
        self.begun.set()
        self.over.wait(60)


@pytest.fixture
def hangs() -> Iterator[Hangs]:
    made = Hangs()
    yield made
    made.over.set()


@pytest.mark.parametrize("place", ["before", "after"])
def test_one_that_hangs_is_named(clips: dict[str, Path], hangs: Hangs, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_GRACE_SECONDS", 0.5)
    with VideoLoader([str(clips["h264"])] * 2, **PLAIN, **{place: hangs}, decode={"limit_seconds": 1}) as loader:
        with pytest.raises(GpupipeError, match=f"the transform {place}=.*Hangs.* at work on {clips['h264']}") as caught:
            next(iter(loader))
        assert "limit_seconds" in str(caught.value)
        assert loader.bad_files == {}


def test_one_that_hangs_does_not_hold_up_the_end(
    clips: dict[str, Path], hangs: Hangs, caplog: pytest.LogCaptureFixture
) -> None:
    with VideoLoader([str(clips["h264"])] * 4, **PLAIN, before=hangs, decode={"threads": 2}) as loader:
        batches = iter(loader)
        assert hangs.begun.wait(60)
        begin = time.monotonic()
        with caplog.at_level(logging.WARNING, "gpupipe"):
            batches.close()
        assert time.monotonic() - begin < 30
        assert f"before={hangs!r} at work on {clips['h264']}" in caplog.text
        hangs.over.set()
        assert len(list(loader)) == 2


def test_at_the_end_no_further_call_begins(clips: dict[str, Path]) -> None:
    calls: list[int] = []

    def slow(clip: Clip) -> None:
        calls.append(1)
        time.sleep(0.2)

    settings = PLAIN | {"clip": {"frames": 3, "clips_per_video": 64}, "batch": 64}
    with VideoLoader([str(clips["h264"])], **settings, before=slow, decode={"threads": 1}) as loader:
        batches = iter(loader)
        while not calls:
            time.sleep(0.01)
        batches.close()
    assert len(calls) < 32
