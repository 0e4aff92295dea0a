"""How tensors lie between fused parts, chosen by the bytes that a conversion costs and saves."""

from __future__ import annotations

import torch

_COST, _SAVED_PACKED, _SAVED_SPLIT, _SAVED_NO_GRADIENT = 12, 10, 4, 2
"""In widths of a row: see :func:`joining_pays`."""


def joining_pays(tokens: int, width: int, *, packed: bool, gradients: bool) -> bool:
    """Whether three separate weights (D, D) of queries, keys and values are better put together for one product.

    Putting them together reads and writes 3 D² values, and twice that for their gradients: 12 D² both ways, 6 D² without
    gradients. It saves two of three reads of the N x D inputs in the forward, two for the weights' gradients and two sums of
    input gradients in the backward, 10 N D in all; where the result is not used packed, its gradient is put together by a copy
    of 6 N D.
    """
    if not gradients:
        return tokens * _SAVED_NO_GRADIENT * 2 > _COST * width
    return tokens * (_SAVED_PACKED if packed else _SAVED_SPLIT) > _COST * width


def joining_said(width: int, item_bytes: int) -> str:
    """The choice for the weights of one attention, in words."""
    most = -(-_COST * width // _SAVED_PACKED)
    cost = _COST * width * width * item_bytes / 1e6
    return f"joined per step (moves {cost:.2f} MB) from {most} tokens on, packed where norm or rotary follow; else split"


def joining_gated_pays(tokens: int, columns: int, width: int, *, gradients: bool) -> bool:
    """Whether the two weights (F, K) of a gated MLP are better put together for one product and one pass behind it.

    Putting them together reads and writes 2 F K values, 4 F K in all, and as much for their gradients. It saves one of two
    reads of the N x K inputs, and 2 of the 5 N F that activation and product move by themselves; in the backward one more of
    these reads, a sum of input gradients of 3 N K, and 3 of 9 N F.
    """
    if not gradients:
        return tokens * (columns + 2 * width) > 4 * width * columns
    return tokens * 5 * (columns + width) > 8 * width * columns


def joining_gated_said(columns: int, width: int, item_bytes: int) -> str:
    """The choice for the weights of one gated MLP, in words."""
    most = 8 * width * columns // (5 * (columns + width)) + 1
    return f"joined per step (moves {8 * width * columns * item_bytes / 1e6:.2f} MB) from {most} tokens on; else as written"


def for_convolution(x: torch.Tensor) -> torch.Tensor:
    """A video (B, C, T, H, W) as a run of convolutions had better have it.

    cuDNN's half-precision kernels work channels-last: a contiguous tensor is converted before each and back after it, four
    passes over memory, where one conversion before the first serves all that follow. In other types and elsewhere nothing is
    saved, and nothing is converted.
    """
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16) or x.shape[1] == 1:
        return x
    return x.contiguous(memory_format=torch.channels_last_3d)


CONVOLUTION = "channels-last from the first convolution on, for half precision on a GPU; elsewhere as it comes"
"""The choice for convolutions, in words."""
REPLICATED = "as it comes: a GPU's replicated border is written contiguous, so that a conversion would not last"
"""The choice for those that replicate what is at the border."""
