"""The kernels that make clips together, compiled for the host, with the Python that packs their arguments.

It runs the kernels' own source, so it finds a wrong index, weight, stride or struct field on machines without a GPU. What it
cannot show (rounding by fused multiply-add, synchronisation that only a GPU breaks) is left to tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from counted_ops import counted_ops
from plane_cases import (
    assert_clip,
    batch_of,
    clip_exact,
    drawn_ops,
    make_format,
    make_info,
    make_planes,
    random_case,
    random_params,
    run,
    steep,
)

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, finish, fuse, move, resize
from gpupipe.data.transform.adjust import adjust
from gpupipe.data.transform.geometry import geometry
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.data.transform.picture import store

UNIT = 2e-5
"""Allowed error of RGB in [0, 1]: float32 sums over a few hundred codes of 255 or 65535, against float64."""


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_exact_transform(launches: list[str], seed: int) -> None:
    planes, info, params, config = random_case(seed)
    clip = run(config, planes, info, params, [2, 0, 0, 1])
    assert [name.split("_")[0] for name in launches] in (["resize"], ["move"])
    assert launches[0].startswith("resize") or not config.antialias
    assert_clip(clip, clip_exact(planes, info, params, config, [2, 0, 0, 1]), config, UNIT)


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (1500, 40, (7, 500)),
        (40, 1500, (300, 5)),
        (2100, 90, (9, 60)),
        (8000, 30, (5, 224)),
        (30, 480, (6, 20)),
        (9, 9, (1, 1)),
    ],
)
@pytest.mark.parametrize("rotation", [0, 90])
@pytest.mark.parametrize("nv", [False, True])
def test_long_lines_and_odd_strips(
    launches: list[str], width: int, height: int, size: tuple[int, int], rotation: Any, nv: bool
) -> None:
    form, info = make_format(width, height, nv=nv), make_info(width, height, rotation=rotation)
    config = TransformConfig(size=size[:: 1 if rotation == 0 else -1], dtype="float32")
    planes, params = make_planes(form, 1), whole(info.display_size, hflip=True)
    clip = run(config, planes, info, params, [0])
    assert launches
    assert_clip(clip, clip_exact(planes, info, params, config, [0]), config, UNIT)


def test_more_frames_than_a_launch(launches: list[str]) -> None:
    form, info = make_format(24, 18, nv=True), make_info(24, 18)
    for color in ((), (ColorOp("contrast", 1.2),)):
        config = TransformConfig(size=(9, 10), dtype="float32")
        planes, params = make_planes(form, 50), replace(whole(info.display_size), color=color)
        frame_map = [k * 7 % 50 for k in range(1000)]
        clip = run(config, planes, info, params, frame_map)
        assert launches == ["resize_u8_float32"] * -(-1000 // resize.MAX_FRAMES) + ["color_float32"] * len(color)
        few = run(config, planes, info, params, frame_map[:50])
        assert torch.equal(few, clip[:, :50])
        assert torch.equal(clip[:, :50], clip[:, 950:])
        launches.clear()


def _reference(clip: ClipInput, config: TransformConfig, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The same clip by the float reference."""
    with monkeypatch.context() as context:
        context.setattr(fuse, "takes", lambda out: False)
        transform = ClipTransform(config.model_copy(update={"dtype": "float32"}), len(clip.blend or clip.frame_map))
        out = torch.zeros(transform.clip_shape)
        transform.apply_batch([replace(clip, out=out)])
    return out


@pytest.mark.parametrize("changes", [{}, {"clamp": False}, {"dtype": "bfloat16", "layout": "NTCHW"}, {"size": (224, 30)}])
def test_a_batch_of_everything(launches: list[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    config = TransformConfig(**{"size": (33, 40), "dtype": "float32"} | changes)
    clips = batch_of(41, config, colors=True)
    ClipTransform(config, 3).apply_batch(clips)
    limit = 2.0**-6 if config.dtype == "bfloat16" else 20 * UNIT / min(config.std)
    words = [clip.planes.format.sample_bytes for clip in clips]
    assert len([name for name in launches if name.startswith("resize")]) == sum(-(-words.count(n) // 8) for n in (1, 2))
    for clip in clips:
        off = (clip.out.float() - _reference(clip, config, monkeypatch)).abs()
        allowed = 0.03 if steep(clip.params.color) else 0.0
        assert float((off > limit).double().mean()) <= allowed, (float(off.max()), clip.params)


def test_a_batch_gives_the_bits_of_its_clips(launches: list[str]) -> None:
    config = TransformConfig(size=(20, 33), dtype="float32")
    together, alone = batch_of(12, config, colors=True), batch_of(12, config, colors=True)
    transform = ClipTransform(config, 3)
    transform.apply_batch(together)
    for a, b in zip(together, alone, strict=True):
        transform.apply(b.planes, b.info, b.params, b.frame_map, b.out)
        assert torch.equal(a.out, b.out)


def test_memory_to_work_in_is_used_again_and_shows_nowhere(launches: list[str]) -> None:
    config = TransformConfig(size=(20, 33), dtype="float32")
    transform, memory = ClipTransform(config, 3), torch.full((1 << 20,), 0xA5, dtype=torch.uint8)
    asked: list[int] = []

    def scratch(size_bytes: int) -> torch.Tensor:
        asked.append(size_bytes)
        return memory

    for seed in (12, 13):
        ours, theirs = batch_of(seed, config, colors=True), batch_of(seed, config, colors=True)
        with counted_ops() as ops:
            transform.apply_batch(ours, scratch=scratch)
        assert not ops, "each makes the thread win the interpreter lock back from the training loop"
        transform.apply_batch(theirs)
        assert all(torch.equal(a.out, b.out) for a, b in zip(ours, theirs, strict=True))
    assert len(asked) == 2, "once a batch"
    assert max(asked) <= len(memory)


def test_what_needs_another_way_is_left(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips whose colours need more than a pixel and blended ones, beside one that fits and one with too long lines."""
    config = TransformConfig(size=(12, 5), dtype="float32")
    info, planes = make_info(60, 44), make_planes(make_format(60, 44, nv=True), 4)
    plain, transform = whole(info.display_size), ClipTransform(config, 2)
    wide = make_planes(make_format(3000, 20), 4), make_info(3000, 20)
    assert not resize.reaches((1, 1, 1, 2**29), (3, 2, 12, 5))
    clips = [
        ClipInput(planes, info, plain, [0, 1], torch.zeros(transform.clip_shape)),
        ClipInput(planes, info, replace(plain, color=(ColorOp("sharpness", 2.0),)), [0, 1], torch.zeros(transform.clip_shape)),
        ClipInput(planes, info, plain, [0, 1, 2, 3], torch.zeros(transform.clip_shape), blend=[0.5, 0.25]),
        ClipInput(*wide, whole((20, 3000)), [1, 2], torch.zeros(transform.clip_shape)),
    ]
    left = fuse.Fuser(config, transform._scale, torch.float32).make(clips)
    assert [id(clip) for clip in left] == [id(clip) for clip in clips[1:3]]
    assert launches == ["resize_u8_float32", "move_u8_float32"]
    transform.apply_batch(clips)
    for clip in clips:
        assert float((clip.out - _reference(clip, config, monkeypatch)).abs().max()) < UNIT / min(config.std)


def test_each_frame_with_draws_of_its_own(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformConfig(preset="kinetics_train", size=(20, 17), dtype="float32", draws="frame", erasing={"p": 0.5})
    info, planes = make_info(60, 44, rotation=90), make_planes(make_format(60, 44, nv=True), 4)
    transform = ClipTransform(config, 4)
    params = transform.draw(info, np.random.default_rng(3))
    clip = ClipInput(planes, info, params, [3, 1, 0, 2], torch.zeros(transform.clip_shape))
    transform.apply_batch([clip])
    assert launches == ["resize_u8_float32", "color_float32"]
    assert float((clip.out - _reference(clip, config, monkeypatch)).abs().max()) < 20 * UNIT / min(config.std)


def test_slots_of_a_batch_in_any_memory_order(launches: list[str]) -> None:
    form, info = make_format(50, 43, nv=True), make_info(50, 43)
    config = TransformConfig(size=(11, 13), dtype="float32")
    for color in ((), (ColorOp("contrast", 0.5), ColorOp("contrast", 1.0))[:1]):
        transform = ClipTransform(config, 2)
        batch = torch.full((13, 2, 3, 2, 11), -9.0)
        slot = batch[:, 1].permute(1, 2, 3, 0)
        params = replace(random_params(np.random.default_rng(0), info.display_size), color=color)
        planes = make_planes(form, 2)
        transform.apply(planes, info, params, [1, 0], slot)
        assert torch.equal(slot, run(config, planes, info, params, [1, 0]))
        assert bool((batch[:, 0] == -9).all())


@pytest.mark.parametrize(
    ("size", "antialias", "serves"),
    [
        ((20, 20), True, True),
        ((48, 30), True, True),
        ((96, 128), True, True),
        ((96, 128), False, True),
        ((20, 20), False, False),
    ],
)
def test_what_shrinks_without_antialias_is_left(size: tuple[int, int], antialias: bool, serves: bool) -> None:
    form, info = make_format(64, 48), make_info(64, 48)
    layout = resize.layout_of(geometry(info, form, whole(info.display_size), size, antialias=antialias))
    assert (layout is not None) == serves


@pytest.mark.parametrize(
    ("width", "height", "serves"), [(2100, 48, True), (48, 4000, True), (9000, 48, False), (48, 9000, False)]
)
def test_weights_too_many_for_a_block_are_left(width: int, height: int, serves: bool) -> None:
    form, info = make_format(width, height), make_info(width, height)
    assert (resize.layout_of(geometry(info, form, whole(info.display_size), (70, 70))) is not None) == serves


@pytest.mark.parametrize("seed", range(40))
def test_colours_equal_those_of_torch(launches: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops, clamp = drawn_ops(rng), bool(rng.integers(2))
    frames, height, width = (int(n) for n in rng.integers(1, (4, 60, 90)))
    rgb = torch.from_numpy(rng.random((frames, 3, height, width), np.float32))
    dtype = (torch.float32, torch.float32, torch.bfloat16, torch.uint8)[seed % 4]
    scale = (np.full(3, 255.0), np.zeros(3)) if dtype == torch.uint8 else (rng.uniform(1, 5, 3), rng.uniform(-2, 2, 3))
    out = torch.zeros((frames, height, width, 3), dtype=dtype).permute(0, 3, 1, 2)
    expected = torch.zeros_like(out)
    store(adjust(rgb.clone(), ops, clamp=clamp), scale, expected)
    finish.finish(rgb, ops, tuple(np.concatenate(scale).tolist()), out, clamp=clamp)
    assert ("color_sums" in launches) == any(op.name == "contrast" for op in ops)
    off = (out.double() - expected.double()).abs() / (1.0 if dtype == torch.uint8 else max(scale[0]))
    limit = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.uint8: 1.0}[dtype]
    assert float((off > limit).double().mean()) <= (0.02 if steep(ops) else 0.0), (float(off.max()), ops)


def test_colours_that_need_more_than_a_pixel_are_left_to_torch() -> None:
    assert finish.serves([])
    assert finish.serves([ColorOp("contrast", 0.5), ColorOp("hue", 0.1)])
    assert not finish.serves([ColorOp("contrast", 0.5), ColorOp("contrast", 0.5)])
    for name in ("sharpness", "autocontrast", "equalize"):
        assert not finish.serves([ColorOp(name)])  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [{"nv": True}, {}, {"nv": True, "bits": 10, "p016": True}])
@pytest.mark.parametrize("rotation", [0, 90])
def test_two_frames_are_blended_in_the_one_launch(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], rotation: Any
) -> None:
    """Where the filter is not made wider; through textures. With contrast it takes the second launch, as anything does."""
    bits = form.get("bits", 8)
    info, planes = make_info(45, 38, rotation=rotation, bit_depth=bits), make_planes(make_format(45, 38, **form), 6)
    config = TransformConfig(size=(60, 71), dtype="float32")
    for color in ((), (ColorOp("saturation", 0.5), ColorOp("contrast", 1.3))):
        params = replace(random_params(np.random.default_rng(2), info.display_size), color=color)
        out = torch.zeros((3, 5, 60, 71))
        clip = ClipInput(planes, info, params, [0, 1, 1, 3, 4, 5, 4, 3, 2, 0], out, blend=[0.25, 0.5, 0.0, 1.0, 0.9])
        ClipTransform(config, 5).apply_batch([clip])
        assert launches == [f"move_u{8 if bits == 8 else 16}_texture_float32", "color_float32"][: 1 + bool(color)]
        assert float((out - _reference(clip, config, monkeypatch)).abs().max()) < 20 * UNIT / min(config.std)
        launches.clear()


def test_more_blended_frames_than_a_launch(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    info, planes = make_info(24, 18), make_planes(make_format(24, 18, nv=True), 40)
    config, count = TransformConfig(size=(19, 26), dtype="float32"), move.MAX_BLENDS + 30
    rng = np.random.default_rng(1)
    frames, blend = [int(f) for f in rng.integers(0, 40, 2 * count)], [float(s) for s in rng.random(count)]
    out = torch.zeros((3, count, 19, 26))
    clip = ClipInput(planes, info, whole(info.display_size), frames, out, blend=blend)
    ClipTransform(config, count).apply_batch([clip])
    assert launches == ["move_u8_texture_float32"] * 2
    assert float((out - _reference(clip, config, monkeypatch)).abs().max()) < UNIT / min(config.std)


def test_planes_that_no_texture_can_lie_over_are_read_plainly(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "can_be_textured", lambda frames: False)
    info, planes = make_info(45, 38), make_planes(make_format(45, 38, nv=True), 2)
    config = TransformConfig(size=(60, 71), dtype="float32", interpolation="bicubic")
    clip = ClipInput(planes, info, whole(info.display_size), [1, 0], torch.zeros((3, 2, 60, 71)))
    ClipTransform(config, 2).apply_batch([clip])
    assert launches == ["move_u8_float32"]
    assert float((clip.out - _reference(clip, config, monkeypatch)).abs().max()) < UNIT / min(config.std)
