"""Video to tokens and back: a convolution whose kernel is its stride is a change of order and one matrix product."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import checks, settings

Size = tuple[int, int, int]


def patch_embed3d(video: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Each patch of a video as one token (Arnab et al. 2021): ``conv3d(video, weight, bias, stride=patch)``, as rows.

    Tokens follow one another along the width, then height, then time. The product is cuBLAS', in the precision that it has
    under torch's own settings; autocast holds as for ``linear``. Differentiable any number of times.

    Args:
        video: (B, C, T, H, W), any strides, float32, bfloat16, float16 or float64; T, H and W multiples of the patch's.
        weight: (E, C, pt, ph, pw), as ``Conv3d`` keeps it.
        bias: (E,).

    Returns:
        (B, T/pt * H/ph * W/pw, E).

    Raises:
        ShapeError: when an argument does not fit.
    """
    checks.floating("video", video)
    if video.dim() != 5:
        raise checks.refuse("video", video, "(B, C, T, H, W)")
    checks.floating("weight", weight, like=video)
    if weight.dim() != 5 or weight.shape[1] != video.shape[1] or 0 in weight.shape:
        raise checks.refuse("weight", weight, f"(E, {video.shape[1]}, pt, ph, pw), for a video {tuple(video.shape)}")
    patch = tuple(weight.shape[2:])
    if any(size % step for size, step in zip(video.shape[2:], patch, strict=True)):
        raise ShapeError(
            f"video is {checks.said(video)}, which patches of {patch} do not fill",
            fix="T, H and W must be multiples of the patch: pad or crop the video",
        )
    if bias is not None:
        checks.floating("bias", bias, like=video)
        if bias.shape != weight.shape[:1]:
            raise checks.refuse("bias", bias, f"({weight.shape[0]},), one value a row of weight")
    if not settings.kernel_wanted("patch_embed3d"):
        return functional.conv3d(video, weight, bias, stride=patch).flatten(2).transpose(1, 2)
    grid = [size // step for size, step in zip(video.shape[2:], patch, strict=True)]
    tokens = video.reshape(*video.shape[:2], grid[0], patch[0], grid[1], patch[1], grid[2], patch[2])
    tokens = tokens.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(video.shape[0], grid[0] * grid[1] * grid[2], weight[0].numel())
    return functional.linear(tokens, weight.flatten(1), bias)


def unpatch_embed3d(
    tokens: torch.Tensor,
    grid: Size,
    patch: Size,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    channels: Literal["first", "last"] = "last",
) -> torch.Tensor:
    """The video that tokens describe: a matrix product if there is a weight, and one permuted write.

    Args:
        tokens: (B, t * h * w, E), any strides, in the order of :func:`patch_embed3d`; without a weight E is C * pt * ph * pw.
        grid: (t, h, w), tokens along each axis.
        patch: (pt, ph, pw), pixels of a token along each axis.
        weight: (C * pt * ph * pw, E), as ``Linear`` keeps it.
        bias: (C * pt * ph * pw,); only with a weight.
        channels: how a token's values are ordered: ``"last"``, (pt, ph, pw, C), as DiT and Wan do, or ``"first"``,
            (C, pt, ph, pw), as :func:`patch_embed3d` takes them.

    Returns:
        (B, C, t * pt, h * ph, w * pw), contiguous.

    Raises:
        ShapeError: when an argument does not fit.
        ConfigError: for another order of ``channels``, or sizes below 1.
    """
    checks.floating("tokens", tokens)
    if channels not in ("first", "last"):
        raise ConfigError(f"channels is {channels!r}", fix="choose 'first' or 'last'")
    for name, sizes in (("grid", grid), ("patch", patch)):
        if len(sizes) != 3 or min(sizes) < 1:
            raise ConfigError(f"{name} is {sizes!r}", fix=f"{name} is three sizes of 1 or more: time, height, width")
    t, h, w = grid
    if tokens.dim() != 3 or tokens.shape[1] != t * h * w:
        raise checks.refuse("tokens", tokens, f"(B, {t * h * w}, E), for a grid of {tuple(grid)}")
    if weight is not None:
        checks.floating("weight", weight, like=tokens)
        if weight.dim() != 2 or weight.shape[1] != tokens.shape[2]:
            raise checks.refuse("weight", weight, f"(C * pt * ph * pw, {tokens.shape[2]})")
        checks.vector("bias", bias, weight.shape[0], tokens)
        tokens = functional.linear(tokens, weight, bias)
    elif bias is not None:
        raise checks.refuse("bias", bias, "None where there is no weight")
    pt, ph, pw = patch
    if tokens.shape[2] == 0 or tokens.shape[2] % (pt * ph * pw):
        name, given = ("tokens", tokens) if weight is None else ("weight", weight)
        raise checks.refuse(name, given, f"for a multiple of {pt * ph * pw} values a token, as a patch {tuple(patch)} has")
    count = tokens.shape[2] // (pt * ph * pw)
    if channels == "last":
        video = tokens.reshape(tokens.shape[0], t, h, w, pt, ph, pw, count).permute(0, 7, 1, 4, 2, 5, 3, 6)
    else:
        video = tokens.reshape(tokens.shape[0], t, h, w, count, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return video.clone(memory_format=torch.contiguous_format).view(tokens.shape[0], count, t * pt, h * ph, w * pw)
