"""Attention within windows of a video, shifted or not, with a learned bias by relative position: Swin's."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpupipe import ops
from gpupipe.ops.packed import unpack
from gpupipe.ops.sdpa import attend
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.probe import attempt, plain, replaced, same
from gpupipe.train.report import Entry

_TABLE = "relative_position_bias_table"
_APART = -100.0
"""Added to scores between tokens that a shift has brought together, as the models do it."""
_MOST = 16
"""Shapes whose masks are kept, for each module."""
_TRIALS = (((1, 2, 2), (0, 0, 0)), ((1, 2, 2), (0, 1, 1)))
"""(window, shift) that a module is tried with, on a grid that they do not divide."""
_GRID = (1, 3, 4)
_masks: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, torch.Tensor]] = weakref.WeakKeyDictionary()
Sizes = tuple[int, ...]


class FusedWindowAttention(Fused):
    """qkv, attention in windows with bias and mask, and a layer behind it: no scores in memory, the mask made once a grid."""

    kind = "attention"
    qkv: Any
    proj: Any
    window_size: list[int]
    shift_size: list[int]
    num_heads: int

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        layers: dict[str, Any] = dict(module.named_children())
        if set(layers) != {"qkv", "proj"} or set(dict(module.named_parameters(recurse=False))) != {_TABLE}:
            return None
        sizes = [getattr(module, name, None) for name in ("window_size", "shift_size")]
        if not all(plain(layer) for layer in layers.values()) or not all(
            isinstance(one, list) and len(one) == 3 for one in sizes
        ):
            return None
        heads, width = getattr(module, "num_heads", None), layers["qkv"].in_features
        if not isinstance(heads, int) or layers["qkv"].out_features != 3 * width or width % heads:
            return None
        if any(buffer.is_meta for buffer in module.buffers()):
            raise Left("its table of positions has no memory yet: fuse it again when it has")
        if not all(cls._does(module, window, shift) for window, shift in _TRIALS):
            raise Left("it does something else in its windows than attention with a bias by relative position")
        return {"way": "windows, relative positions"}

    @classmethod
    def _does(cls, module: Any, window: Sizes, shift: Sizes) -> bool:
        """Tried with few and narrow heads, small windows and weights of its kind."""
        heads, width = module.num_heads, 2 * module.num_heads
        own = {_TABLE: _wave(*module.relative_position_bias_table.shape)}
        inside = [
            {"weight": _wave(count * width, width), **({} if layer.bias is None else {"bias": _wave(count * width)})}
            for layer, count in ((module.qkv, 3), (module.proj, 1))
        ]
        x = _wave(2, *_GRID, width)
        fitted = _fitted(_GRID, window, shift)
        kept, buffers = (module.window_size, module.shift_size), dict(module._buffers)
        module.window_size, module.shift_size = list(window), list(shift)
        module._buffers |= {name: None if one is None else one.cpu() for name, one in buffers.items()}
        try:
            with replaced(module, own), replaced(module.qkv, inside[0]), replaced(module.proj, inside[1]):
                trial = attempt(module, x)
                with torch.no_grad():
                    bias = module.get_relative_position_bias(list(fitted[0]))
                    qkv, out = (layer._parameters for layer in (module.qkv, module.proj))
                    made = windowed(
                        x, qkv["weight"], qkv["bias"], out["weight"], out["bias"], bias, heads, *fitted, None
                    )  # fmt: skip
        except Exception:  # somebody else's module, which need not be what it looks like
            return False
        finally:
            module.window_size, module.shift_size = kept
            module._buffers |= buffers
        return trial is not None and same(trial.result, made)

    @classmethod
    def layouts(cls, module: nn.Module, name: str) -> list[Entry]:
        return [
            Entry(name, "q, k, v", "packed, as its one layer makes them; in the order of windows, brought there by one copy")
        ]

    def fused_forward(self, x: torch.Tensor) -> Any:
        rates: list[Any] = [getattr(self, name, 0.0) for name in ("attention_dropout", "dropout")]
        if x.dim() != 5 or (self.training and any(rates)) or not plain(self.qkv) or not plain(self.proj):
            return NotImplemented
        window, shift = _fitted(tuple(x.shape[1:4]), self.window_size, self.shift_size)
        own: Any = self
        bias = own.get_relative_position_bias(list(window))
        qkv, out = self.qkv, self.proj
        return windowed(x, qkv.weight, qkv.bias, out.weight, out.bias, bias, self.num_heads, window, shift, self)


def windowed(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    bias: torch.Tensor,
    heads: int,
    window: Sizes,
    shift: Sizes,
    keeper: nn.Module | None,
) -> torch.Tensor:
    """Attention of x (B, T, H, W, C) within windows of a size, moved on by a shift and wrapped round; zeros fill the borders.

    Args:
        bias: (1, heads, N, N) of a window's N tokens.
        keeper: keeps the masks of shifts; None: nobody does.
    """
    sizes = x.shape[1:4]
    more = [-size % step for size, step in zip(sizes, window, strict=True)]
    y = functional.pad(x, (0, 0, 0, more[2], 0, more[1], 0, more[0])) if any(more) else x
    padded = tuple(y.shape[1:4])
    if any(shift):
        y = y.roll([-step for step in shift], (1, 2, 3))
    tokens = _cut(y, window).flatten(4, 6).flatten(0, 3)
    qkv: Any = ops.qkv_linear(tokens, weight, weight_bias, heads=heads, packed=True)
    q, k, v = (side.transpose(1, 2) for side in unpack(qkv))
    bias = bias.to(q.dtype)
    if any(shift):
        mask = _mask(keeper, padded, window, shift, q)
        bias = (bias + mask[:, None]).repeat(x.shape[0], 1, 1, 1)
    made = attend(q, k, v, bias.expand(q.shape[0], -1, -1, -1), causal=False, scale=q.shape[-1] ** -0.5)
    made = functional.linear(made.transpose(1, 2).flatten(2), out_weight, out_bias)
    counts = [size // step for size, step in zip(padded, window, strict=True)]
    y = made.view(x.shape[0], *counts, *window, x.shape[-1]).permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape[0], *padded, -1)
    if any(shift):
        y = y.roll(list(shift), (1, 2, 3))
    return y[:, : sizes[0], : sizes[1], : sizes[2]].contiguous()


def _cut(x: torch.Tensor, window: Sizes) -> torch.Tensor:
    """(B, T, H, W, ...) as (B, windows along T, H and W, their sizes, ...)."""
    t, h, w = window
    counts = [size // step for size, step in zip(x.shape[1:4], window, strict=True)]
    x = x.reshape(x.shape[0], counts[0], t, counts[1], h, counts[2], w, *x.shape[4:])
    return x.permute(0, 1, 3, 5, 2, 4, 6, *range(7, x.dim()))


def _mask(keeper: nn.Module | None, padded: Sizes, window: Sizes, shift: Sizes, like: torch.Tensor) -> torch.Tensor:
    """(windows, N, N), kept for each shape."""
    if keeper is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return _made_mask(padded, window, shift, like)
    key = (padded, window, shift, like.device, like.dtype, torch.is_inference_mode_enabled())
    kept = _masks.setdefault(keeper, {})
    if key not in kept:
        while len(kept) >= _MOST:
            kept.pop(next(iter(kept)))
        kept[key] = _made_mask(padded, window, shift, like)
    return kept[key]


def _made_mask(padded: Sizes, window: Sizes, shift: Sizes, like: torch.Tensor) -> torch.Tensor:
    """What is added to scores between tokens that come from unlike sides of the border."""
    sides = torch.zeros(1, *padded, device=like.device, dtype=torch.int32)
    for axis, (size, step, by) in enumerate(zip(padded, window, shift, strict=True)):
        if by:
            place = torch.arange(size, device=like.device)
            side = (place >= size - step).int() + (place >= size - by).int()
            sides = sides + (side * 3**axis).view(1, *(size if each == axis else 1 for each in range(3)))
    rows = _cut(sides, window).flatten(4, 6).flatten(0, 3)
    return (rows[:, None] != rows[:, :, None]).to(like.dtype) * _APART


def _fitted(sizes: Sizes, window: Any, shift: Any) -> tuple[Sizes, Sizes]:
    """Window and shift where a video is smaller than the window: all of it is one, which is not shifted."""
    whole = [size <= step for size, step in zip(sizes, window, strict=True)]
    windows = tuple(size if one else step for size, step, one in zip(sizes, window, whole, strict=True))
    return windows, tuple(0 if one else by for by, one in zip(shift, whole, strict=True))


def _wave(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.linspace(-2, 2, count).mul(7 + count % 5).sin().view(shape)
