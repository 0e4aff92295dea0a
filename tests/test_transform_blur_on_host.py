"""The blurring kernel compiled for the host, with the Python that packs its argument, against the reference.

See tests/test_transform_fused_on_host.py for what that shows; what only a GPU can show is left to tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import batch_of, make_format, make_info, make_planes, reference, run, steep

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, affine, fuse, gaussian
from gpupipe.data.transform.adjust import blur
from gpupipe.data.transform.params import ColorOp, whole
from gpupipe.data.transform.picture import store

UNIT = 2e-5
"""Allowed error of RGB in [0, 1]: float32 sums, and 16 bits between two launches."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(
    ("size", "kernel_size", "sigma"),
    [
        ((30, 41), 1, 1.0),
        ((30, 41), 3, 0.1),
        ((70, 97), 9, 2.0),
        ((129, 33), 23, 1.3),
        ((12, 64), 23, 30.0),
        ((5, 5), 9, 4.0),
        ((130, 131), 255, 60.0),
        ((256, 257), 511, 20.0),
        ((2, 3), 3, 0.7),
    ],
)
def test_equals_torch(launches: list[str], size: tuple[int, int], kernel_size: int, sigma: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(kernel_size)
    frames = 2 if kernel_size < 100 else 1
    rgb = torch.from_numpy(rng.uniform(-0.2, 1.2, (frames, 3, *size)).astype(np.float32))
    scale = (np.full(3, 255.0), np.zeros(3)) if dtype == torch.uint8 else (rng.uniform(1, 5, 3), rng.uniform(-2, 2, 3))
    out = torch.zeros((frames, *size, 3), dtype=dtype).permute(0, 3, 1, 2)
    expected = torch.zeros_like(out)
    store(blur(rgb, kernel_size, sigma), scale, expected)
    gaussian.blur(rgb, kernel_size, sigma, tuple(np.concatenate(scale).tolist()), out)
    assert launches == [f"blur_{str(dtype).removeprefix('torch.')}"]
    off = (out.double() - expected.double()).abs() / (1.0 if dtype == torch.uint8 else max(scale[0]))
    limit = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.uint8: 1.0}[dtype]
    assert float(off.max()) <= limit


@pytest.mark.parametrize("half", range(256))
def test_every_size_of_kernel_has_a_tile(half: int) -> None:
    assert gaussian.tile_of(half).shared_bytes <= gaussian.SHARED_BYTES


def blurred_batch(config: TransformConfig, count: int) -> list[ClipInput]:
    """Clips of all sizes, formats and colours, two of three blurred and some moved."""
    clips = batch_of(count, config, colors=True)
    turn = affine.inverse(config.size, angle=10.0)
    for number in range(count):
        if number % 3:
            params = replace(clips[number].params, blur=0.3 * number, affine=turn if number % 5 == 0 else None)
            clips[number] = replace(clips[number], params=params)
    return clips


@pytest.mark.parametrize("changes", [{}, {"clamp": False}, {"dtype": "bfloat16", "layout": "NTCHW"}])
def test_a_batch_of_everything(launches: list[str], changes: dict[str, Any]) -> None:
    """More clips than a launch has room for; the bits are those of each clip alone."""
    config = TransformConfig(**{"size": (19, 35), "dtype": "float32", "blur": {"kernel_size": 7}} | changes)
    clips, alone = blurred_batch(config, 30), blurred_batch(config, 30)
    transform = ClipTransform(config, 3)
    transform.apply_batch(clips)
    assert len([name for name in launches if name.startswith("blur")]) == -(-20 // gaussian.MAX_CLIPS)
    limit = 2.0**-6 if config.dtype == "bfloat16" else 30 * UNIT / min(config.std)
    for clip, single in zip(clips, alone, strict=True):
        transform.apply(single.planes, single.info, single.params, single.frame_map, single.out)
        assert torch.equal(clip.out, single.out)
        with pytest.MonkeyPatch.context() as context:
            context.setattr(fuse, "takes", lambda out: False)
            exact = reference(clip, config)
        ours = clip.out.transpose(0, 1) if config.layout == "NCTHW" else clip.out
        off = (ours.double() - exact).abs()
        allowed = 0.05 if steep(clip.params.color) else 0.0
        assert float((off > limit).double().mean()) <= allowed, (float(off.max()), clip.params)


def test_contrast_before_the_blur_has_the_means(launches: list[str]) -> None:
    info, planes = make_info(60, 44), make_planes(make_format(60, 44, nv=True), 2)
    config = TransformConfig(size=(40, 48), dtype="float32", blur={"kernel_size": 5})
    params = replace(whole((44, 60)), color=(ColorOp("hue", 0.1), ColorOp("contrast", 0.4), ColorOp("hue", -0.2)), blur=1.2)
    clip = run(config, planes, info, params, [1, 0])
    assert launches == ["resize_u8_float32", "blur_float32"]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(fuse, "takes", lambda out: False)
        exact = reference(ClipInput(planes, info, params, [1, 0], clip), config)
    assert float((clip.transpose(0, 1) - exact).abs().max()) < 20 * UNIT / min(config.std)
