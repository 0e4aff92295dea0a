"""What all attentions share: projections, norms of queries and keys, turning, attention itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.ops.packed import Packed, unpack
from gpupipe.ops.rope import Rope
from gpupipe.ops.sdpa import attend
from gpupipe.train.layout import joining_pays
from gpupipe.train.parts.norms import eps_for, norm_kind, norm_size
from gpupipe.train.parts.probe import plain

Sides = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def headed(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(..., heads * dim) as (..., heads, dim)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)  # no -1: there may be no clips


def project(x: torch.Tensor, layers: tuple[Any, Any, Any], heads: int, *, packed: bool) -> Packed:
    """Queries, keys and values of x (B, N, K) by three layers, joined where that pays and they are plain."""
    joinable = all(plain(layer) for layer in layers) and len({layer.weight.shape for layer in layers}) == 1
    width = layers[0].weight.shape[0] if joinable else 0
    gradients = torch.is_grad_enabled() and joinable and layers[0].weight.requires_grad
    if joinable and joining_pays(x.shape[:-1].numel(), width, packed=packed, gradients=gradients):
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return ops.qkv_linear(x, weights, biases, heads=heads, packed=True)  # type: ignore[return-value]
    q, k, v = (headed(layer(x), heads) for layer in layers)
    return q, k, v


def norm_over(norm: Any, heads: int, dim: int) -> str | None:
    """What a norm of queries or keys is: ``"rms head"``, ``"layer full"`` and so on, ``"none"``; None for anything else."""
    if norm is None or isinstance(norm, nn.Identity):
        return "none"
    kind = norm_kind(norm)
    size = norm_size(norm) if kind is not None else None
    over = {dim: "head", heads * dim: "full"}.get(size or 0)
    return None if kind is None or over is None else f"{kind} {over}"


def normed_and_turned(
    qkv: Packed,
    norm: str,
    norm_q: Any,
    norm_k: Any,
    rope: Rope | None,
    grid: tuple[int, ...] | None,
    text: tuple[int, int] = (0, 0),
) -> Sides:
    """Queries and keys normalised and turned; ``norm`` as :func:`norm_over` says it."""
    if norm == "none" and rope is None:
        return unpack(qkv)
    if norm.startswith("layer"):
        q, k, v = unpack(qkv)
        q, k = (one_norm(side, norm, module) for side, module in ((q, norm_q), (k, norm_k)))
        if rope is None:
            return q, k, v
        qkv, norm = (q, k, v), "none"
    if norm == "none":
        return ops.qk_norm_rope(qkv, None, None, rope, grid=grid, norm=None, text=text)
    x = qkv if isinstance(qkv, torch.Tensor) else qkv[0]
    q_weight, k_weight = norm_q.weight, norm_k.weight
    return ops.qk_norm_rope(
        qkv, q_weight, k_weight, rope, grid=grid, norm="full" if norm.endswith("full") else "head", text=text,
        eps=eps_for(norm_q, x),
    )  # fmt: skip


def one_norm(x: torch.Tensor, norm: str, module: Any) -> torch.Tensor:
    """Queries or keys (B, N, heads, dim) normalised."""
    if norm == "none":
        return x
    flat = x.flatten(2) if norm.endswith("full") else x
    if norm.startswith("layer"):
        made = ops.layer_norm(flat, module.weight, module.bias, eps=eps_for(module, x))
    else:
        made = ops.rms_norm(flat, module.weight, eps=eps_for(module, x))
    return made.view(x.shape)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of (B, N, heads, dim) to keys and values (B, M, heads, dim): (B, N, heads * dim)."""
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    bias = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    return attend(q, k, v, bias, causal=False, scale=q.shape[-1] ** -0.5).transpose(1, 2).flatten(2)


def fits(mask: torch.Tensor | None, batch: int, keys: int) -> bool:
    """True for no mask, or one (batch or 1, heads or 1, queries or 1, keys)."""
    return mask is None or (mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[-1] == keys)
