"""The transform against torchvision v2 on float64 pictures: the same geometry, colours within rounding, the same tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plane_cases import make_format, make_info, make_planes, rgb_exact
from torchvision_v2 import torchvision_v2

from gpupipe.config import AutoAugmentConfig, TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams, affine
from gpupipe.data.transform.adjust import adjust, blur
from gpupipe.data.transform.auto_augment import OPERATIONS, auto_augment, magnitude
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.types import Planes, VideoInfo

v2 = torchvision_v2()
F = v2.functional
MODES = {
    "nearest": v2.InterpolationMode.NEAREST_EXACT,
    "bilinear": v2.InterpolationMode.BILINEAR,
    "bicubic": v2.InterpolationMode.BICUBIC,
}
EXACT = 1e-9
"""Float64 sums in another order, over a few hundred values of order 1."""
PLAIN: dict[str, Any] = {"dtype": "float32", "mean": (0, 0, 0), "std": (1, 1, 1), "clamp": False}


def exact(config: TransformConfig, planes: Planes, info: VideoInfo, params: TransformParams) -> torch.Tensor:
    """All frames in float64, (N, 3, H, W)."""
    transform = ClipTransform(config, len(planes))
    out = torch.empty(transform.clip_shape, dtype=torch.float64)
    transform.apply(planes, info, params, range(len(planes)), out)
    return out.transpose(0, 1)


def a_video(seed: int, chroma: str = "420") -> tuple[Planes, VideoInfo, torch.Tensor, np.random.Generator]:
    """Planes, their video and their RGB at full size, of a random size and rotation."""
    rng = np.random.default_rng(seed)
    width, height = (int(n) for n in rng.integers(4, 70, 2))
    info = make_info(width, height, rotation=int(rng.choice([0, 90, 180, 270])), color_matrix="bt709")
    planes = make_planes(make_format(width, height, chroma), 2, seed=seed)
    return planes, info, rgb_exact(planes, info), rng


# Geometry


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(MODES)), st.booleans(), st.sampled_from(["420", "444", "422"]))
def test_crop_resize_and_flips(seed: int, filter: Any, antialias: bool, chroma: str) -> None:
    planes, info, rgb, rng = a_video(seed, chroma)
    height, width = (int(rng.integers(1, n + 1)) for n in info.display_size)
    top, left = int(rng.integers(info.display_size[0] - height + 1)), int(rng.integers(info.display_size[1] - width + 1))
    size = (int(rng.integers(1, 50)), int(rng.integers(2, 50)))  # PyTorch 2.13 mixes up rows for a width of 1
    config = TransformConfig(size=size, interpolation=filter, antialias=antialias, **PLAIN)
    box = (top, left, height, width)
    hflip, vflip = bool(rng.integers(2)), bool(rng.integers(2))
    params = TransformParams((float(top), float(left), float(height), float(width)), box, hflip, vflip)
    expected = F.resized_crop(rgb, *box, list(size), MODES[filter], antialias and filter != "nearest")
    expected = F.horizontal_flip(expected) if hflip else expected
    expected = F.vertical_flip(expected) if vflip else expected
    difference = (exact(config, planes, info, params) - expected).abs()
    if filter == "nearest":  # centres on the line between two pixels go either way
        for axis, (n, length) in enumerate(zip(size, (height, width), strict=True), 2):
            clear = [k for k in range(n) if length * (2 * k + 1) % (2 * n)]
            difference = difference.index_select(axis, torch.tensor(clear, dtype=torch.long))
    assert difference.numel() == 0 or float(difference.max()) < EXACT


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["nearest", "bilinear"]))
def test_affine_without_a_resize(seed: int, filter: Any) -> None:
    """torchvision fills with black where it is given no fill, and blends once; so does this."""
    planes, info, rgb, rng = a_video(seed)
    size = info.display_size
    move: dict[str, Any] = {
        "angle": float(rng.uniform(-180, 180)), "translate": [int(n) for n in rng.integers(-9, 10, 2)],
        "scale": float(rng.uniform(0.5, 2)), "shear": [float(a) for a in rng.uniform(-40, 40, 2)],
    }  # fmt: skip
    config = TransformConfig(size=size, interpolation=filter, antialias=False, **PLAIN)
    params = TransformParams((0.0, 0.0, float(size[0]), float(size[1])), (0, 0, *size), affine=affine.inverse(size, **move))
    mode = v2.InterpolationMode.NEAREST if filter == "nearest" else MODES[filter]
    expected = F.affine(rgb, **move, interpolation=mode)
    difference = (exact(config, planes, info, params) - expected).abs().amax((0, 1))
    if filter == "nearest":  # places that fall on the line between two pixels go either way
        assert float((difference > EXACT).double().mean()) < 0.02
    else:
        assert float(difference.max()) < EXACT


def test_fill_stands_in_outside_of_the_frame() -> None:
    """Far from the edge the fill, far inside the picture; torchvision blends twice along the edge itself."""
    info, size = make_info(40, 30), (30, 40)
    planes = make_planes(make_format(40, 30), 1)
    config = TransformConfig(size=size, fill=(0.2, 0.4, 0.9), antialias=False, **PLAIN)
    params = TransformParams((0.0, 0.0, 30.0, 40.0), (0, 0, 30, 40), affine=affine.inverse(size, angle=20, scale=0.7))
    ours = exact(config, planes, info, params)
    theirs = F.affine(
        rgb_exact(planes, info), angle=20, translate=[0, 0], scale=0.7, shear=[0, 0], fill=[0.2, 0.4, 0.9],
        interpolation=MODES["bilinear"],
    )  # fmt: skip
    cover = F.affine(
        torch.ones(1, 1, 30, 40), angle=20, translate=[0, 0], scale=0.7, shear=[0, 0], interpolation=MODES["bilinear"]
    )
    whole_or_none = ((cover == 0) | (cover > 1 - 1e-6)).expand_as(ours)
    assert 0.6 < float(whole_or_none.double().mean()) < 1
    assert float((ours - theirs)[whole_or_none].abs().max()) < 1e-6
    assert torch.allclose(ours[0, :, 0, 0], torch.tensor([0.2, 0.4, 0.9], dtype=torch.float64))


@pytest.mark.parametrize("filter", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_a_move_that_does_nothing_is_the_resize(filter: Any, antialias: bool) -> None:
    """The two ways of sampling agree where both apply: inside, where no filter reaches over the frame's edge."""
    planes, info, _, _ = a_video(5)
    height, width = info.display_size
    config = TransformConfig(size=(17, 13), interpolation=filter, antialias=antialias, **PLAIN)
    plain = TransformParams((0.0, 0.0, float(height), float(width)), (0, 0, height, width), hflip=True, vflip=True)
    moved = TransformParams(plain.crop, plain.bounds, True, True, affine=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    inside = (..., slice(3, -3), slice(3, -3))
    a, b = exact(config, planes, info, plain), exact(config, planes, info, moved)
    assert float((a[inside] - b[inside]).abs().max()) < EXACT


# Colour


def pictures(seed: int = 0, size: tuple[int, int] = (21, 34)) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((3, 3, *size)))


OPS = [
    (ColorOp("brightness", 1.4), lambda x: F.adjust_brightness(x, 1.4)),
    (ColorOp("brightness", 0.3), lambda x: F.adjust_brightness(x, 0.3)),
    (ColorOp("contrast", 1.7), lambda x: F.adjust_contrast(x, 1.7)),
    (ColorOp("contrast", 0.2), lambda x: F.adjust_contrast(x, 0.2)),
    (ColorOp("saturation", 1.9), lambda x: F.adjust_saturation(x, 1.9)),
    (ColorOp("saturation", 0.0), lambda x: F.adjust_saturation(x, 0.0)),
    (ColorOp("hue", 0.31), lambda x: F.adjust_hue(x, 0.31)),
    (ColorOp("hue", -0.5), lambda x: F.adjust_hue(x, -0.5)),
    (ColorOp("grayscale"), lambda x: F.rgb_to_grayscale(x, 3)),
    (ColorOp("channel_drop", 1), lambda x: x * torch.tensor([1, 0, 1])[:, None, None]),
    (ColorOp("sharpness", 1.8), lambda x: F.adjust_sharpness(x, 1.8)),
    (ColorOp("sharpness", 0.1), lambda x: F.adjust_sharpness(x, 0.1)),
    (ColorOp("posterize", 3), lambda x: F.posterize(x, 3)),
    (ColorOp("solarize", 0.4), lambda x: F.solarize(x, 0.4)),
    (ColorOp("autocontrast"), F.autocontrast),
    (ColorOp("equalize"), F.equalize),
]


@pytest.mark.parametrize(("op", "theirs"), OPS, ids=[f"{op.name}-{op.value}" for op, _ in OPS])
def test_changes_of_colour(op: ColorOp, theirs: Any) -> None:
    """float64 apart from torchvision's hue and equalise, which go through float32: a few of its units."""
    for rgb in (pictures(), pictures(size=(2, 2)) * 0.5, torch.full((3, 3, 8, 8), 0.25, dtype=torch.float64)):
        difference = (adjust(rgb.clone(), [op]) - theirs(rgb)).abs()
        assert float(difference.max()) < 2e-6, op


def test_a_jitter_is_torchvisions_in_the_drawn_order() -> None:
    rgb = pictures(3)
    ops = [ColorOp("contrast", 1.3), ColorOp("hue", 0.08), ColorOp("brightness", 0.8), ColorOp("saturation", 1.35)]
    expected = F.adjust_saturation(F.adjust_brightness(F.adjust_hue(F.adjust_contrast(rgb, 1.3), 0.08), 0.8), 1.35)
    assert float((adjust(rgb.clone(), ops) - expected).abs().max()) < 4e-6


@pytest.mark.parametrize(("kernel_size", "sigma"), [(3, 0.1), (9, 2.0), (23, 1.3), (1, 1.0)])
def test_gaussian_blur(kernel_size: int, sigma: float) -> None:
    rgb = pictures(size=(30, 41))
    assert float((blur(rgb, kernel_size, sigma) - F.gaussian_blur(rgb, [kernel_size] * 2, [sigma] * 2)).abs().max()) < 1e-7


# The whole chain


def test_kinetics_train_is_torchvisions_chain() -> None:
    """On the same draws, from the same RGB before any clamp, in float64 but for torchvision's float32 hue. Where the resize
    sees colours beyond [0, 1] torchvision, which reads clamped frames, differs: so the frames here are legal ones."""
    info, form = make_info(90, 70, color_matrix="bt709"), make_format(90, 70)
    planes = make_planes(form, 3, smooth=True)
    planes.data[:, 70:] = 96 + planes.data[:, 70:] // 4  # pale enough for any luma here
    config = TransformConfig(preset="kinetics_train", size=48, dtype="float32")
    rgb = rgb_exact(planes, info)
    assert 0 < float(rgb.min()) < float(rgb.max()) < 1
    for seed in range(10):
        params = ClipTransform(config, 3).draw(info, np.random.default_rng(seed))
        top, left, height, width = params.bounds
        clip = F.resized_crop(rgb, top, left, height, width, [48, 48], MODES["bilinear"], True)
        clip = F.horizontal_flip(clip) if params.hflip else clip
        for op in params.color:
            clip = getattr(F, f"adjust_{op.name}")(clip, op.value)
        clip = F.normalize(clip, list(config.mean), list(config.std))
        assert [op.name for op in params.color] != []
        assert float((exact(config, planes, info, params) - clip).abs().max()) < 4e-6 / 0.224


# Automatic augmentation

NAMES = {
    "identity": "Identity", "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateX", "translate_y": "TranslateY",
    "rotate": "Rotate", "brightness": "Brightness", "saturation": "Color", "contrast": "Contrast", "sharpness": "Sharpness",
    "posterize": "Posterize", "solarize": "Solarize", "autocontrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_tables_are_torchvisions(policy: Any) -> None:
    space = (v2.RandAugment if policy == "randaugment" else v2.TrivialAugmentWide)._AUGMENTATION_SPACE
    assert {NAMES[name] for name in OPERATIONS} == set(space)
    config = AutoAugmentConfig(policy=policy)
    for name in OPERATIONS:
        levels, _ = space[NAMES[name]]
        table = levels(31, 120, 200)
        for level in range(31):
            expected = 0.0 if table is None else float(table[level])
            assert magnitude(name, level, config, (120, 200)) == pytest.approx(expected, abs=1e-4), (name, level)


@pytest.mark.parametrize("seed", range(40))
def test_one_operation_is_torchvisions(seed: int) -> None:
    """The picture after the operation that was drawn, found again in torchvision's by name and magnitude."""
    size = (40, 52)
    config = AutoAugmentConfig(num_ops=1, magnitude=20)
    moves, colors = auto_augment(config, size, np.random.default_rng(seed))
    rgb = pictures(size=size)
    if moves:
        matrix = np.array([*moves[0], 0, 0, 1]).reshape(3, 3)
        ours, _ = affine.sample(rgb, matrix, size)
    else:
        ours = adjust(rgb.clone(), colors)
    theirs = v2.RandAugment(interpolation=MODES["bilinear"])
    candidates = [
        theirs._apply_image_or_video_transform(
            rgb, NAMES[name], sign * magnitude(name, 20, config, size), MODES["bilinear"], {}
        )
        if name not in ("solarize", "posterize") or sign > 0
        else rgb
        for name in OPERATIONS
        for sign in (1, -1)
    ]
    assert min(float((ours - candidate).abs().max()) for candidate in candidates) < 2e-6


def test_every_operation_is_equally_likely() -> None:
    config, rng = AutoAugmentConfig(num_ops=1), np.random.default_rng(0)
    seen: dict[str, int] = {}
    for _ in range(4000):
        moves, colors = auto_augment(config, (50, 50), rng)
        name = colors[0].name if colors else "move" if moves else "identity"
        seen[name] = seen.get(name, 0) + 1
    for name, share in {"move": 5 / 14, "identity": 1 / 14, "equalize": 1 / 14, "brightness": 1 / 14}.items():
        assert abs(seen[name] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5, name


def test_whole_frames_need_no_move() -> None:
    assert whole((4, 5)).affine is None
