"""The transform's other settings and its presets: each does what its name says, in the loader too, on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import clip_exact, make_format, make_info, make_planes, run

from gpupipe import VideoLoader
from gpupipe.config import PRESETS, ClipConfig, LoaderConfig, TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams
from gpupipe.data.transform.draw import draw
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.errors import ConfigError, GraphError
from gpupipe.types import Planes, VideoInfo

INFO = make_info(80, 60, color_matrix="bt709")
PLANES = make_planes(make_format(80, 60), 3)
PLAIN: dict[str, Any] = {"dtype": "float32", "mean": (0, 0, 0), "std": (1, 1, 1)}


def drawn(config: TransformConfig, count: int, size: tuple[int, int] = (60, 80)) -> list[TransformParams]:
    rng = np.random.default_rng(0)
    return [draw(config, size, rng) for _ in range(count)]


# Presets


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_make_clips_in_a_loader(name: str, clips: dict[str, Path]) -> None:
    loader = VideoLoader(str(clips["h264"]), clip={"frames": 2}, transform=name, batch=1, device="cpu")
    with loader:
        batch = next(iter(loader))
    assert batch.video.shape[:3] == (1, 3, 2)
    assert batch.video.dtype == torch.bfloat16
    assert bool(batch.video.isfinite().all())
    assert loader.config.transform == TransformConfig(preset=name)


def test_kinetics_eval_is_short_side_256_and_the_centre() -> None:
    params = drawn(TransformConfig(preset="kinetics_eval"), 1, (360, 640))[0]
    scale = 360 / 256
    assert params.crop == pytest.approx((16 * scale, (455 - 224) // 2 * 640 / 455, 224 * scale, 224 * 640 / 455), abs=2)
    assert not params.hflip


@pytest.mark.parametrize(("size", "short_side"), [(224, 256), (112, 128), (320, 366), ((96, 160), 110), ([384, 288], 329)])
def test_the_short_side_of_kinetics_eval_goes_with_the_size(size: Any, short_side: int) -> None:
    """At a fixed 256 a model of 112 would be evaluated on the middle fifth of the frame, and one of 288 not at all."""
    config = TransformConfig(preset="kinetics_eval", size=size)
    assert config.short_side == short_side
    assert TransformConfig(**config.model_dump()) == config
    file = LoaderConfig(transform={"preset": "kinetics_eval", "size": 300})
    assert file.override({"transform": {"size": size}}).transform.short_side == short_side
    assert TransformConfig(preset="kinetics_eval", size=size, short_side=400).short_side == 400
    given = LoaderConfig(transform={"preset": "kinetics_eval", "short_side": 400}).override({"transform": {"size": size}})
    assert given.transform.short_side == 400
    assert TransformConfig(preset="diffusion", size=size).short_side is None


@pytest.mark.parametrize("size", [0, True, "large", (3, "x"), (), (2, 2, 2), 1.5, None])
def test_a_size_that_is_none_is_named_beside_a_preset(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"TransformConfig\.size"):
        TransformConfig(preset="kinetics_eval", size=size)


def test_diffusion_is_within_minus_one_and_one() -> None:
    config = TransformConfig(preset="diffusion", size=32, dtype="float32")
    clip = run(config, PLANES, INFO, drawn(config, 1)[0], [0])
    assert -1 <= float(clip.min()) < -0.9
    assert 0.9 < float(clip.max()) <= 1


def test_videomae_crops_are_shares_of_the_shorter_side() -> None:
    boxes = [p.bounds for p in drawn(TransformConfig(preset="videomae"), 2000, (100, 200))]
    sides = (100, 87, 75, 66)
    assert {side for box in boxes for side in box[2:]} == set(sides)
    assert {abs(sides.index(box[2]) - sides.index(box[3])) for box in boxes} == {0, 1}
    assert len({box[:2] for box in boxes if box[2:] == (66, 66)}) == 13
    assert all(box[0] + box[2] <= 100 and box[1] + box[3] <= 200 for box in boxes)


def test_a_preset_gives_way_to_what_is_named_beside_it(tmp_path: Path) -> None:
    config = TransformConfig(preset="kinetics_train", size=112, color_jitter=None)
    assert (config.size, config.color_jitter, config.hflip) == ((112, 112), None, 0.5)
    file = tmp_path / "run.yaml"
    file.write_text("transform: kinetics_eval\n")
    loader = LoaderConfig.from_yaml(file)
    assert loader.transform == TransformConfig(preset="kinetics_eval")
    assert loader.override({"transform": {"size": 112}}).transform == TransformConfig(preset="kinetics_eval", size=112)
    assert loader.override({"transform": "videomae"}).transform == TransformConfig(preset="videomae"), "another takes its place"
    loader.to_yaml(file)
    assert LoaderConfig.from_yaml(file) == loader
    again = LoaderConfig.from_yaml(file).override({"transform": "videomae"})
    assert again.transform == TransformConfig(preset="videomae"), "a saved file names every field, and means none of them more"
    whole = TransformConfig(preset="kinetics_eval", crop="none")
    assert whole.short_side is None, "it belongs to the preset's crop"
    assert TransformConfig(**whole.model_dump()) == whole


def test_a_preset_as_an_argument_leaves_what_the_configuration_says() -> None:
    base = LoaderConfig(transform={"size": 224, "hflip": 0.0, "dtype": "float32"})
    for part in ("kinetics_train", {"preset": "kinetics_train"}):
        found = base.override({"transform": part}).transform
        assert found == TransformConfig(preset="kinetics_train", hflip=0.0, dtype="float32")
    found = base.override({"transform": {"preset": "kinetics_train", "hflip": 0.25}}).transform
    assert (found.hflip, found.dtype, found.color_jitter is None) == (0.25, "float32", False), "what the argument names wins"
    base = LoaderConfig(transform={"preset": "kinetics_eval", "dtype": "uint8"})
    assert base.override({"transform": "diffusion"}).transform == TransformConfig(preset="diffusion", dtype="uint8")
    assert base.override({"transform": TransformConfig(size=8)}).transform == TransformConfig(size=8), "a model is whole"
    small = LoaderConfig(transform={"preset": "kinetics_eval", "size": 112})
    for name in ("kinetics_eval", "videomae"):
        found = small.override({"transform": name}).transform
        assert found == TransformConfig(preset=name, size=112), (
            "a short side that the preset made of the size is none of its own"
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "kinetics_tran"}, "'kinetics_tran'; did you mean 'kinetics_train'"),
        ({"preset": 3}, "no transform preset 3"),
        ({"interpolation": "bicubik"}, "did you mean 'bicubic'"),
        ({"color_jitter": {"brigthness": 0.4}}, "did you mean 'brightness'"),
        ({"color_jitter": {"brightness": -0.4}}, "brightness: must not be negative"),
        ({"color_jitter": {"contrast": (1.2, 0.8)}}, r"contrast must be \(low, high\)"),
        ({"color_jitter": {"hue": 0.6}}, r"hue: .*got 0\.6"),
        ({"mean": (0.5, 0.5)}, r"mean\.2"),
        ({"std": (0.5, 0.5, 0.5, 0.5)}, "std"),
        ({"affine": {"shear": (1, 2, 3)}}, "shear"),
        ({"affine": {"scale": (0, 1)}}, r"scale\.0"),
        ({"affine": {"translate": (0.1, 1.5)}}, r"translate\.1"),
        ({"blur": {"kernel_size": 4}}, "kernel_size=4 is even"),
        ({"blur": {"kernel_size": 65}, "size": 32}, "reaches across"),
        ({"erasing": {"scale": (0.5, 0.1)}}, r"scale must be \(low, high\)"),
        ({"erasing": {"value": 300}, "dtype": "uint8"}, "does not fit dtype='uint8'"),
        ({"erasing": {"value": "randm"}}, r"ErasingConfig\.value: .*did you mean 'random'"),
        ({"short_side": 256}, "short_side=256 is of no effect with crop='random-resized'"),
        ({"short_side": "long"}, r"TransformConfig\.short_side: "),
        ({"erasing": {"value": "random"}, "dtype": "uint8"}, "does not fit dtype='uint8'"),
        ({"auto_augment": {"policy": "randaugmnt"}}, "did you mean 'randaugment'"),
        ({"auto_augment": {"magnitude": 31}}, "not below num_magnitude_bins"),
        ({"short_side": (300, 256), "crop": "random"}, r"short_side must be \(low, high\)"),
        ({"short_side": (100, 256), "crop": "random"}, "smaller than the crop size"),
        ({"layout": "NTCHW", "memory_format": "channels_last_3d"}, "needs layout='NCTHW'"),
        ({"crop": "three", "draws": "frame"}, "exclude each other"),
        ({"fill": 2}, r"fill: .*got 2"),
        ({"vflip": -0.1}, "vflip"),
    ],
)
def test_what_cannot_work_is_named_at_construction(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformConfig(**values)


# Crops


def test_short_sides_are_drawn_from_their_range() -> None:
    config = TransformConfig(size=20, crop="random", short_side=(20, 40), hflip=0)
    scales = Counter(round(60 / (p.crop[2] / 20)) for p in drawn(config, 2000))
    assert set(scales) == set(range(20, 41))
    assert max(scales.values()) / min(scales.values()) < 2.5


@pytest.mark.parametrize(("size", "axis"), [((60, 80), 1), ((80, 60), 0)])
def test_three_crops_lie_along_the_longer_side(size: tuple[int, int], axis: int) -> None:
    config = TransformConfig(size=60, crop="three", hflip=0)
    boxes = [draw(config, size, np.random.default_rng(0), view=view).crop for view in range(3)]
    assert [box[axis] for box in boxes] == [0, 10, 20]
    assert {box[1 - axis] for box in boxes} == {0}


def test_three_crops_show_the_same_frames(clips: dict[str, Path]) -> None:
    clip = {"frames": 2, "clips_per_video": 6}
    transform = {"crop": "three", "size": 32, "hflip": 0}
    with VideoLoader(str(clips["h264"]), clip=clip, transform=transform, batch=6, device="cpu") as loader:
        batch = next(iter(loader))
    picks = [record.pick.indices for record in batch.clips]
    assert picks[0] == picks[1] == picks[2] != picks[3] == picks[4] == picks[5]
    assert len({p.crop for p in batch.params}) == 3
    assert batch.params[0].crop == batch.params[3].crop
    with pytest.raises(ConfigError, match="clips_per_video=4 is no multiple"):
        LoaderConfig(clip=ClipConfig(clips_per_video=4), batch={"size": 4}, transform={"crop": "three"})


# Colour, blur, erasing


def test_without_clamps_linear_changes_are_one_matrix() -> None:
    """Equal to the same steps one by one, and beyond [0, 1]; with clamps within it at every step."""
    ops = (ColorOp("brightness", 1.6), ColorOp("saturation", 1.8), ColorOp("channel_drop", 1))
    params = TransformParams((0.0, 0.0, 60.0, 80.0), (0, 0, 60, 80), color=ops)
    config = TransformConfig(size=(30, 40), clamp=False, **PLAIN)
    rgb = clip_exact(PLANES, INFO, params, TransformConfig(size=(30, 40), dtype="float32", mean=(0, 0, 0), std=(1, 1, 1)), [0])
    ours = run(config, PLANES, INFO, params, [0])
    assert float(ours.max()) > 1
    assert float(ours.min()) < 0
    assert float(ours[1].abs().max()) < 1e-6
    clamped = run(config.model_copy(update={"clamp": True}), PLANES, INFO, params, [0])
    bright = (rgb * 1.6).clamp(0, 1)
    grey = (bright * torch.tensor([0.2989, 0.587, 0.114], dtype=torch.float64)[:, None, None]).sum(1, keepdim=True)
    expected = (1.8 * bright - 0.8 * grey).clamp(0, 1)
    expected[:, 1] = 0
    assert float((clamped.transpose(0, 1) - expected).abs().max()) < 5e-5


def test_uint8_is_clamped_in_the_end() -> None:
    params = TransformParams((0.0, 0.0, 60.0, 80.0), (0, 0, 60, 80), color=(ColorOp("brightness", 3.0),))
    for clamp in (True, False):
        clip = run(TransformConfig(size=(30, 40), dtype="uint8", clamp=clamp), PLANES, INFO, params, [0])
        assert int(clip.max()) == 255
        dark = run(TransformConfig(size=(30, 40), **PLAIN), PLANES, INFO, whole((60, 80)), [0])
        assert bool((clip[dark > 0.4] == 255).all()), "no value wraps around"


def test_an_erased_box_has_its_value_and_nothing_else_does() -> None:
    config = TransformConfig(size=(30, 40), dtype="float32", erasing={"value": (0.5, -0.25, 2)})
    plain = TransformParams((0.0, 0.0, 60.0, 80.0), (0, 0, 60, 80))
    erased = TransformParams(plain.crop, plain.bounds, erase=(3, 5, 10, 7))
    before, after = (run(config, PLANES, INFO, params, [0, 1]) for params in (plain, erased))
    box = (slice(None), slice(3, 13), slice(5, 12))
    for channel, value in enumerate((0.5, -0.25, 2)):
        assert bool((after[channel][box] == value).all())
    mask = torch.ones(30, 40, dtype=torch.bool)
    mask[3:13, 5:12] = False
    assert torch.equal(before[..., mask], after[..., mask])


def test_noise_in_a_box_is_drawn_once_and_repeated() -> None:
    config = TransformConfig(size=(60, 80), dtype="float32", erasing={"value": "random", "p": 1, "scale": (0.2, 0.3)})
    params = drawn(config, 1)[0]
    top, left, height, width = params.erase or (0, 0, 0, 0)
    first, second = (run(config, PLANES, INFO, TransformParams.from_json(params.to_json()), [0, 2]) for _ in range(2))
    assert torch.equal(first, second)
    box = first[:, :, top : top + height, left : left + width]
    assert torch.equal(box[:, 0], box[:, 1])
    assert abs(float(box.mean())) < 0.1
    assert abs(float(box.std()) - 1) < 0.1
    assert drawn(config, 2)[1].noise != params.noise


def test_blur_comes_before_the_normalisation() -> None:
    params = TransformParams((0.0, 0.0, 60.0, 80.0), (0, 0, 60, 80), blur=1.5)
    sharp, soft = (
        run(TransformConfig(size=(30, 40), dtype="float32", blur={"kernel_size": 9}), PLANES, INFO, p, [0])
        for p in (whole((60, 80)), params)
    )
    assert float(soft.std()) < 0.8 * float(sharp.std())
    assert float((soft.mean((1, 2, 3)) - sharp.mean((1, 2, 3))).abs().max()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_dtypes_agree_after_changes_of_colour(dtype: Any) -> None:
    params = TransformParams(
        (0.0, 0.0, 60.0, 80.0), (0, 0, 60, 80), color=(ColorOp("hue", 0.2), ColorOp("contrast", 1.3)), blur=0.8,
        affine=(1.0, 0.1, 0.0, -0.1, 1.0, 0.0),
    )  # fmt: skip
    given: dict[str, Any] = {"size": (30, 40), "blur": {"kernel_size": 5}, "mean": (0, 0, 0), "std": (1, 1, 1)}
    exact = run(TransformConfig(dtype="float32", **given), PLANES, INFO, params, [0, 2])
    clip = run(TransformConfig(dtype=dtype, **given), PLANES, INFO, params, [0, 2]).float()
    clip = clip / 255 if dtype == "uint8" else clip
    step = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, "uint8": 0.5 / 255}[dtype]
    assert float((clip - exact).abs().max()) <= step + 1e-6


def test_channels_last_is_a_matter_of_memory_alone(clips: dict[str, Path]) -> None:
    batches = []
    for memory_format in ("contiguous_format", "channels_last_3d"):
        transform = {"size": 32, "memory_format": memory_format}
        with VideoLoader([str(clips["h264"])] * 2, clip={"frames": 2}, transform=transform, batch=2, device="cpu") as loader:
            batches.append(next(iter(loader)).video)
    assert torch.equal(*batches)
    assert batches[1].is_contiguous(memory_format=torch.channels_last_3d)
    assert batches[0].is_contiguous()


def test_kinetics_train_again_gives_the_same_bits(clips: dict[str, Path]) -> None:
    first, second = (
        next(iter(VideoLoader([str(clips["h264"])] * 4, clip={"frames": 2}, transform="kinetics_train", batch=4, device="cpu")))
        for _ in range(2)
    )
    assert torch.equal(first.video, second.video)


def _flat(info: VideoInfo) -> Planes:
    return Planes(torch.full((1, 120, 80), 128, dtype=torch.uint8), make_format(info.width, info.height))


def test_fill_colours_what_a_turn_brings_in() -> None:
    config = TransformConfig(size=(30, 40), crop="none", affine={"degrees": (45, 45)}, fill=(1, 0, 0), hflip=0, **PLAIN)
    params = draw(config, (60, 80), np.random.default_rng(0))
    clip = run(config, _flat(INFO), INFO, params, [0])[:, 0]
    assert clip[:, 0, 0].tolist() == [1, 0, 0]
    assert clip[:, 15, 20].tolist() == pytest.approx([112 / 219] * 3, abs=1e-5)


@pytest.mark.parametrize("draws", ["clip", "frame"])
@pytest.mark.parametrize("extra", [{}, {"color_jitter": {"contrast": 0.9, "hue": 0.2}, "affine": {"degrees": 20}}])
def test_blended_frames_are_mixed_before_the_clamp_and_the_colours(draws: Any, extra: dict[str, Any]) -> None:
    """As if the decoder had given frames that are mixed: the samples' mean, for codes whose mean is one."""
    even = Planes(PLANES.data // 2 * 2, PLANES.format)
    mixed = Planes(((even.data[:1].int() + even.data[1:2].int()) // 2).to(torch.uint8), PLANES.format)
    config = TransformConfig(size=(20, 30), draws=draws, **PLAIN | extra)
    transform = ClipTransform(config, 2)
    params = transform.draw(INFO, np.random.default_rng(3))
    ours, expected = torch.empty(transform.clip_shape), torch.empty(transform.clip_shape)
    transform.apply(even, INFO, params, [0, 1, 1, 2], ours, [0.5, 0.0])
    transform.apply(Planes(torch.cat([mixed.data, even.data[1:2]]), even.format), INFO, params, [0, 1], expected)
    assert float((ours - expected).abs().max()) < 1e-4
    with pytest.raises(GraphError, match="blend has 1 shares"):
        transform.apply(even, INFO, params, [0, 1, 1, 2], ours, [0.5])
    with pytest.raises(GraphError, match="names 2 frames"):
        transform.apply(even, INFO, params, [0, 1], ours, [0.5, 0.5])


def test_a_loader_blends(clips: dict[str, Path]) -> None:
    def load(**clip: Any) -> Any:
        with VideoLoader(
            [{"path": str(clips["h264"]), "start_frame": 4}], clip={"frames": 4} | clip, batch=1, device="cpu",
            transform={"size": 32, "crop": "none", "hflip": 0, "clamp": False, "dtype": "float32"},
        ) as loader:  # fmt: skip
            return next(iter(loader))

    slow, plain = load(speed=0.5, blend=True), load()
    video, frames = slow.video[0], plain.video[0]
    assert torch.equal(video[:, 0], frames[:, 0])
    assert float((video[:, 1] - (frames[:, 0] + frames[:, 1]) / 2).abs().max()) < 1e-5
    a, b, c, _ = plain["pts_seconds"][0].tolist()
    assert slow["pts_seconds"][0].tolist() == pytest.approx([a, (a + b) / 2, b, (b + c) / 2])
    picked = load(speed=0.5, blend=True, frames=3)
    assert torch.equal(picked.video[0, :, 2], frames[:, 1])
