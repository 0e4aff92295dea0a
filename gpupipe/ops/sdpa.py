"""torch's attention on strided views: the backend that suits a shape, and a way around the known faults of each."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpupipe.device import autotune
from gpupipe.device.stream import is_cuda_fault
from gpupipe.ops.layout import bucket
from gpupipe.ops.op import watched

_CUDNN, _FLASH, _EFFICIENT, _MATH = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip
_BACKENDS = (_CUDNN, _FLASH, _EFFICIENT, _MATH)
_MOST_SAMPLES = 65535
"""Samples, or heads, that a launch takes: they are dimensions of grids."""
_MOST_ADDRESSED = 2**31
"""Elements that the backward of flash attention can address, rows rounded up to 128 and columns to 32."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of (B, heads, S, dim), in any strides with contiguous columns.

    Args:
        bias: broadcasts to (B, heads, S, keys): added to scores, or bool, true where seen; None.
    """
    if q.device.type != "cuda" or q.numel() == 0:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    order = _order(q, k, v, bias, causal, scale)
    most = min(_MOST_SAMPLES, flash_samples(q, k)) if order[0] == _FLASH else _MOST_SAMPLES
    if order[0] != _FLASH and flash_samples(q, k) < q.shape[0]:
        order = [backend for backend in order if backend != _FLASH]
    parts = []
    with sdpa_kernel(order, set_priority=True):
        if q.shape[0] <= most:  # not as a slice of all: its backward would fill and copy each gradient once more
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
        for at in range(0, q.shape[0], most):
            own = slice(at, at + most)
            own_bias = bias[own] if bias is not None and bias.dim() == 4 and bias.shape[0] > 1 else bias
            parts.append(
                scaled_dot_product_attention(q[own], k[own], v[own], attn_mask=own_bias, is_causal=causal, scale=scale)
            )  # fmt: skip
    return torch.cat(parts)


def flash_samples(q: torch.Tensor, k: torch.Tensor) -> int:
    """Samples that the backward of flash attention takes at a time; at least 1."""
    longest = max(q.shape[2], k.shape[2])
    each = q.shape[1] * (-(-longest // 128) * 128) * max(q.shape[3], 32)
    return max(1, (_MOST_ADDRESSED - 1) // each)


def _order(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> list[SDPBackend]:
    """Backends in the order in which to try them: the fastest measured first, else by rule."""
    order = preferred(q.dtype, q.shape[3], k.shape[1], bias is not None, torch.cuda.get_device_capability(q.device))
    if watched(q, k, v, bias):
        return order
    params = torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, causal, False)
    able = {
        _CUDNN: torch.backends.cuda.can_use_cudnn_attention,
        _FLASH: torch.backends.cuda.can_use_flash_attention,
        _EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
    }
    order = [backend for backend in order if backend == _MATH or able[backend](params)]
    candidates = [{"BACKEND": _BACKENDS.index(backend)} for backend in order if backend != _MATH]
    if len(candidates) < 2:
        return order
    needed = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)

    def run(config: autotune.Config) -> None:
        few = min(q.shape[0], flash_samples(q, k), _MOST_SAMPLES)
        with (
            torch.enable_grad() if needed else torch.no_grad(),
            # The caller may keep what is saved elsewhere, or make it again, as checkpoints do: not for what is timed.
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
            sdpa_kernel([_BACKENDS[config["BACKEND"]]]),
        ):
            sides = [side[:few].detach().requires_grad_(needed) for side in (q, k, v)]
            own_bias = bias[:few] if bias is not None and bias.dim() == 4 and bias.shape[0] > 1 else bias
            try:
                out = scaled_dot_product_attention(
                    sides[0], sides[1], sides[2], attn_mask=own_bias, is_causal=causal, scale=scale
                )  # fmt: skip
                if needed:
                    torch.autograd.grad(out, sides, out.detach())
            except RuntimeError as error:  # a backend may refuse what it said it could do
                if is_cuda_fault(error) or isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                raise autotune.DoesNotFit(str(error)) from error

    size = [bucket(value) for value in (q.shape[0], q.shape[1], q.shape[2], k.shape[2])]
    key = (str(q.dtype), *size, q.shape[3], bias is not None, causal, needed)
    ranks = {_BACKENDS.index(backend): float(place) for place, backend in enumerate(order)}
    first = autotune.choose("attention", key, q.device, lambda: candidates, lambda config: ranks[config["BACKEND"]], run)
    best = _BACKENDS[first["BACKEND"]]
    return [best, *(backend for backend in order if backend != best)]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def preferred(dtype: torch.dtype, dim: int, heads: int, biased: bool, capability: tuple[int, int]) -> list[SDPBackend]:
    """The order by rule. cuDNN leads from Hopper on; with a bias its backward may give NaN, and flash takes none."""
    if dtype not in (torch.float16, torch.bfloat16) or biased:
        return [_EFFICIENT, _MATH] if heads <= _MOST_SAMPLES else [_MATH]
    if capability >= (9, 0) and dim <= 128 and dim % 8 == 0:
        return [_CUDNN, _FLASH, _EFFICIENT, _MATH]
    return [_FLASH, _CUDNN, _EFFICIENT, _MATH]


def along_time(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frames: int,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of (B, N, heads, dim) along its ``frames``, a sample at a time: so all stay views."""
    visible = None
    if mask is not None:
        visible = mask[:, None, :] & torch.ones(frames, frames, dtype=torch.bool, device=q.device).tril(0 if causal else frames)
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | (blind & torch.eye(frames, dtype=torch.bool, device=q.device))  # a backward would make NaN of none
    made = []
    for at in range(q.shape[0]):
        q_rows, k_rows, v_rows = (side[at].unflatten(0, (frames, -1)).permute(1, 2, 0, 3) for side in (q, k, v))
        bias = None if visible is None else visible[at, None, None]
        out = attend(q_rows, k_rows, v_rows, bias, causal=causal and bias is None, scale=scale)
        if visible is not None:
            out = out.masked_fill(blind[at], 0.0)
        made.append(out.permute(2, 0, 1, 3).flatten(0, 1))
    return torch.stack(made) if len(made) != 1 else made[0][None]
