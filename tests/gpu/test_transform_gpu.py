"""The clip kernel on a GPU against the exact transform and against the CPU's reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import (
    assert_clip,
    batch_of,
    clip_exact,
    make_format,
    make_info,
    make_planes,
    moved_case,
    random_case,
    reference,
    run,
    steep,
    tolerance,
)

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams, affine, gaussian, levels, resize, to_rgb
from gpupipe.data.transform.adjust import adjust, blur
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.device import texture
from gpupipe.types import Planes

pytestmark = pytest.mark.gpu

UNIT = 1e-4
"""Allowed error of RGB in [0, 1], 1/40 of a code of 8 bits: float32 sums in another order and with fused multiply-adds."""


def _on_gpu(planes: Planes) -> Planes:
    return Planes(planes.data.cuda(), planes.format)


@pytest.mark.parametrize("block", range(10))
def test_equals_the_exact_transform(block: int) -> None:
    """NV12, P016 and planar formats, odd sizes, boxes, rotations, flips, dtypes and layouts, thirty combinations a block."""
    for seed in range(1000 + 30 * block, 1030 + 30 * block):
        planes, info, params, config = random_case(seed)
        clip = run(config, _on_gpu(planes), info, params, [2, 0, 0, 1])
        try:
            assert_clip(clip, clip_exact(planes, info, params, config, [2, 0, 0, 1]), config, UNIT)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {planes.format}, {info}, {params}, {config}") from error


@pytest.mark.parametrize(("bits", "nv"), [(8, True), (8, False), (10, True), (10, False)])
@pytest.mark.parametrize("rotation", [0, 90])
def test_equals_the_reference_at_full_hd(bits: int, nv: bool, rotation: int) -> None:
    """The usual work: 1080p to 224, several frames; the CPU's result for the same planes within the same bound."""
    info = make_info(1920, 1080, rotation=rotation, color_matrix="bt709", bit_depth=bits)
    planes = make_planes(make_format(1920, 1080, bits=bits, nv=nv, p016=nv and bits > 8), 4)
    config = TransformConfig(size=224, dtype="float32")
    rng = torch.Generator().manual_seed(bits)
    for _ in range(3):
        height, width = (int(torch.randint(100, n, (), generator=rng)) for n in info.display_size)
        params = TransformParams((31.0, 17.0, height - 40.0, width - 40.0), (31, 17, height - 40, width - 40), hflip=True)
        on_cpu = run(config, planes, info, params, [3, 2, 1, 0])
        on_gpu = run(config, _on_gpu(planes), info, params, [3, 2, 1, 0])
        assert float((on_gpu.cpu() - on_cpu).abs().max()) <= UNIT / min(config.std)


def test_two_runs_give_identical_bits() -> None:
    for seed in range(20):
        planes, info, params, config = random_case(seed)
        planes = _on_gpu(planes)
        first = run(config, planes, info, params, [0, 1, 2])
        assert torch.equal(first, run(config, planes, info, params, [0, 1, 2]))


@pytest.mark.parametrize("block", range(2))
def test_the_kernel_for_moves_equals_the_exact_transform(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """The way of what the fused resize does not serve, for what it serves too."""
    monkeypatch.setattr(resize, "layout_of", lambda geometry: None)
    test_equals_the_exact_transform(block)


@pytest.mark.parametrize("serves", [True, False])
def test_more_frames_than_a_launch(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    if not serves:
        monkeypatch.setattr(resize, "layout_of", lambda geometry: None)
    form, info = make_format(8, 146, nv=True), make_info(8, 146)
    config = TransformConfig(size=(6, 7), dtype="float32")
    planes = make_planes(form, 640)
    frame_map = [639, 0, 296, 295, 297, 591, 592, *range(590), 300]
    params = whole(info.display_size)
    clip = run(config, _on_gpu(planes), info, params, frame_map)
    assert_clip(clip, clip_exact(planes, info, params, config, frame_map), config, UNIT)


@pytest.mark.parametrize("block", range(8))
def test_moves_and_filters_equal_the_reference(block: int) -> None:
    """Turns, shears, shifts, zooms, nearest and bicubic on every format, rotation, dtype and layout, thirty combinations a
    block; and the same bits in another run."""
    for seed in range(1000 + 30 * block, 1030 + 30 * block):
        planes, info, params, config = moved_case(seed)
        frame_map = [2, 0, 0, 1, 2][: 1 + seed % 5]
        clip = run(config, _on_gpu(planes), info, params, frame_map)
        assert torch.equal(clip, run(config, _on_gpu(planes), info, params, frame_map))
        expected = reference(ClipInput(planes, info, params, frame_map, clip), config)
        if config.interpolation == "nearest" and params.affine is not None:  # on the line between two samples: either
            actual = clip.transpose(0, 1) if config.layout == "NCTHW" else clip
            off = (actual.cpu().double() - expected).abs() > tolerance(config, UNIT)
            assert float(off.any(1).double().mean()) < 0.002, f"seed {seed}"
            continue
        try:
            assert_clip(clip, expected, config, UNIT)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {planes.format}, {info}, {params}, {config}") from error


@pytest.mark.parametrize(("kernel_size", "sigma"), [(1, 1.0), (3, 0.1), (9, 2.0), (23, 1.3), (101, 30.0), (511, 90.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blur_equals_torch(kernel_size: int, sigma: float, dtype: torch.dtype) -> None:
    rgb = torch.rand((3, 3, 300, 257), generator=torch.Generator().manual_seed(kernel_size))
    gain, bias = ((255.0,) * 3, (0.0,) * 3) if dtype == torch.uint8 else ((4.4, 1.0, 2.0), (-2.0, 0.5, 0.0))
    out = torch.zeros((3, 300, 257, 3), dtype=dtype, device="cuda").permute(0, 3, 1, 2)
    gaussian.blur(rgb.cuda(), kernel_size, sigma, (*gain, *bias), out)
    expected = blur(rgb.double(), kernel_size, sigma)
    expected = expected * torch.tensor(gain).view(3, 1, 1) + torch.tensor(bias).view(3, 1, 1)
    limit = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7 + 2e-5, torch.uint8: 0.51}[dtype]
    assert float((out.cpu().double() - expected).abs().max()) <= limit


@pytest.mark.parametrize("name", levels.KINDS)
def test_changes_of_whole_frames_equal_torch(name: Any) -> None:
    """And give the same bits in another run."""
    op = ColorOp(name, 1.7)
    rgb = torch.rand((5, 3, 224, 201), generator=torch.Generator().manual_seed(3)).pow(2).cuda() * 0.9
    for clamp in (True, False):
        first, second = (levels.change(rgb, [op], clamp=clamp)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert float((first - adjust(rgb.clone(), [op], clamp=clamp)).abs().max()) < 1e-5


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (32, 32)])
def test_8k_to_almost_nothing(size: tuple[int, int]) -> None:
    """Thousands of taps, whose weights do not fit into shared memory."""
    info = make_info(7680, 4320, color_matrix="bt709")
    planes = make_planes(make_format(7680, 4320, nv=True), 1, smooth=True)
    config = TransformConfig(size=size, dtype="float32")
    params = whole(info.display_size)
    on_cpu = run(config, planes, info, params, [0])
    on_gpu = run(config, _on_gpu(planes), info, params, [0])
    assert float((on_gpu.cpu() - on_cpu).abs().max()) <= UNIT / min(config.std)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize(("chroma", "bits", "nv"), [("420", 8, True), ("420", 10, True), ("444", 8, False), ("422", 12, False)])
def test_rgb_is_the_cpus(chroma: str, bits: int, nv: bool, rotation: int) -> None:
    """Equal codes, but for sums that fall on the boundary between two codes."""
    info = make_info(321, 241, rotation=rotation)
    planes = make_planes(make_format(321, 241, chroma, bits=bits, nv=nv, p016=nv and bits > 8), 3, smooth=True)
    on_cpu, on_gpu = to_rgb(planes, info), to_rgb(_on_gpu(planes), info).cpu()
    difference = (on_cpu.int() - on_gpu.int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 1e-3


def test_threads_that_need_different_shared_memory_do_not_disturb_each_other() -> None:
    """A launch asks for what its crop needs; a thread with a smaller crop must not take that back before the other's launch."""
    transform = ClipTransform(TransformConfig(size=(64, 64), dtype="float32"), 1)
    info = make_info(1920, 1080)

    def work(width: int) -> None:
        planes = _on_gpu(make_planes(make_format(1920, 1080, nv=True), 1))
        params = TransformParams(crop=(0.0, 0.0, 1080.0, float(width)), bounds=(0, 0, 1080, width))
        out = torch.empty(transform.clip_shape, device="cuda")
        for _ in range(300):
            transform.apply(planes, info, params, [0], out)
        torch.cuda.synchronize()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [1920, 700, 1500, 900, 1920, 1200, 800, 1700]))


def test_runs_on_the_current_stream() -> None:
    """Planes are written, transformed and copied on a busy side stream: a launch on any other would come too early."""
    info, form = make_info(320, 240), make_format(320, 240, nv=True)
    config = TransformConfig(size=64, dtype="float32")
    host = [make_planes(form, 4, seed=s) for s in range(4)]
    params = whole(info.display_size)
    expected = [clip_exact(planes, info, params, config, [0, 1, 2, 3]) for planes in host]
    planes = _on_gpu(host[0])
    sources = [p.data.cuda() for p in host]
    transform = ClipTransform(config, 4)
    out = torch.zeros(transform.clip_shape, device="cuda")
    transform.apply(planes, info, params, [0, 1, 2, 3], out)  # compiled before time matters
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for source, wanted in zip(sources, expected, strict=True):
            torch.cuda._sleep(20_000_000)
            planes.data.copy_(source)
            transform.apply(planes, info, params, [0, 1, 2, 3], out)
            assert_clip(out.clone(), wanted, config, UNIT)


def test_writes_into_a_slot_of_a_batch_and_nowhere_else() -> None:
    for dtype in ("float32", "bfloat16", "float16", "uint8"):
        config = TransformConfig(size=(33, 17), dtype=dtype)
        info, planes = make_info(90, 70), make_planes(make_format(90, 70, nv=True), 2)
        transform = ClipTransform(config, 3)
        batch = torch.full((3, *transform.clip_shape), 77, dtype=transform.dtype, device="cuda")
        params = whole(info.display_size)
        transform.apply(_on_gpu(planes), info, params, [1, 1, 0], batch[1])
        assert_clip(batch[1], clip_exact(planes, info, params, config, [1, 1, 0]), config, UNIT)
        assert bool((batch[[0, 2]] == 77).all())


@pytest.mark.parametrize("crop", ["random-resized", "random", "center", "none"])
def test_cpu_and_gpu_agree_for_every_crop_mode(crop: Any) -> None:
    info, planes = make_info(300, 200), make_planes(make_format(300, 200, nv=True), 2)
    config = TransformConfig(size=(64, 48), crop=crop, dtype="float32")
    rng = np.random.default_rng(0)
    for _ in range(10):
        params = ClipTransform(config, 2).draw(info, rng)
        on_cpu = run(config, planes, info, params, [0, 1])
        on_gpu = run(config, _on_gpu(planes), info, params, [0, 1])
        assert float((on_gpu.cpu() - on_cpu).abs().max()) <= UNIT / min(config.std)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clamp": False},
        {"draws": "frame", "grayscale": 0.5, "channel_drop": 0.5},
        {"affine": {"degrees": 30, "scale": (0.7, 1.3), "shear": 10}, "fill": (0.1, 0.9, 0.4), "vflip": 0.5},
        {"interpolation": "nearest"},
        {"interpolation": "bicubic"},
        {"interpolation": "bicubic", "antialias": False, "crop": "center", "short_side": 70},
        {"blur": {"kernel_size": 9}, "erasing": {"p": 1.0}, "memory_format": "channels_last_3d"},
    ],
)
def test_cpu_and_gpu_agree_for_what_follows_the_kernel(changes: dict[str, Any]) -> None:
    """Colours that are changed several times: each step may double the error of the one before."""
    info, planes = make_info(300, 200, rotation=90), make_planes(make_format(300, 200, nv=True), 2)
    config = TransformConfig(preset="kinetics_train", **{"size": (64, 48), "dtype": "float32"} | changes)
    for seed in range(8):
        params = ClipTransform(config, 2).draw(info, np.random.default_rng(seed))
        on_cpu = run(config, planes, info, params, [0, 1])
        on_gpu = run(config, _on_gpu(planes), info, params, [0, 1])
        assert float((on_gpu.cpu() - on_cpu).abs().max()) <= 10 * UNIT / min(config.std)


def _on_cpu(clip: ClipInput, config: TransformConfig) -> torch.Tensor:
    """The same clip by the float reference."""
    transform = ClipTransform(config.model_copy(update={"dtype": "float32"}), 3)
    out = torch.zeros(transform.clip_shape)
    transform.apply_batch([replace(clip, planes=Planes(clip.planes.data.cpu(), clip.planes.format), out=out)])
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("clamp", [True, False])
def test_a_batch_of_everything(dtype: str, clamp: bool) -> None:
    """Sizes, formats, crops, moves, blurs and colours of all kinds, more clips than a launch has room for, some not for fused
    kernels: each is the reference's, the bits are those of the clip alone, and those of another run."""
    config = TransformConfig(size=(33, 40), dtype=dtype, clamp=clamp, blur={"kernel_size": 7}, fill=(0.3, 0.6, 0.1))
    transform = ClipTransform(config, 3)
    clips, again, alone = (batch_of(41, config, colors=True, device="cuda") for _ in range(3))
    for batch in (clips, again, alone):
        for number in range(0, 41, 3):
            turn = affine.inverse(config.size, angle=9.0 * number, scale=0.6 + 0.1 * (number % 8), shear=(number % 5, 0.0))
            changed = replace(batch[number].params, affine=turn, blur=0.2 * (number % 4))
            batch[number] = replace(batch[number], params=changed)
        for number in (5, 20):
            changed = replace(batch[number].params, color=(ColorOp("sharpness", 1.5), ColorOp("contrast", 0.7)))
            batch[number] = replace(batch[number], params=changed)
        batch[7] = replace(batch[7], frame_map=[*batch[7].frame_map, 1, 1, 0], blend=[0.5, 0.0, 0.25])
    transform.apply_batch(clips)
    transform.apply_batch(again)
    relative = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for clip, other, single in zip(clips, again, alone, strict=True):
        transform.apply(single.planes, single.info, single.params, single.frame_map, single.out, single.blend)
        assert torch.equal(clip.out, other.out)
        assert torch.equal(clip.out, single.out)
        expected = _on_cpu(clip, config)
        off = (clip.out.cpu().float() - expected).abs() - relative * expected.abs()
        wrong = float((off > 20 * UNIT / min(config.std)).double().mean())
        assert wrong <= (0.03 if steep(clip.params.color) else 0.0), (float(off.max()), clip.params)


@pytest.mark.parametrize("size", [(2160, 3840), (1080, 1920), (256, 456)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"affine": {"degrees": 30, "translate": (0.1, 0.1), "scale": (0.8, 1.2), "shear": 10}},
        {"interpolation": "bicubic"},
        {"blur": {}},
    ],
)
def test_training_clips_are_the_references(size: tuple[int, int], changes: dict[str, Any]) -> None:
    """The usual work, colours included: within a code of 8 bits for any value, a hundredth of one in the mean."""
    config = TransformConfig(preset="kinetics_train", dtype="float32", **changes)
    info, form = make_info(*size[::-1], color_matrix="bt709"), make_format(*size[::-1], nv=True)
    transform = ClipTransform(config, 3)
    clips = []
    for seed in range(3 if config.affine else 9):  # the reference takes its time over moves
        planes, params = make_planes(form, 3, seed=seed, smooth=True), transform.draw(info, np.random.default_rng(seed))
        clips.append(ClipInput(_on_gpu(planes), info, params, [2, 0, 1], torch.zeros(transform.clip_shape, device="cuda")))
    transform.apply_batch(clips)
    for clip in clips:
        off = (clip.out.cpu() - _on_cpu(clip, config)).abs() * max(config.std) * 255
        assert float(off.max()) < 1
        assert float(off.mean()) < 0.01


def test_textures_are_forgotten_beside_a_capture() -> None:
    """Their number is bounded, and letting go of them waits for no stream on which another thread captures a graph."""
    memory = torch.zeros(2 << 20, dtype=torch.uint8, device="cuda")
    summed, graph, stream = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def look_at_many() -> int:
        handles = {texture.texture_of(memory[at : at + 512].view(1, 16, 32)) for at in range(0, 512 * 1500, 512)}
        return len(handles)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(stream):
        pool.submit(look_at_many).result()
        graph.capture_begin(capture_error_mode="thread_local")
        summed += 1
        pool.submit(look_at_many).result()
        graph.capture_end()
    assert len(texture._textures) <= texture._KEPT
    graph.replay()
    assert summed.item() == 1
