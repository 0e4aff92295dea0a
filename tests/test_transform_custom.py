"""A user's own transforms: what they see, what they may give, and what becomes of their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plane_cases import make_format, make_info, make_planes

from gpupipe import Batch, ConfigError, VideoLoader, VideoReader
from gpupipe.data.transform import to_rgb
from gpupipe.data.transform.custom import Custom, _as_planes
from gpupipe.errors import GraphError
from gpupipe.types import Clip, ClipRequest, FramePick

TRANSFORM: dict[str, Any] = {"size": (20, 24), "dtype": "float32"}


def load(clips: dict[str, Path], **given: Any) -> Batch:
    settings: dict[str, Any] = {"clip": {"frames": 3}, "transform": TRANSFORM, "batch": 2, "device": "cpu"}
    with VideoLoader([str(clips["h264"])] * 2, **settings | given) as loader:
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
