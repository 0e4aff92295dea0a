"""The CUDA kernels compiled for the host, with the Python that packs their arguments, against the reference.

It runs the kernels' own source, so it finds a wrong index, weight, stride or struct field on machines without a GPU. What it
cannot show (the texture unit, rounding by fused multiply-add, synchronisation that only a GPU breaks) is left to tests/gpu.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import assert_clip, clip_exact, make_format, make_info, make_planes, random_case, run

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams, finish, kernel, reference, resize
from gpupipe.data.transform.adjust import adjust
from gpupipe.data.transform.geometry import geometry
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.data.transform.picture import store

ROOT = Path(__file__).resolve().parent.parent
UNIT = 2e-5
"""Allowed error of RGB in [0, 1]: float32 sums over a few hundred codes of 255 or 65535, against float64."""


class _Texture(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("width", ctypes.c_int), ("rows", ctypes.c_int), ("pitch", ctypes.c_int))


class _HostBuffer:
    """Stands in for PitchedBuffer, and keeps its rule for where a texture may start."""

    made: list[_Texture]

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.made = []

    @classmethod
    def of(cls, frames: torch.Tensor) -> _HostBuffer:
        return cls(frames.flatten(0, 1))

    def texture(self, first_row: int, rows: int, width: int) -> int:
        pitch = self.data.shape[1]
        assert first_row * pitch * self.data.element_size() % 512 == 0
        assert 0 < rows <= 65000
        assert first_row + rows <= len(self.data)
        self.made.append(_Texture(self.data[first_row].data_ptr(), width, rows, pitch))
        return ctypes.addressof(self.made[-1])


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    target = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'tests/cuda_on_host'}", f"-I{ROOT / 'cuda_src'}"]
    source = ROOT / f"tests/cuda_on_host/{name}.cpp"
    subprocess.run([*command, "-o", str(target), str(source)], check=True, timeout=100)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("clip_transform", tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def resize_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("clip_resize", tmp_path_factory.mktemp("host"))


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Sends the kernel's launches to the host library; what was launched."""
    log: list[dict[str, Any]] = []

    def launch(function: str, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], *, shared_bytes: int) -> None:
        assert shared_bytes <= 48 * 1024
        (params,) = args
        log.append({"function": function, "tabled": int(params["tabled"]), "frames": int(params["frames"])})
        packed = ctypes.create_string_buffer(params.tobytes(), kernel.PARAMS.itemsize)
        outside = getattr(library, f"run_{function}")(packed, *grid, *block[:2])
        assert outside == 0, f"{outside} fetches outside the texture"

    monkeypatch.setattr(kernel, "kernel", lambda file, name, options: name)
    monkeypatch.setattr(kernel, "PitchedBuffer", _HostBuffer)
    monkeypatch.setattr(kernel, "launch", launch)
    monkeypatch.setattr(reference, "transform", kernel.transform)
    return log


@pytest.mark.parametrize("seed", range(60))
def test_kernel_equals_the_exact_transform(launches: list[dict[str, Any]], seed: int) -> None:
    planes, info, params, config = random_case(seed)
    clip = run(config, planes, info, params, [2, 0, 0, 1])
    assert launches
    assert_clip(clip, clip_exact(planes, info, params, config, [2, 0, 0, 1]), config, UNIT)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes", [{}, {"clamp": False}, {"affine": {"degrees": 30, "scale": (0.7, 1.3)}, "vflip": 0.5}, {"draws": "frame"}]
)
def test_clips_made_in_several_steps(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, seed: int, changes: dict[str, Any]
) -> None:
    """Colour jitter, moves and blur begin with the kernel: the clip is that of the reference."""
    info, planes = make_info(90, 71, rotation=90), make_planes(make_format(90, 71, nv=True), 2)
    given = {"size": (33, 20), "dtype": "float32", "blur": {"kernel_size": 5, "p": 0.5}, "erasing": {"p": 0.5}}
    config = TransformConfig(preset="kinetics_train", **given | changes)
    params = ClipTransform(config, 2).draw(info, np.random.default_rng(seed))
    clip = run(config, planes, info, params, [1, 0])
    assert launches
    monkeypatch.undo()
    assert float((clip - run(config, planes, info, params, [1, 0])).abs().max()) < 5 * UNIT / min(config.std)


def test_a_shrink_too_strong_for_tables(launches: list[dict[str, Any]]) -> None:
    form, info = make_format(3001, 60), make_info(3001, 60, rotation=90)
    config = TransformConfig(size=(5, 3), dtype="float32")
    params = whole(info.display_size)
    planes = make_planes(form, 1)
    clip = run(config, planes, info, params, [0])
    assert [entry["tabled"] for entry in launches] == [0]
    assert_clip(clip, clip_exact(planes, info, params, config, [0]), config, UNIT)


def test_computed_weights_equal_tables(launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    form, info = make_format(75, 61), make_info(75, 61, rotation=270)
    config = TransformConfig(size=(20, 33), dtype="float32")
    params = TransformParams((3.5, 2.0, 70.5, 50.0), (0, 0, 75, 61), hflip=True)
    planes = make_planes(form, 1)
    tabled = run(config, planes, info, params, [0])
    monkeypatch.setattr(kernel, "TABLE_BYTES", 0)
    computed = run(config, planes, info, params, [0])
    assert [entry["tabled"] for entry in launches] == [1, 0]
    assert torch.equal(tabled, computed)


def test_more_rows_than_a_texture_and_more_frames_than_a_launch(launches: list[dict[str, Any]]) -> None:
    form, info = make_format(8, 146, nv=True), make_info(8, 146)
    config = TransformConfig(size=(6, 7), dtype="float32")
    planes = make_planes(form, 640)
    frame_map = [639, 0, 296, 295, 297, 591, 592, *range(590), 300]
    assert 296 * form.rows % 16 == 8  # the second texture cannot start where frame 296 does
    params = whole(info.display_size)
    clip = run(config, planes, info, params, frame_map)
    assert len(launches) > 3
    assert all(entry["frames"] <= kernel.MAX_FRAMES for entry in launches)
    assert_clip(clip, clip_exact(planes, info, params, config, frame_map), config, UNIT)


def test_strided_slots(launches: list[dict[str, Any]]) -> None:
    form, info = make_format(31, 23), make_info(31, 23)
    config = TransformConfig(size=(11, 13), dtype="float32")
    planes, params = make_planes(form, 2), whole(info.display_size)
    batch = torch.full((13, 2, 3, 2, 11), -9.0)
    transform = ClipTransform(config, 2)
    slot = batch[:, 1].permute(1, 2, 3, 0)
    transform.apply(planes, info, params, [1, 0], slot)
    assert_clip(slot, clip_exact(planes, info, params, config, [1, 0]), config, UNIT)
    assert bool((batch[:, 0] == -9).all())


@pytest.fixture
def resizes(resize_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Sends the resizing kernel's launches to the host library, for every transform; what was launched."""
    log: list[dict[str, Any]] = []

    def launch(function: str, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], *, shared_bytes: int) -> None:
        assert shared_bytes <= resize.SHARED_BYTES
        (batch,) = args
        log.append({name: int(batch[name]) for name in ("rows_a_block", "columns_a_block", "frames_a_block")} | {"grid": grid})
        packed = ctypes.create_string_buffer(batch.tobytes(), resize.BATCH.itemsize)
        getattr(resize_library, f"run_{function}")(packed, *grid, *block[:2])

    def transform(*clip: Any) -> None:
        resize.transform([resize.Clip(*clip)])

    monkeypatch.setattr(resize, "kernel", lambda file, name, options: name)
    monkeypatch.setattr(resize, "launch", launch)
    monkeypatch.setattr(reference, "transform", transform)
    return log


@pytest.mark.parametrize("seed", range(60))
def test_resize_equals_the_exact_transform(resizes: list[dict[str, Any]], seed: int) -> None:
    planes, info, params, config = random_case(seed)
    clip = run(config, planes, info, params, [2, 0, 0, 1])
    assert resizes
    assert_clip(clip, clip_exact(planes, info, params, config, [2, 0, 0, 1]), config, UNIT)


@pytest.mark.parametrize(("width", "height", "size"), [(1500, 40, (7, 500)), (40, 1500, (300, 5)), (2100, 90, (9, 11))])
@pytest.mark.parametrize("rotation", [0, 90])
def test_resize_of_long_lines(
    resizes: list[dict[str, Any]], width: int, height: int, size: tuple[int, int], rotation: Any
) -> None:
    form, info = make_format(width, height, nv=True), make_info(width, height, rotation=rotation)
    config = TransformConfig(size=size, dtype="float32")
    planes, params = make_planes(form, 1), whole(info.display_size)
    clip = run(config, planes, info, params, [0])
    assert_clip(clip, clip_exact(planes, info, params, config, [0]), config, UNIT)


def test_resize_of_more_frames_than_a_launch_and_a_block(resizes: list[dict[str, Any]]) -> None:
    form, info = make_format(24, 18, nv=True), make_info(24, 18)
    config = TransformConfig(size=(9, 10), dtype="float32")
    planes, params = make_planes(form, 50), whole(info.display_size)
    frame_map = [k * 7 % 50 for k in range(700)]
    clip = run(config, planes, info, params, frame_map)
    assert len(resizes) == 3
    assert_clip(clip, clip_exact(planes, info, params, config, frame_map), config, UNIT)


def test_clips_of_any_size_and_format_share_a_launch(resizes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    clips: list[resize.Clip] = []
    monkeypatch.setattr(reference, "transform", lambda *clip: clips.append(resize.Clip(*clip)))
    made = []
    for seed in range(400):
        planes, info, params, config = random_case(seed)
        if planes.format.sample_bytes == 1:
            config = config.model_copy(update={"size": (13, 17), "dtype": "float32"})
            made.append((run(config, planes, info, params, [0, 2]), clip_exact(planes, info, params, config, [0, 2]), config))
        if len(made) == 19:
            break
    resize.transform(clips)
    assert len(resizes) == 3, "eight clips a launch"
    for clip, expected, config in made:
        assert_clip(clip, expected, config, UNIT)


@pytest.mark.parametrize(
    ("size", "antialias", "serves"),
    [
        ((20, 20), True, True),
        ((48, 30), True, True),
        ((20, 20), False, False),
        ((96, 128), True, False),
        ((48, 64), True, False),
    ],
)
def test_what_shrinks_with_antialias_is_resized(size: tuple[int, int], antialias: bool, serves: bool) -> None:
    form, info = make_format(64, 48), make_info(64, 48)
    assert resize.serves(geometry(info, form, whole(info.display_size), size, antialias=antialias)) == serves


def test_lines_too_long_for_a_block_are_left_to_textures() -> None:
    form, info = make_format(30000, 48), make_info(30000, 48)
    assert not resize.serves(geometry(info, form, whole(info.display_size), (4, 1)))


@pytest.fixture(scope="module")
def color_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("clip_color", tmp_path_factory.mktemp("host"))


@pytest.fixture
def finishes(color_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends the colour kernels' launches to the host library; what was launched."""
    log: list[str] = []

    def launch(function: str, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], *, shared_bytes: int) -> None:
        log.append(function)
        packed = ctypes.create_string_buffer(args[0].tobytes(), finish.JOB.itemsize)
        getattr(color_library, f"run_{function}")(packed, *grid, *block[:2])

    monkeypatch.setattr(finish, "kernel", lambda file, name: name)
    monkeypatch.setattr(finish, "launch", launch)
    return log


def drawn_ops(rng: np.random.Generator) -> list[ColorOp]:
    values = {
        "brightness": rng.uniform(0, 2), "saturation": rng.uniform(0, 2), "contrast": rng.uniform(0, 2),
        "hue": rng.uniform(-0.5, 0.5), "grayscale": 0.0, "channel_drop": float(rng.integers(3)),
        "posterize": float(rng.integers(1, 8)), "solarize": rng.uniform(0.2, 0.9),
    }  # fmt: skip
    names = rng.permutation(list(values))[: rng.integers(0, 6)]
    return [ColorOp(str(name), float(values[str(name)])) for name in names]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_colours_equal_those_of_torch(finishes: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops, clamp = drawn_ops(rng), bool(rng.integers(2))
    frames, height, width = (int(n) for n in rng.integers(1, (4, 60, 90)))
    rgb = torch.from_numpy(rng.random((frames, 3, height, width), np.float32))
    dtype = (torch.float32, torch.float32, torch.bfloat16, torch.uint8)[seed % 4]
    scale = (np.full(3, 255.0), np.zeros(3)) if dtype == torch.uint8 else (rng.uniform(1, 5, 3), rng.uniform(-2, 2, 3))
    out = torch.zeros((frames, height, width, 3), dtype=dtype).permute(0, 3, 1, 2)
    expected = torch.zeros_like(out)
    store(adjust(rgb.clone(), ops, clamp=clamp), scale, expected)
    finish.finish(rgb, ops, scale, out, clamp=clamp)
    assert ("color_sums" in finishes) == any(op.name == "contrast" for op in ops)
    off = (out.double() - expected.double()).abs() / (1.0 if dtype == torch.uint8 else max(scale[0]))
    steep = any(op.name in ("posterize", "solarize") for op in ops)  # a rounding error before the step moves a pixel over it
    limit = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.uint8: 1.0}[dtype]
    assert float((off > limit).double().mean()) <= (0.02 if steep else 0.0), (float(off.max()), ops)


def test_colours_that_need_more_than_a_pixel_are_left_to_torch() -> None:
    assert finish.serves([])
    assert finish.serves([ColorOp("contrast", 0.5), ColorOp("hue", 0.1)])
    assert not finish.serves([ColorOp("contrast", 0.5), ColorOp("contrast", 0.5)])
    for name in ("sharpness", "autocontrast", "equalize"):
        assert not finish.serves([ColorOp(name)])  # type: ignore[arg-type]
