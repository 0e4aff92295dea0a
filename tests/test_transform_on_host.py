"""The CUDA kernels compiled for the host, with the Python that packs their arguments, against the reference.

It runs the kernels' own source, so it finds a wrong index, weight, stride or struct field on machines without a GPU. What it
cannot show (the texture unit, rounding by fused multiply-add, synchronisation that only a GPU breaks) is left to tests/gpu.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from host_kernels import compiled
from plane_cases import assert_clip, clip_exact, make_format, make_info, make_planes, random_case, run

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipTransform, TransformParams, kernel, reference
from gpupipe.data.transform.params import whole

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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("clip_transform", tmp_path_factory.mktemp("host"))


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
