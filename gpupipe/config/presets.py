"""Transforms by name: the recipes that video models are trained and evaluated with."""

from __future__ import annotations

import difflib
from typing import Any

from gpupipe.config.stage import whole_number
from gpupipe.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = {
    # RandomResizedCrop and flip of torchvision's video_classification reference; jitter as in SlowFast's recipes.
    "kinetics_train": {
        "size": 224, "crop": "random-resized", "scale": (0.08, 1.0), "hflip": 0.5,
        "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    },
    "kinetics_eval": {"size": 224, "crop": "center", "short_side": 256, "hflip": 0.0},
    # MultiScaleCrop and flip: Tong et al., VideoMAE, NeurIPS 2022, appendix, pre-training on Kinetics-400.
    "videomae": {"size": 224, "crop": "multi-scale", "multi_scale": (1.0, 0.875, 0.75, 0.66), "hflip": 0.5},
    # size is the bucket: scaled until it is covered, then cut in the middle.
    "diffusion": {"size": 256, "crop": "center", "hflip": 0.0, "mean": (0.5,) * 3, "std": (0.5,) * 3},
}  # fmt: skip


def preset(name: Any, size: Any = None) -> dict[str, Any]:
    """The fields that a preset sets, its ``short_side`` in the same ratio to another ``size`` (pixels, or height and width).

    Raises:
        ConfigError: for an unknown name; it names the nearest.
    """
    if isinstance(name, str) and name in PRESETS:
        fields = PRESETS[name]
        sides = map(whole_number, size if isinstance(size, tuple | list) else [size])
        known = [side for side in sides if side is not None]  # what is wrong with the others is told where sizes are checked
        if known and "short_side" in fields:
            return fields | {"short_side": max(1, round(min(known) * fields["short_side"] / fields["size"]))}
        return fields
    close = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"there is no transform preset {name!r}{hint}", fix=f"use one of {', '.join(PRESETS)}")
