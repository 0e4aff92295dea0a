"""MixUp, CutMix and label smoothing on a finished batch, as torchvision v2 defines them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gpupipe.config import MixConfig
from gpupipe.data.transform.params import Box, Size


@dataclass(frozen=True, slots=True)
class MixParams:
    """How the clips of a batch were mixed, each with the one before it (the first with the last).

    Attributes:
        share: what is left of a clip's own label, 0 to 1; 1: nothing was mixed.
        box: (top, left, height, width) in output pixels of what CutMix took from the other clip; None for MixUp, which adds
            the pixels of both by their shares.
    """

    share: float = 1.0
    box: Box | None = None


def draw(config: MixConfig, size: Size, rng: np.random.Generator) -> MixParams:
    """Draws for one batch of clips of ``size`` (height, width)."""
    alphas = [(name, alpha) for name, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)) if alpha > 0]
    if not alphas or rng.random() >= config.p:
        return MixParams()
    name, alpha = alphas[rng.integers(len(alphas))]
    share = float(rng.beta(alpha, alpha))
    if name == "mixup":
        return MixParams(share)
    height, width = size
    centre_x, centre_y = int(rng.integers(width)), int(rng.integers(height))
    half = 0.5 * math.sqrt(1 - share)
    x1, x2 = max(centre_x - int(half * width), 0), min(centre_x + int(half * width), width)
    y1, y2 = max(centre_y - int(half * height), 0), min(centre_y + int(half * height), height)
    return MixParams(1 - (x2 - x1) * (y2 - y1) / (width * height), (y1, x1, y2 - y1, x2 - x1))


def mix(video: torch.Tensor, params: MixParams) -> None:
    """Mixes (B, …, H, W) in place. From the last clip to the first: each still finds the one before it as it was."""
    if params.share == 1:
        return
    last = video[-1].clone()
    for row in reversed(range(len(video))):
        ours, other = video[row], video[row - 1] if row else last
        if params.box is not None:
            top, left, height, width = params.box
            place = (..., slice(top, top + height), slice(left, left + width))
            ours[place] = other[place]
        else:
            both = torch.lerp(other.float(), ours.float(), params.share)
            ours.copy_(both.round_() if video.dtype == torch.uint8 else both)


def soft_labels(labels: torch.Tensor, params: MixParams, config: MixConfig) -> torch.Tensor:
    """(B,) int64 labels as (B, classes) float32 rows that sum to 1: smoothed, then mixed like the clips."""
    exact = torch.nn.functional.one_hot(labels, config.num_classes).float()
    smooth = exact * (1 - config.label_smoothing) + config.label_smoothing / config.num_classes
    return smooth * params.share + smooth.roll(1, 0) * (1 - params.share)
