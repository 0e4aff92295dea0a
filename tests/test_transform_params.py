"""Drawn parameters as data: kept as JSON, replayed, and applied to what goes with the pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_cases import make_format, make_info, make_planes, run

from gpupipe import VideoLoader
from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams, affine
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.errors import ConfigError, GraphError
from gpupipe.types import Planes

EVERYTHING: dict[str, Any] = {
    "size": (24, 32), "vflip": 0.5, "affine": {"degrees": 20, "translate": (0.2, 0.1), "scale": (0.8, 1.2), "shear": 10},
    "auto_augment": {"num_ops": 3}, "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "grayscale": 0.2, "channel_drop": 0.2, "blur": {"kernel_size": 5, "p": 0.5}, "erasing": {"p": 0.5}, "dtype": "float32",
}  # fmt: skip
SIZE = (24, 32)


def some_params(seed: int, **changes: Any) -> TransformParams:
    config = TransformConfig(**EVERYTHING | changes)
    return ClipTransform(config, 3).draw(make_info(80, 60), np.random.default_rng(seed))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["clip", "frame"]))
def test_params_survive_json(seed: int, draws: str) -> None:
    params = some_params(seed, draws=draws)
    assert TransformParams.from_json(params.to_json()) == params
    assert len(params.frames) == (3 if draws == "frame" else 0)


@pytest.mark.parametrize("text", ["", "{}", '{"crop": [0, 0, 1], "bounds": [0, 0, 1, 1]}', '{"crop": "all"}', "[1]"])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no transform parameters"):
        TransformParams.from_json(text)


def test_an_unknown_change_of_colour_is_named() -> None:
    text = replace(whole((4, 4)), color=(ColorOp("hue", 0.1),)).to_json().replace("hue", "huge")
    with pytest.raises(ConfigError, match=r"color\.0\.name"):
        TransformParams.from_json(text)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('"hflip"', '"mirror"', "mirror"),
        ('"value":0.1', '"value":0.1,"p":1', r"color\.0\.p"),
        ("[0.0,", "[NaN,", r"crop\.0"),
        ('"value":0.1', '"value":Infinity', r"color\.0\.value"),
    ],
)
def test_json_is_read_strictly(old: str, new: str, where: str) -> None:
    text = replace(whole((4, 4)), color=(ColorOp("hue", 0.1),)).to_json()
    assert old in text
    with pytest.raises(ConfigError, match=where):
        TransformParams.from_json(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blur": 1.5}, r"blur by 1\.5, and blur=None"),
        ({"blur": -1.0}, "blur -1 is negative"),
        ({"erase": (1, 1, 4, 4)}, r"erase \(1, 1, 4, 4\), and erasing=None"),
        ({"color": (ColorOp("channel_drop", 7),)}, "channel_drop has no choice 7"),
        ({"color": (ColorOp("channel_drop", -1),)}, "channel_drop has no choice -1"),
        ({"color": (ColorOp("posterize", -2),)}, "posterize has no choice -2"),
        ({"color": (ColorOp("sepia"),)}, "no change of colour 'sepia'"),
        ({"color": (ColorOp("contrast", float("nan")),)}, "not finite"),
        ({"crop": (0.0, float("nan"), 40.0, 50.0)}, "not finite"),
    ],
)
@pytest.mark.parametrize("each", [False, True])
def test_params_that_this_transform_cannot_apply_are_named(changes: dict[str, Any], message: str, each: bool) -> None:
    config = TransformConfig(size=(24, 32), dtype="float32", blur={"kernel_size": 5} if "negative" in message else None)
    params = replace(whole((40, 50)), **changes)
    if each:
        params = replace(whole((40, 50)), frames=(whole((40, 50)), params))
    with pytest.raises(GraphError, match=f"params do not fit this transform: .*{message}"):
        run(config, make_planes(make_format(50, 40), 1), make_info(50, 40), params, [0, 0])


def test_everything_is_drawn_now_and_then() -> None:
    drawn = [some_params(seed) for seed in range(60)]
    assert {p.vflip for p in drawn} == {p.hflip for p in drawn} == {True, False}
    assert {p.blur > 0 for p in drawn} == {p.erase is not None for p in drawn} == {True, False}
    names = {op.name for p in drawn for op in p.color}
    assert names == {
        "brightness", "contrast", "saturation", "hue", "grayscale", "channel_drop", "sharpness", "posterize", "solarize",
        "autocontrast", "equalize",
    }  # fmt: skip
    assert len({p.affine for p in drawn}) == 60
    for p in drawn:
        assert p.erase is None or (p.erase[0] + p.erase[2] <= 24 and p.erase[1] + p.erase[3] <= 32)


def test_frames_of_a_clip_draw_alone_or_together() -> None:
    each = some_params(1, draws="frame").frames
    assert len({p.crop for p in each}) == len({p.affine for p in each}) == 3
    planes, info = make_planes(make_format(80, 60), 1), make_info(80, 60)
    config = TransformConfig(**EVERYTHING | {"draws": "frame"})
    params = some_params(1, draws="frame")
    clip = run(config, planes, info, params, [0, 0, 0])
    for t in range(3):
        alone = run(TransformConfig(**EVERYTHING), planes, info, each[t], [0])
        assert torch.equal(clip[:, t], alone[:, 0])
    with pytest.raises(GraphError, match="3 frames, the clip has 2"):
        run(config, planes, info, params, [0, 0])


def test_a_loader_shows_its_params_and_they_make_the_clip_again(clips: dict[str, Path]) -> None:
    from test_loader import remade

    with VideoLoader([str(clips["h264"])] * 2, clip={"frames": 3}, transform=EVERYTHING, batch=2, device="cpu") as loader:
        batch = next(iter(loader))
        again = next(iter(loader))
    assert batch.params == [record.params for record in batch.clips]
    assert batch.params != again.params, "another epoch, another draw"
    for row, record in enumerate(batch.clips):
        replayed = replace(record, params=TransformParams.from_json(record.params.to_json()))
        assert torch.equal(batch.video[row], remade(replayed, ClipTransform(TransformConfig(**EVERYTHING), 3)))


# Masks, boxes, points, flow


def a_pattern(height: int, width: int) -> tuple[Planes, torch.Tensor]:
    """Grey blocks of 8 pixels as full-range 4:4:4 RGB planes, and the number of each pixel's block."""
    rows, columns = torch.arange(height)[:, None] // 8, torch.arange(width)[None] // 8
    blocks = rows * 16 + columns
    grey = (blocks * 37 % 256).to(torch.uint8)
    return Planes(torch.cat([grey] * 3)[None], make_format(width, height, "444")), blocks


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rotation", [0, 90])
def test_masks_move_as_the_pixels_do(seed: int, rotation: Any) -> None:
    """The same nearest sampling of a picture gives the same pixels."""
    planes, _ = a_pattern(60, 80)
    info = make_info(80, 60, rotation=rotation, color_matrix="rgb", color_range="full")
    config = TransformConfig(
        size=SIZE, interpolation="nearest", dtype="uint8", affine={"degrees": 30, "shear": 10} if seed % 2 else None
    )
    transform = ClipTransform(config, 1)
    params = transform.draw(info, np.random.default_rng(seed))
    clip = run(config, planes, info, params, [0])[0, 0]
    displayed = torch.rot90(planes.y[0], -rotation // 90)
    moved = transform.masks(displayed, params)
    assert float((moved != clip).double().mean()) < 0.01  # centres on the line between two pixels
    assert moved.dtype == torch.uint8


@pytest.mark.parametrize("seed", range(20))
def test_points_lie_where_their_pixels_went(seed: int) -> None:
    """A bright spot, found again in the clip."""
    rng = np.random.default_rng(seed)
    info = make_info(80, 60, color_matrix="rgb", color_range="full")
    x, y = int(rng.integers(25, 55)), int(rng.integers(20, 40))
    data = torch.zeros(1, 180, 80, dtype=torch.uint8)
    for top in (0, 60, 120):
        data[0, top + y - 2 : top + y + 2, x - 2 : x + 2] = 255  # its middle is (x, y)
    config = TransformConfig(
        size=(64, 64),
        scale=(0.7, 1),
        dtype="float32",
        mean=(0, 0, 0),
        std=(1, 1, 1),
        affine={"degrees": 25, "scale": (0.8, 1.1)},
    )
    transform = ClipTransform(config, 1)
    params = transform.draw(info, rng)
    spot = run(config, Planes(data, make_format(80, 60, "444")), info, params, [0])[0, 0].double()
    place = transform.points(torch.tensor([[float(x), float(y)]], dtype=torch.float64), params)[0]
    if not bool(((place > 6) & (place < 58)).all()):
        return
    at = torch.arange(64) + 0.5
    middle = torch.stack([(spot.sum(0) * at).sum(), (spot.sum(1) * at).sum()]) / spot.sum()
    assert float((middle - place).abs().max()) < 0.1


def test_points_there_and_back_and_boxes_around_them() -> None:
    for seed in range(20):
        params = some_params(seed)
        transform = ClipTransform(TransformConfig(**EVERYTHING), 3)
        values = torch.rand(5, 7, 2, dtype=torch.float64) * 60
        moved = transform.points(values, params)
        back = torch.from_numpy(params.matrix(SIZE))
        assert torch.allclose(moved @ back[:2, :2].T + back[:2, 2], values)
        box = torch.tensor([[10.0, 12.0, 31.0, 40.0]], dtype=torch.float64)
        corners = transform.points(torch.tensor([[10.0, 12], [31, 12], [10, 40], [31, 40]], dtype=torch.float64), params)
        expected = torch.cat([corners.amin(0), corners.amax(0)])
        expected[::2].clamp_(0, 32)
        expected[1::2].clamp_(0, 24)
        assert torch.allclose(transform.boxes(box, params)[0], expected)


def test_a_crop_and_a_flip_of_boxes() -> None:
    params = TransformParams((10.0, 20.0, 12.0, 16.0), (10, 20, 12, 16), hflip=True)
    transform = ClipTransform(TransformConfig(size=SIZE), 1)
    boxes = torch.tensor([[20.0, 10.0, 24.0, 13.0], [0.0, 0.0, 5.0, 5.0], [0.0, 0.0, 99.0, 99.0]])
    expected = torch.tensor([[24.0, 0.0, 32.0, 6.0], [32.0, 0.0, 32.0, 0.0], [0.0, 0.0, 32.0, 24.0]])
    assert torch.allclose(transform.boxes(boxes, params), expected)


@pytest.mark.parametrize("seed", range(10))
def test_flow_says_where_points_go(seed: int) -> None:
    """A flow that is linear in place: following it and moving the picture commute."""
    info = make_info(80, 60)
    config = TransformConfig(size=SIZE, scale=(0.5, 1), affine={"degrees": 40, "scale": (0.9, 1.2)})
    transform = ClipTransform(config, 1)
    params = transform.draw(info, np.random.default_rng(seed))
    y, x = torch.meshgrid(torch.arange(60) + 0.5, torch.arange(80) + 0.5, indexing="ij")
    flow = torch.stack([0.1 * x - 0.05 * y + 1, 0.02 * x + 0.07 * y - 2]).double()
    moved = transform.flow(flow, params)
    rows, columns = 12, 16
    here = torch.tensor([columns + 0.5, rows + 0.5], dtype=torch.float64)
    matrix = torch.from_numpy(params.matrix(SIZE))
    there = matrix[:2, :2] @ here + matrix[:2, 2]
    target = there + torch.tensor([0.1 * there[0] - 0.05 * there[1] + 1, 0.02 * there[0] + 0.07 * there[1] - 2])
    assert torch.allclose(
        transform.points(target[None], params)[0] - here, moved[:, rows, columns], atol=5e-3
    )  # the filter moves slopes a little


def test_values_of_another_frame_are_refused() -> None:
    transform = ClipTransform(TransformConfig(**EVERYTHING), 3)
    with pytest.raises(GraphError, match="10x10"):
        transform.masks(torch.zeros(10, 10), whole((60, 80)))
    with pytest.raises(GraphError, match="2 frames for parameters of 3"):
        transform.boxes(torch.zeros(2, 1, 4), some_params(0, draws="frame"))
    with pytest.raises(GraphError, match="frames of 61x80, these parameters are of frames of 60x80"):
        transform.masks(torch.zeros(61, 80), some_params(0))
    each = transform.boxes(torch.zeros(3, 1, 4), some_params(0, draws="frame"))
    assert each.shape == (3, 1, 4)


@pytest.mark.parametrize("draws", ["clip", "frame"])
def test_places_in_frames_that_before_resized_are_not_taken_for_those_of_the_display(draws: str) -> None:
    """Parameters are about the frames that before= gave: only who knows what it did can say where a place went."""
    transform = ClipTransform(TransformConfig(size=(30, 40), crop="none", hflip=0.0, draws=draws), 1)
    params = transform.draw(make_info(80, 60), np.random.default_rng(0), displayed=(120, 160))
    assert (params.frame, params.displayed) == ((60, 80), (120, 160))
    assert TransformParams.from_json(params.to_json()) == params
    box, point = torch.tensor([[8.0, 4, 80, 60]]), torch.tensor([[8.0, 4]])
    for move, places in ((transform.boxes, box), (transform.points, point)):
        with pytest.raises(GraphError, match=r"frames of 60x80 .*before= gave them; the video shows 120x160 .*\n.*frame="):
            move(places, params)
        with pytest.raises(GraphError, match="places in frames of 120x160"):
            move(places, params, frame=(120, 160))
        assert torch.allclose(move(places, params, frame=(60, 80)), places / 2)
    with pytest.raises(GraphError, match="frames of 120x160, these parameters are of frames of 60x80"):
        transform.masks(torch.zeros(1, 120, 160), params)
    assert transform.masks(torch.ones(1, 60, 80), params).shape == (1, 30, 40)
    plain = transform.draw(make_info(80, 60), np.random.default_rng(0), displayed=(60, 80))
    assert plain.displayed is None
    assert torch.allclose(transform.points(point, plain), point / 2)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("masks", np.zeros((60, 80)), "values are a ndarray, not a tensor"),
        ("boxes", [[0, 0, 1, 1]], "values are a list, not a tensor"),
        ("flow", None, "values are a NoneType, not a tensor"),
        ("masks", torch.zeros(60), "are no frames"),
        ("boxes", torch.zeros(2, 2), r"are no places\n.*x1, y1, x2, y2"),
        ("boxes", torch.zeros(2, 4, dtype=torch.int64), "torch.int64"),
        ("points", torch.zeros(2, 4), r"are no places\n.*x, y"),
    ],
)
def test_what_are_no_targets_is_said(name: str, values: Any, says: str) -> None:
    transform = ClipTransform(TransformConfig(**EVERYTHING), 3)
    with pytest.raises(GraphError, match=says):
        getattr(transform, name)(values, some_params(0))


def test_moves_one_after_the_other_are_one() -> None:
    size = (31, 42)
    first, second = affine.inverse(size, angle=10, translate=(3, 1)), affine.inverse(size, scale=1.3, shear=(5, -4))
    both = affine.chain([first, second])
    assert both is not None
    a, b, c = (np.array([*m, 0, 0, 1]).reshape(3, 3) for m in (first, second, both))
    np.testing.assert_allclose(a @ b, c, atol=1e-12)
    assert affine.chain([]) is None
