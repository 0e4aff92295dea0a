"""The kernel for turns, shears, shifts, zooms and other filters, compiled for the host, against the float64 reference.

See tests/test_transform_fused_on_host.py for what that shows; what only a GPU can show is left to tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import assert_clip, batch_of, make_format, make_info, make_planes, moved_case, reference, run, steep

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams, affine, fuse, move
from gpupipe.data.transform.params import ColorOp, whole

UNIT = 2e-5
"""Allowed error of RGB in [0, 1]: float32 sums over a few hundred codes of 255 or 65535, against float64."""


def expected(clip: ClipInput, config: TransformConfig) -> torch.Tensor:
    """The reference's, also where clips are made by kernels."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(fuse, "takes", lambda out: False)
        return reference(clip, config)


def check(planes: Any, info: Any, params: TransformParams, config: TransformConfig, frame_map: list[int]) -> None:
    clip = run(config, planes, info, params, frame_map)
    assert_clip(clip, expected(ClipInput(planes, info, params, frame_map, clip), config), config, UNIT)


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_reference(launches: list[str], seed: int) -> None:
    """Every format, rotation, filter, antialias and dtype; with a move, or along the axes."""
    planes, info, params, config = moved_case(seed)
    check(planes, info, params, config, [2, 0, 0, 1, 2][: 1 + seed % 5])
    assert [name.split("_")[0] for name in launches] == ["move"]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_quarter_turns_and_whole_shifts_are_exact(launches: list[str], interpolation: Any, rotation: Any) -> None:
    """Places on samples' centres, where each filter gives the sample itself, and outside of the frame the fill."""
    info, planes = make_info(40, 40, rotation=rotation), make_planes(make_format(40, 40, "444"), 1)
    config = TransformConfig(size=(40, 40), dtype="float32", interpolation=interpolation, fill=(0.2, 0.5, 0.9))
    for angle, shift in ((90, (0, 0)), (180, (3, -7)), (-90, (1, 50)), (0, (11, 0))):
        params = replace(whole((40, 40)), affine=affine.inverse((40, 40), angle=angle, translate=shift))
        check(planes, info, params, config, [0])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [0.2, 5.0, 300.0])
def test_strong_shrinks_and_zooms(launches: list[str], interpolation: Any, scale: float) -> None:
    """Footprints of more rows than a thread keeps weights of, and a frame of a few output pixels."""
    info, planes = make_info(130, 91), make_planes(make_format(130, 91, nv=True), 2)
    params = replace(whole((91, 130)), affine=affine.inverse((6, 7), angle=27.0, scale=scale, shear=(10.0, -20.0)))
    config = TransformConfig(size=(6, 7), dtype="float32", interpolation=interpolation, fill=(0.9, 0.1, 0.4))
    check(planes, info, params, config, [0, 1])


def test_all_of_the_frame_beyond_the_output_is_fill(launches: list[str]) -> None:
    info, planes = make_info(30, 20), make_planes(make_format(30, 20), 1)
    params = replace(whole((20, 30)), affine=(1.0, 0.0, 1e12, 0.0, 1.0, -1e12))
    config = TransformConfig(size=(5, 6), dtype="float32", mean=(0, 0, 0), std=(1, 1, 1), fill=(0.25, 0.5, 0.75))
    for interpolation in ("nearest", "bilinear", "bicubic"):
        clip = run(config.model_copy(update={"interpolation": interpolation}), planes, info, params, [0])
        assert torch.equal(clip[:, 0, 2, 3], torch.tensor([0.25, 0.5, 0.75]))
    assert len(launches) == 3


def test_very_wide_frames(launches: list[str]) -> None:
    info, planes = make_info(8001, 37), make_planes(make_format(8001, 37, bits=10, p016=True), 1)
    params = TransformParams((2.0, 7700.0, 31.0, 300.0), (2, 7700, 31, 300), affine=affine.inverse((9, 200), angle=2.5))
    check(planes, info, params, TransformConfig(size=(9, 200), dtype="float32"), [0])


def moved_batch(config: TransformConfig, count: int) -> list[ClipInput]:
    """Clips of all sizes and formats, most of them moved."""
    clips = batch_of(count, config, colors=True)
    for number in range(0, count, 3):
        turn = affine.inverse(config.size, angle=7.0 * number, scale=0.7 + 0.1 * (number % 7), shear=(number % 5, 0.0))
        for k in range(number, min(number + 2, count)):
            clips[k] = replace(clips[k], params=replace(clips[k].params, affine=turn))
    return clips


@pytest.mark.parametrize("changes", [{}, {"clamp": False}, {"interpolation": "bicubic", "dtype": "bfloat16"}])
def test_a_batch_of_everything(launches: list[str], changes: dict[str, Any]) -> None:
    """More clips than a launch has room for, colours of all kinds; the bits are those of each clip alone."""
    config = TransformConfig(**{"size": (19, 35), "dtype": "float32", "fill": (0.1, 0.5, 0.3)} | changes)
    clips, alone = moved_batch(config, 30), moved_batch(config, 30)
    transform = ClipTransform(config, 3)
    transform.apply_batch(clips)
    assert len([name for name in launches if name.startswith("move")]) <= 6
    limit = 2.0**-6 if config.dtype == "bfloat16" else 30 * UNIT / min(config.std)
    for clip, single in zip(clips, alone, strict=True):
        transform.apply(single.planes, single.info, single.params, single.frame_map, single.out)
        assert torch.equal(clip.out, single.out)
        exact = expected(clip, config).transpose(0, 1)
        off = (clip.out.double() - exact).abs() - 2.0**-8 * exact.abs() * (config.dtype == "bfloat16")
        allowed = 0.03 if steep(clip.params.color) else 0.0
        assert float((off > limit).double().mean()) <= allowed, (float(off.max()), clip.params)


def test_more_frames_than_a_launch(launches: list[str]) -> None:
    info, planes = make_info(24, 18), make_planes(make_format(24, 18, nv=True), 50)
    config = TransformConfig(size=(9, 18), dtype="float32")
    for color in ((), (ColorOp("contrast", 1.2),)):
        params = replace(whole((18, 24)), affine=affine.inverse((9, 18), angle=30), color=color)
        frame_map = [k * 7 % 50 for k in range(1000)]
        clip = run(config, planes, info, params, frame_map)
        moved = [name.replace("_texture", "") for name in launches]
        assert moved == ["move_u8_float32"] * -(-1000 // move.MAX_FRAMES) + ["color_float32"] * len(color)
        few = run(config, planes, info, params, frame_map[:50])
        assert torch.equal(few, clip[:, :50])
        assert torch.equal(clip[:, :50], clip[:, 950:])
        launches.clear()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_each_frame_with_draws_of_its_own(launches: list[str], interpolation: Any) -> None:
    config = TransformConfig(
        preset="kinetics_train", size=(20, 17), dtype="float32", draws="frame", interpolation=interpolation,
        affine={"degrees": 30, "translate": (0.2, 0.2), "scale": (0.7, 1.3), "shear": 10}, fill=0.5, vflip=0.5,
    )  # fmt: skip
    info, planes = make_info(60, 44, rotation=90), make_planes(make_format(60, 44, nv=True), 4)
    transform = ClipTransform(config, 4)
    clip = ClipInput(planes, info, transform.draw(info, np.random.default_rng(3)), [3, 1, 0, 2], torch.zeros(3, 4, 20, 17))
    transform.apply_batch([clip])
    assert {name.split("_")[0] for name in launches} == {"move", "color"}
    assert float((clip.out - expected(clip, config).transpose(0, 1)).abs().max()) < 30 * UNIT / min(config.std)


def test_slots_of_a_batch_in_any_memory_order(launches: list[str]) -> None:
    info, planes = make_info(50, 43, rotation=270), make_planes(make_format(50, 43, nv=True), 2)
    for interpolation in ("bilinear", "bicubic"):
        config = TransformConfig(size=(11, 13), dtype="float32", interpolation=interpolation)
        params = whole(info.display_size, hflip=True)
        if interpolation == "bilinear":
            params = replace(params, affine=affine.inverse((11, 13), angle=-20))
        batch = torch.full((13, 2, 3, 2, 11), -9.0)
        slot = batch[:, 1].permute(1, 2, 3, 0)
        ClipTransform(config, 2).apply(planes, info, params, [1, 0], slot)
        assert torch.equal(slot, run(config, planes, info, params, [1, 0]))
        assert bool((batch[:, 0] == -9).all())
