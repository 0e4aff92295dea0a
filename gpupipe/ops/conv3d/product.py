"""Convolutions that are matrix products: of one pixel, and those whose kernel equals their stride."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpupipe.ops.planes import channels_last

Three = tuple[int, int, int]


def serves_as_product(
    x: torch.Tensor, weight: torch.Tensor, stride: Three, padding: Three, dilation: Three, groups: int
) -> bool:
    """True where :func:`as_product` may stand for the convolution.

    Float32 on a GPU stays with the convolution, since torch lets only that use TF32 unless told otherwise; so does what
    autocast would cast.
    """
    kernel = tuple(weight.shape[2:])
    return (
        kernel == stride
        and padding == (0, 0, 0)
        and (dilation == (1, 1, 1) or kernel == (1, 1, 1))
        and groups == 1
        and x.dtype == weight.dtype
        and (x.dtype != torch.float32 or x.device.type != "cuda")
        and all(size >= step for size, step in zip(x.shape[2:], kernel, strict=True))
    )


def as_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Three,
    padding: Three,
    dilation: Three,
    groups: int,
) -> torch.Tensor:
    """The convolution, by patches that are copied into rows once (not at all for one pixel)."""
    kt, kh, kw = stride
    batch, channels = x.shape[:2]
    t, h, w = (size // step for size, step in zip(x.shape[2:], stride, strict=True))
    last = channels_last(x)
    if stride == (1, 1, 1) and not last:
        flat = torch.matmul(weight.flatten(1), x.flatten(2))
        if bias is not None:
            flat = flat + bias[:, None]
        return flat.view(batch, -1, t, h, w)
    cut = x[:, :, : t * kt, : h * kh, : w * kw].unflatten(4, (w, kw)).unflatten(3, (h, kh)).unflatten(2, (t, kt))
    if last:  # a patch's channels stay next to each other
        rows = cut.permute(0, 2, 4, 6, 3, 5, 7, 1)
        matrix = weight.permute(0, 2, 3, 4, 1).flatten(1)
    else:
        rows = cut.permute(0, 2, 4, 6, 1, 3, 5, 7)
        matrix = weight.flatten(1)
    y = functional.linear(rows.reshape(batch, t, h, w, channels * kt * kh * kw), matrix, bias)
    return y.permute(0, 4, 1, 2, 3)
