"""The kernels for changes of colour that need more of a frame than a pixel, compiled for the host, against torch.

See tests/test_transform_fused_on_host.py for what that shows; what only a GPU can show is left to tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plane_cases import make_format, make_info, make_planes, reference

from gpupipe.config import TransformConfig
from gpupipe.data.transform import ClipInput, ClipTransform, fuse, levels
from gpupipe.data.transform.adjust import adjust
from gpupipe.data.transform.params import ColorOp, whole


def pictures(size: tuple[int, int]) -> list[torch.Tensor]:
    """Noise beyond [0, 1], a narrow range, one colour, and few codes, of which some are missing."""
    rng = np.random.default_rng(size[0])
    noise = rng.uniform(-0.2, 1.2, (2, 3, *size)).astype(np.float32)
    few = rng.choice([0.1, 0.35, 0.36, 0.9], (1, 3, *size)).astype(np.float32)
    return [torch.from_numpy(x) for x in (noise, 0.3 + 0.1 * noise, np.full((1, 3, *size), 0.25, np.float32), few)]


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (3, 3), (21, 34), (64, 65)])
@pytest.mark.parametrize("name", levels.KINDS)
@pytest.mark.parametrize("clamp", [True, False])
def test_each_equals_torch(launches: list[str], name: Any, size: tuple[int, int], clamp: bool) -> None:
    for rgb in pictures(size):
        rgb = rgb.clamp(0, 1) if clamp else rgb
        for factor in (0.1, 1.9) if name == "sharpness" else (0.0,):
            op = ColorOp(name, factor)
            ours, left = levels.change(rgb, [op], clamp=clamp)
            assert left == []
            off = (ours - adjust(rgb.clone(), [op], clamp=clamp)).abs()
            assert float(off.max()) < (1e-7 if name == "equalize" else 1e-6)
    assert set(launches) == {f"levels_{name}"}


def test_runs_of_others_between_them(launches: list[str]) -> None:
    ops = [
        ColorOp("brightness", 1.2), ColorOp("contrast", 0.8), ColorOp("contrast", 1.3), ColorOp("sharpness", 1.7),
        ColorOp("autocontrast"), ColorOp("saturation", 0.7), ColorOp("contrast", 1.1),
    ]  # fmt: skip
    rgb = pictures((40, 33))[0].clamp(0, 1)
    before = rgb.clone()
    some, left = levels.change(rgb, ops, clamp=True)
    assert left == ops[5:]
    assert torch.equal(rgb, before)
    done, none = levels.change(rgb, ops, clamp=True, wholly=True)
    assert none == []
    assert float((adjust(some.clone(), left) - done).abs().max()) < 1e-5
    assert float((adjust(rgb.clone(), ops) - done).abs().max()) < 1e-5


@pytest.mark.parametrize("sigma", [0.0, 1.1])
@pytest.mark.parametrize("blend", [(), (0.25, 0.5)])
def test_clips_made_one_by_one(launches: list[str], sigma: float, blend: tuple[float, ...]) -> None:
    """With what comes before and after: the clip is the reference's."""
    info, planes = make_info(60, 44, rotation=90), make_planes(make_format(60, 44, nv=True), 3, smooth=True)
    config = TransformConfig(size=(30, 24), dtype="float32", blur={"kernel_size": 5})
    ops = (ColorOp("saturation", 1.4), ColorOp("sharpness", 1.8), ColorOp("contrast", 0.7))
    params = replace(whole(info.display_size), color=ops, blur=sigma)
    frame_map = [2, 0, 1, 1] if blend else [2, 0]
    clip = ClipInput(planes, info, params, frame_map, torch.zeros(3, 2, 30, 24), blend)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(fuse, "takes", lambda out: False)
        expected = reference(clip, config)
    ClipTransform(config, 2).apply_batch([clip])
    names = [name.split("_")[0] for name in launches]
    assert names[:2] == ["color", "levels"]
    assert names[-1] == ("blur" if sigma else "color")
    assert float((clip.out.transpose(0, 1) - expected).abs().max()) < 1e-4 / min(config.std)
