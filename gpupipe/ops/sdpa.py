"""torch's attention on strided views: the backend that suits a shape, and a way around the known faults of each.

Backends are called by their own names. ``sdpa_kernel()`` sets flags of the whole process: another thread that attends
meanwhile, as a preparation does beside training, would be given the backend of this one, and two that leave its block in
another order than they entered it would leave a choice behind for good.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpupipe.device import autotune
from gpupipe.device.stream import is_cuda_fault
from gpupipe.ops.layout import bucket
from gpupipe.ops.linear.autocast import cast
from gpupipe.ops.op import watched

_CUDNN, _FLASH, _EFFICIENT, _MATH = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip
_BACKENDS = (_CUDNN, _FLASH, _EFFICIENT, _MATH)
_MOST_SAMPLES = 65535
"""Samples, or heads, that a launch takes: they are dimensions of grids."""
_MOST_ADDRESSED = 2**31
"""Elements that the backward of flash attention can address, rows rounded up to 128 and columns to 32."""
_ROW_STEP = 8
"""Elements by which rows of a bias lie apart, for the memory-efficient kernel."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of (B, heads, S, dim), in any strides with contiguous columns.

    Args:
        bias: broadcasts to (B, heads, S, keys): added to scores, or bool, true where seen; None.
    """
    if q.device.type != "cuda" or q.numel() == 0 or k.numel() == 0:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    if watched(q, k, v, bias):
        order = preferred_for(q, k, bias)
        if order[0] != _FLASH and flash_samples(q, k) < q.shape[0]:
            order = [backend for backend in order if backend != _FLASH]
        backend, call = order[0], partial(_as_ever, order)
    else:
        q, k, v = (side for side in cast(q, k, v) if side is not None)
        backend = _best(q, k, v, bias, causal, scale)
        call = partial(by_name, backend)
    most = min(_MOST_SAMPLES, flash_samples(q, k)) if backend == _FLASH else _MOST_SAMPLES
    if q.shape[0] <= most:  # not as a slice of all: its backward would fill and copy each gradient once more
        return call(q, k, v, bias, causal, scale)
    parts = []
    for at in range(0, q.shape[0], most):
        own = slice(at, at + most)
        parts.append(call(q[own], k[own], v[own], _of_samples(bias, own), causal, scale))
    return torch.cat(parts)


def _as_ever(
    order: list[SDPBackend],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """For those who look on: tracers, modes and subclasses, which know the public function; they run beside no other."""
    with sdpa_kernel(order, set_priority=True):
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)


def by_name(
    backend: SDPBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """What ``scaled_dot_product_attention`` does once it has chosen a backend; arguments as of :func:`attend`.

    Only what :func:`preferred` has for such arguments: flash and cuDNN take no bias here, and only multiples of 8 columns.
    """
    needed = _with_gradients(q, k, v)
    out: torch.Tensor
    if backend == _CUDNN:
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, needed, 0.0, causal, False, scale=scale)[0]
    elif backend == _FLASH:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
    else:
        if bias is not None and bias.dtype == torch.bool:
            bias = q.new_zeros(()).masked_fill(~bias, float("-inf"))
        if backend == _EFFICIENT:
            bias = _aligned(bias, (*q.shape[:3], k.shape[2])) if bias is not None else None
            out = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, needed, 0.0, causal, scale=scale)[0]
        else:
            out = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, scale=scale)[0]
    return out


def _aligned(bias: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A bias of this shape whose rows start where the memory-efficient kernel can load them."""
    whole = bias.stride(-1) == 1 and all(step % _ROW_STEP == 0 for step in bias.stride()[:-1])
    if not whole:
        columns = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -columns % _ROW_STEP))[..., :columns]
    return bias.expand(shape)


def _of_samples(bias: torch.Tensor | None, own: slice) -> torch.Tensor | None:
    """The bias of some of the samples: its part, where each has one of its own."""
    return bias[own] if bias is not None and bias.dim() == 4 and bias.shape[0] > 1 else bias


def _with_gradients(*tensors: torch.Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def flash_samples(q: torch.Tensor, k: torch.Tensor) -> int:
    """Samples that the backward of flash attention takes at a time; at least 1."""
    longest = max(q.shape[2], k.shape[2])
    each = q.shape[1] * (-(-longest // 128) * 128) * max(q.shape[3], 32)
    return max(1, (_MOST_ADDRESSED - 1) // each)


def _best(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> SDPBackend:
    """The fastest measured of the backends that take these, else the first one by rule."""
    params = torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, causal, False)
    able = {
        _CUDNN: torch.backends.cuda.can_use_cudnn_attention,
        _FLASH: torch.backends.cuda.can_use_flash_attention,
        _EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
    }
    order = [backend for backend in preferred_for(q, k, bias) if backend == _MATH or able[backend](params)]
    candidates = [{"BACKEND": _BACKENDS.index(backend)} for backend in order if backend != _MATH]
    if len(candidates) < 2:
        return order[0]
    needed = _with_gradients(q, k, v)

    def run(config: autotune.Config) -> None:
        few = min(q.shape[0], flash_samples(q, k), _MOST_SAMPLES)
        with (
            torch.enable_grad() if needed else torch.no_grad(),
            # The caller may keep what is saved elsewhere, or make it again, as checkpoints do: not for what is timed.
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
        ):
            sides = [side[:few].detach().requires_grad_(needed) for side in (q, k, v)]
            own_bias = _of_samples(bias, slice(few))
            try:
                out = by_name(_BACKENDS[config["BACKEND"]], sides[0], sides[1], sides[2], own_bias, causal, scale)
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
    return _BACKENDS[first["BACKEND"]]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def preferred_for(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> list[SDPBackend]:
    """The order by rule for such queries and keys on a GPU."""
    capability = torch.cuda.get_device_capability(q.device)
    return preferred(q.dtype, q.shape[3], k.shape[1], bias is not None, capability)


def preferred(dtype: torch.dtype, dim: int, heads: int, biased: bool, capability: tuple[int, int]) -> list[SDPBackend]:
    """The order by rule. cuDNN leads from Hopper on; with a bias its backward may give NaN, and flash takes none."""
    if dtype not in (torch.float16, torch.bfloat16) or biased:
        return [_EFFICIENT, _MATH] if heads <= _MOST_SAMPLES else [_MATH]
    if dim % 8 != 0:  # flash would have to be given a padded copy
        return [_EFFICIENT, _MATH] if heads <= _MOST_SAMPLES else [_MATH]
    if capability >= (9, 0) and dim <= 128:
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
