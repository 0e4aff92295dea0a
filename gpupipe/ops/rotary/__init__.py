"""Queries and keys normalised and turned by their place on the token grid, in one pass over both."""

from __future__ import annotations

from typing import Literal

import torch

from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import checks, settings
from gpupipe.ops.packed import Packed, unpack
from gpupipe.ops.rope import Rope, grid_of
from gpupipe.ops.rotary import reference
from gpupipe.ops.rotary.op import PackedNormRope, qk_op
from gpupipe.ops.rotary.tiles import LARGEST
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import cut, is_sharded
from gpupipe.ops.sharded.linear import within
from gpupipe.ops.sharded.norms import rms_norms

Norm = Literal["head", "full"]
_NORMS = {None: reference.NONE, "head": reference.HEAD, "full": reference.FULL}


def qk_norm_rope(
    qkv: Packed,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    rope: Rope | None = None,
    *,
    grid: tuple[int, ...] | None = None,
    norm: Norm | None = "head",
    text: tuple[int, int] = (0, 0),
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of queries and keys (Zhang and Sennrich 2019; Dehghani et al. 2023), then rotary embedding (Su et al. 2021).

    On the CPU, for float64 and for more than 16 384 values a token it is plain torch. Gradients repeat bit for bit; second
    derivatives are not offered.

    Args:
        qkv: (B, N, 3, heads, dim) as one product makes it, or (q, k, v), each (B, N, heads, dim); float32, bfloat16, float16 or
            float64, in any strides.
        q_weight, k_weight: of the norms, (dim,) or for ``"full"`` (heads * dim,); both or neither. Replicated DTensors: each
            rank has other heads, and their gradients are summed. For ``"full"`` split by rows as the heads are: the norm goes
            over all ranks' heads.
        rope: tables; None turns nothing.
        grid: of tokens, (T, H, W), in this order; None: a plain sequence.
        norm: ``"head"`` over each head's ``dim``, ``"full"`` over all heads of a token, None for no norm.
        text: how many tokens before and after the grid are normalised but not turned.
        eps: added to the mean of squares.
        precision: see :func:`gpupipe.ops.precision`; conservative rounds between norm and turn.

    Returns:
        Queries and keys (B, N, heads, dim), like qkv, contiguous; and the values: as given, or a view.

    Raises:
        ShapeError: when an argument does not fit qkv.
        ConfigError: for another ``norm``, or weights without a norm.
    """
    q, k, v = unpack(qkv)
    if norm == "full" and is_sharded(q_weight) and cut("q_weight", q_weight).by == "rows":
        q, k = (x.view(q.shape) for x in rms_norms([(q.flatten(2), q_weight), (k.flatten(2), k_weight)], eps))
        return qk_norm_rope((q, k, v), None, None, rope, grid=grid, norm=None, text=text, precision=precision)
    q_weight, k_weight = within(q_weight, k_weight)
    arguments = prepared(q, q_weight, k_weight, rope, grid=grid, norm=norm, text=text, eps=eps, precision=precision)
    tokens, size = q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]
    if not settings.kernel_runs("qk_norm_rope", q) or size > LARGEST or tokens >= 2**31:
        shared = arguments[2:]
        return reference.norm_rope(q, q_weight, *shared), reference.norm_rope(k, k_weight, *shared), v
    if isinstance(qkv, torch.Tensor):
        first, second, *rest = arguments
        if second is first and second is not None:
            second = second.view_as(second)  # the compiler takes no tensor twice
        return PackedNormRope.apply(qkv, None, first, second, *rest)  # type: ignore[no-any-return, no-untyped-call]
    q, k = qk_op(q, k, *arguments)
    return q, k, v


def prepared(
    q: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rope: Rope | None,
    *,
    grid: tuple[int, ...] | None,
    norm: Norm | None,
    text: tuple[int, int],
    eps: float,
    precision: Precision | None,
) -> tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[int], list[int], list[int], int, int, bool, int, float,
    bool,
]:  # fmt: skip
    """The arguments of the op that follow queries and keys, checked against queries (B, N, heads, dim).

    Raises:
        ShapeError: when one does not fit.
        ConfigError: for one that means nothing.
    """
    if norm not in _NORMS:
        raise ConfigError(f"norm is {norm!r}", fix="choose 'head', 'full' or None")
    if (q_weight is None) != (k_weight is None) or (norm is None and q_weight is not None):
        raise ConfigError(
            "weights of queries and keys do not agree with each other or the norm", fix="give both with a norm, or neither"
        )
    size = q.shape[3] * (q.shape[2] if norm == "full" else 1)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            checks.floating(name, weight, like=q)
            if weight.shape != (size,):
                raise checks.refuse(name, weight, f"({size},) for the norm {norm!r} of {tuple(q.shape[2:])}")
    if not isinstance(text, tuple | list) or len(text) != 2:
        raise ShapeError(f"text is {text!r}", fix="give how many tokens come before and after the grid")
    if rope is not None and not isinstance(rope, Rope):
        raise ConfigError(f"rope is a {type(rope).__name__}", fix="make tables with gpupipe.ops.Rope or Rope.of")
    eps = checks.epsilon(eps)
    prefix, suffix = text
    turned = q.shape[1] - prefix - suffix
    if min(prefix, suffix, turned) < 0:
        raise ShapeError(f"text is {text} of {q.shape[1]} tokens", fix="give how many tokens come before and after the grid")
    conservative = settings.mode(precision) == "conservative"
    if rope is None:
        sizes = grid_of(grid, turned)
        return q_weight, k_weight, None, [0, 0, 0], [0, 0, 0], sizes, prefix, suffix, False, _NORMS[norm], eps, conservative
    sizes = rope.fitting(grid, turned, q.shape[3], q)
    if turned == 0:  # all is text: there is no place on the grid to work out
        return q_weight, k_weight, None, [0, 0, 0], [0, 0, 0], [1, 1, 1], prefix, suffix, False, _NORMS[norm], eps, conservative
    return (
        q_weight, k_weight, rope.table, rope.lengths, rope.pairs, sizes, prefix, suffix, rope.interleaved, _NORMS[norm], eps,
        conservative,
    )  # fmt: skip
