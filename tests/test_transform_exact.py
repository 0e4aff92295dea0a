"""The whole transform in float32 against itself in float64, and that against the long way round: every format, any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plane_cases import clip_exact, make_format, make_info, make_planes, random_case, resize_exact, rgb_exact
from torch.utils._python_dispatch import TorchDispatchMode

from gpupipe.config import TransformConfig
from gpupipe.data import index as indices
from gpupipe.data.decode import cpu
from gpupipe.data.plan import make_plan
from gpupipe.data.transform import ClipTransform, TransformParams, affine
from gpupipe.data.transform.geometry import Filter, filter_of
from gpupipe.data.transform.params import ColorOp
from gpupipe.types import Planes, VideoInfo

MOST, MEAN = 2 / 255, 0.25 / 255
"""What issue and documentation allow, before the normalisation. Float32 is far better; see the bounds below."""
PLAIN: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
SMOOTH_OPS = ("brightness", "contrast", "saturation", "hue", "grayscale", "channel_drop", "sharpness", "autocontrast")
"""Those whose result does not jump: a threshold turns a rounding error into a step."""


def both(
    config: TransformConfig, planes: Planes, info: VideoInfo, params: TransformParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """A clip of every frame, computed in float32 and in float64."""
    transform = ClipTransform(config, len(planes))
    clips = [torch.empty(transform.clip_shape, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    for clip in clips:
        transform.apply(planes, info, params, range(len(planes)), clip)
    return clips[0], clips[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_float64_is_the_long_way_round(seed: int) -> None:
    """To 1e-9, the reference of everything else: so nothing but rounding is left between float32 and the truth."""
    planes, info, params, config = random_case(seed)
    config = config.model_copy(update=PLAIN | {"dtype": "float32", "layout": "NTCHW"})
    _, exact = both(config, planes, info, params)
    assert float((exact - clip_exact(planes, info, params, config, range(len(planes)))).abs().max()) < 1e-9


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["nearest", "bilinear", "bicubic"]), st.booleans())
def test_float32_is_close_for_all_that_can_be_drawn(seed: int, filter: Any, smooth: bool) -> None:
    planes, info, _, config = random_case(seed)
    planes = make_planes(planes.format, 2, seed=seed, smooth=smooth)
    recipe = TransformConfig(
        **PLAIN, size=config.size, interpolation=filter, antialias=config.antialias, dtype="float32", vflip=0.5,
        affine={"degrees": 40, "translate": (0.2, 0.2), "scale": (0.7, 1.5), "shear": 10} if seed % 2 else None,
        color_jitter={"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}, grayscale=0.2, channel_drop=0.2,
        blur={"kernel_size": 3} if min(config.size) > 1 else None, fill=(0.3, 0.6, 0.9),
    )  # fmt: skip
    params = ClipTransform(recipe, 2).draw(info, np.random.default_rng(seed))
    ours, exact = both(recipe, planes, info, params)
    difference = (ours.double() - exact).abs()
    # A hue at the boundary of two sextants, or a grey pixel that has none, may turn any way: by as much as its colours differ.
    assert float(difference.max()) < 2e-3 < MOST
    assert float(difference.mean()) < 2e-5 < MEAN


@pytest.mark.parametrize("name", SMOOTH_OPS)
def test_each_change_of_colour_on_legal_noise(name: Any) -> None:
    planes = make_planes(make_format(120, 90), 2)
    planes.data[:] = 60 + planes.data // 4  # colours of the gamut: luma 60 to 123, chroma likewise around it
    info = make_info(120, 90, color_matrix="bt709")
    value = {"hue": 0.1, "grayscale": 0.0, "channel_drop": 2.0, "autocontrast": 0.0}.get(name, 1.4)
    params = TransformParams((3.0, 5.0, 80.0, 100.0), (3, 5, 80, 100), color=(ColorOp(name, value),))
    ours, exact = both(TransformConfig(size=(40, 56), dtype="float32", **PLAIN), planes, info, params)
    assert float((ours.double() - exact).abs().max()) < 1e-4 < MOST


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4"])
@pytest.mark.parametrize("preset", ["kinetics_train", "kinetics_eval"])
def test_real_clips(media: Path, name: str, preset: str) -> None:
    index = indices.load(str(media / name))
    planes = cpu.decode(index, make_plan(index, [10, 11, 50]))
    config = TransformConfig(preset=preset, dtype="float32", **PLAIN)
    params = ClipTransform(config, 3).draw(index.info, np.random.default_rng(1))
    ours, exact = both(config, planes, index.info, params)
    difference = (ours.double() - exact).abs()
    assert float(difference.max()) < 2e-3 < MOST
    assert float(difference.mean()) < 2e-6 < MEAN


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("bits", "nv"), [(8, True), (10, True), (12, False)])
def test_very_wide_frames(bits: int, nv: bool, turned: bool) -> None:
    """Positions near 8 000 have few bits left in float32; places and weights are worked out in float64."""
    width, height = 8001, 37
    info = make_info(width, height, color_matrix="bt2020", bit_depth=bits)
    planes = make_planes(make_format(width, height, bits=bits, nv=nv, p016=nv and bits > 8), 1, seed=bits)
    size = (9, 200)
    move = affine.inverse(size, angle=2.5, scale=1.1) if turned else None
    params = TransformParams((2.0, 7700.0, 31.0, 300.0), (2, 7700, 31, 300), affine=move)
    config = TransformConfig(size=size, dtype="float32", **PLAIN)
    ours, exact = both(config, planes, info, params)
    assert float((ours.double() - exact).abs().max()) < 1e-4
    if not turned:
        expected = resize_exact(rgb_exact(planes, info), params, size, antialias=True).clamp(0, 1)
        assert float((exact.transpose(0, 1) - expected).abs().max()) < 1e-9


def test_a_clamp_before_the_resize_would_move_sharp_edges() -> None:
    """Why RGB is clamped after the resize alone: frames cut off to [0, 1] first give other averages."""
    info, planes = make_info(64, 48, color_matrix="bt709"), make_planes(make_format(64, 48), 1)
    params = TransformParams((0.0, 0.0, 48.0, 64.0), (0, 0, 48, 64))
    _, exact = both(TransformConfig(size=(12, 16), dtype="float32", **PLAIN), planes, info, params)
    rgb = rgb_exact(planes, info)
    late, early = (resize_exact(x, params, (12, 16), antialias=True).clamp(0, 1) for x in (rgb, rgb.clamp(0, 1)))
    assert float((exact.transpose(0, 1) - late).abs().max()) < 1e-9
    assert float((exact.transpose(0, 1) - early).abs().max()) > 9 / 255


def placed(frame: tuple[int, int], size: tuple[int, int], **move: Any) -> NDArray[np.float64]:
    """The place in a frame from the place in an output that shows all of it, moved."""
    turned = np.array([*affine.inverse(size, **move), 0, 0, 1]).reshape(3, 3)
    return np.diag([frame[1] / size[1], frame[0] / size[0], 1.0]) @ turned


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(get_args(Filter)), st.booleans())
def test_sampling_is_its_definition(seed: int, filter: Filter, antialias: bool) -> None:
    """Every sample of a picture weighed for every output, by two dense matrices: no choice of taps is left to be wrong."""
    rng = np.random.default_rng(seed)
    frame, size = (tuple(int(n) for n in rng.integers(1, most, 2)) for most in (50, 12))
    place = placed(
        frame, size, angle=rng.uniform(-180, 180), scale=np.exp(rng.uniform(-4, 3)), shear=rng.uniform(-60, 60, 2)
    )  # fmt: skip
    image = torch.from_numpy(rng.random((2, 3, *frame)))
    ours, cover = affine.sample(image, place, size, filter=filter, antialias=antialias)
    rows, columns = (np.arange(n) + 0.5 for n in size)
    at = place[:2] @ np.stack([np.tile(columns, size[0]), np.repeat(rows, size[1]), np.ones(size[0] * size[1])])
    weights = []
    for places, span, extent in zip(at, affine.supports(place, antialias=antialias), frame[::-1], strict=True):
        if filter == "nearest":
            weights.append(1.0 * (np.floor(places)[:, None] == np.arange(extent)))
            continue
        kernel, radius = filter_of(filter, antialias=antialias)
        beyond = int(np.abs(places).max() + radius * span) + 2  # of the frame's edges, so that the sum has all places
        every = kernel((np.arange(-beyond, extent + beyond) + 0.5 - places[:, None]) / span)
        weights.append((every / every.sum(axis=1, keepdims=True))[:, beyond : beyond + extent])
    across, down = weights
    expected = np.einsum("pj,...ji,pi->...p", down, image.numpy(), across, optimize=True).reshape(2, 3, *size)
    assert float(np.abs(ours.numpy() - expected).max()) < 1e-12
    assert float(np.abs(cover.numpy() - (down.sum(1) * across.sum(1)).reshape(size)).max()) < 1e-12


class Calls(TorchDispatchMode):
    """How many torch calls were made, and how much the largest of them gave or took; refuses to go on after a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        assert self.count <= 1000, "a call for each tap: minutes of them"
        given = func(*args, **(kwargs or {}))
        reads = args[1] if func is torch.ops.aten._embedding_bag_forward_only.default else given
        if isinstance(reads, torch.Tensor):
            self.largest = max(self.largest, reads.numel())
        return given


@pytest.mark.parametrize("scale", [0.3, 0.05, 1e-9])
def test_strong_shrinks_take_few_calls_and_none_is_long(scale: float) -> None:
    """Frames of high definition, to the size that models take: by pixels of the frame, however many of them an output spans."""
    image = torch.linspace(0, 1, 540).view(1, 1, -1, 1).expand(1, 3, 540, 960)
    place = placed((540, 960), (224, 224), angle=30, scale=scale)
    with Calls() as calls:
        moved, cover = affine.sample(image, place, (224, 224), antialias=True)
    assert calls.largest <= max(image.numel(), 1 << 22)
    # Over all outputs a pixel's weights add up to its part of the area, but for a ripple of the turned grid; its mean is 1/2.
    area = 224 * 224 * scale**2
    if scale == 0.05:  # all of the frame lies inside of the output
        assert float(cover.sum()) == pytest.approx(area, rel=1e-3)
        assert float(moved.sum()) == pytest.approx(3 * area / 2, rel=1e-3)
    elif scale < 0.05:  # less than a pixel: four share it, of which each gives it a part of its weight
        middle = moved[0, :, 111:113, 111:113]
        assert 0 < float(middle.sum()) < 3 * 4 * area / 2
        assert torch.count_nonzero(moved) == torch.count_nonzero(middle) == 12
