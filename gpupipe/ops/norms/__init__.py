"""Norms and what stands around them in a transformer block: residual, gate, dropout and modulation, each in one pass.

All keep float32 within, whatever the input's type; ``y`` and the new residual have the type of ``x``, also under autocast. Rows
are the last dimension, H; there may be any number of leading ones, in any strides. On the CPU, for float64 and for rows longer
than 16 384 they are plain torch. So are plain norms of a few million elements on a GPU: torch's own kernels finish before ours
are found. Gradients repeat bit for bit; second derivatives are not offered.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from gpupipe.errors import ConfigError
from gpupipe.ops import checks, settings
from gpupipe.ops.dropout import drawn_seed
from gpupipe.ops.layout import MOST_ROWS
from gpupipe.ops.modulation import modulations
from gpupipe.ops.norms import reference
from gpupipe.ops.norms.op import norm_op
from gpupipe.ops.norms.tiles import LARGEST
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import cut, is_sharded, replicated
from gpupipe.ops.sharded.norms import rms_norms

Kind = Literal["layer", "rms"]

SMALL = 2**22
"""Elements up to which torch's own plain norms are faster than any call that goes through Python to its kernel."""


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    precision: Precision | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba, Kiros, Hinton 2016).

    Args:
        x: (..., H), float32, bfloat16, float16 or float64.
        weight: (H,), any floating type.
        bias: (H,).
        precision: see :func:`gpupipe.ops.precision`; all modes round here alike.

    Returns:
        Like x.

    Raises:
        ShapeError: when an argument does not fit x.
    """
    return _norm("layer_norm", x, weight=weight, bias=bias, eps=eps, kind="layer", precision=precision)[0]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, precision: Precision | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: (..., H), float32, bfloat16, float16 or float64.
        weight: (H,), any floating type. A DTensor split by rows: x is this rank's columns, the norm goes over all ranks'.
        precision: see :func:`gpupipe.ops.precision`; all modes round here alike.

    Returns:
        Like x.

    Raises:
        ShapeError: when an argument does not fit x.
    """
    if is_sharded(weight) and cut("weight", weight).by == "rows":
        return rms_norms([(x, weight)], eps)[0]
    return _norm("rms_norm", x, weight=weight, eps=eps, kind="rms", precision=precision)[0]


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    kind: Kind = "layer",
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + branch, and that sum: the residual that goes on.

    Args:
        x: (..., H), the residual that came in.
        branch: the same shape, what the block made of it.
        weight, bias: (H,).
        gate, scale, shift: any of those of :func:`gate_add_modulate_norm`, which wants all of them but the shift.
        kind: ``"layer"`` or ``"rms"``.
        precision: see :func:`gpupipe.ops.precision`.

    Returns:
        The normalised sum and the sum, both like x.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for another ``kind``.
    """
    checks.same_shape("branch", branch, x)
    return _norm(
        "add_norm", x, branch, gate=gate, weight=weight, bias=bias, scale=scale, shift=shift, eps=eps, kind=kind,
        precision=precision,
    )  # fmt: skip


def dropout_add_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    p: float,
    training: bool = True,
    kind: Kind = "layer",
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + dropout(branch), and that sum.

    Which elements are dropped comes from torch's generator of the device, so it repeats under ``torch.manual_seed`` and in a
    recomputed checkpoint, and changes with each replay of a CUDA graph.

    Args:
        x: (..., H), the residual that came in.
        branch: the same shape.
        weight, bias: (H,).
        p: the share that is dropped, 0 to 1; the rest is divided by 1 - p.
        training: False: nothing is dropped.
        kind: ``"layer"`` or ``"rms"``.
        precision: see :func:`gpupipe.ops.precision`.

    Returns:
        The normalised sum and the sum, both like x.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for another ``kind``, or a ``p`` that is no share.
    """
    checks.share(p)
    checks.same_shape("branch", branch, x)
    return _norm(
        "dropout_add_norm", x, branch, p=p if training else 0.0, weight=weight, bias=bias, eps=eps, kind=kind,
        precision=precision,
    )  # fmt: skip


def modulate_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    kind: Kind = "layer",
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift: adaptive layer norm as diffusion transformers use it (Peebles and Xie 2023).

    Args:
        x: (..., H).
        scale: one row for all (H,), one a sample (B, H) or (B, 1, H) for x (B, ..., H), one a token (like x), or for any other
            number of leading dimensions of x.
        shift: the same choice; None adds nothing.
        weight, bias: (H,), of the norm itself; most such models have none.
        kind: ``"layer"`` or ``"rms"``.
        precision: see :func:`gpupipe.ops.precision`.

    Returns:
        Like x.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for another ``kind``.
    """
    checks.floating("scale", scale, like=x)
    return _norm(
        "modulate_norm", x, scale=scale, shift=shift, weight=weight, bias=bias, eps=eps, kind=kind, precision=precision
    )[0]  # fmt: skip


def gate_add_modulate_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    kind: Kind = "layer",
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modulated norm of x + gate * branch, and that sum: the end of one block and the start of the next.

    Args:
        x: (..., H), the residual that came in.
        branch: the same shape.
        gate, scale, shift: as in :func:`modulate_norm`.
        weight, bias: (H,), of the norm itself.
        kind: ``"layer"`` or ``"rms"``.
        precision: see :func:`gpupipe.ops.precision`.

    Returns:
        The modulated norm and the sum, both like x.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for another ``kind``.
    """
    checks.same_shape("branch", branch, x)
    checks.floating("gate", gate, like=x)
    checks.floating("scale", scale, like=x)
    return _norm(
        "gate_add_modulate_norm", x, branch, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias, eps=eps, kind=kind,
        precision=precision,
    )  # fmt: skip


def _small(x: torch.Tensor, *of_columns: torch.Tensor | None) -> bool:
    """True where torch's own plain norm does the same, sooner. Under autocast it would answer in float32."""
    if not x.is_cuda or x.numel() > SMALL or torch.is_autocast_enabled("cuda"):
        return False
    return all(value is None or value.dtype == x.dtype for value in of_columns)


def _norm(
    name: str,
    x: torch.Tensor,
    branch: torch.Tensor | None = None,
    *,
    gate: torch.Tensor | None = None,
    p: float = 0.0,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float,
    kind: Kind,
    precision: Precision | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.refuse("x", x, "(..., H) with at least one column")
    eps = checks.epsilon(eps)
    if kind not in ("layer", "rms"):
        raise ConfigError(f"kind is {kind!r}", fix="choose 'layer' or 'rms'")
    if is_sharded(weight) or is_sharded(bias):
        weight, bias = replicated("weight", weight), replicated("bias", bias)
    checks.vector("weight", weight, x.shape[-1], x)
    checks.vector("bias", bias, x.shape[-1], x)
    if gate is not None or scale is not None or shift is not None:
        gate, scale, shift = modulations(x, gate=gate, scale=scale, shift=shift)
    conservative = settings.mode(precision) == "conservative"
    if not settings.kernel_runs(name, x) or x.shape[-1] > LARGEST or x.shape[:-1].numel() > MOST_ROWS:
        if branch is not None and p > 0:
            branch = functional.dropout(branch, p)
        return reference.norm(
            x, branch, gate, weight, bias, scale, shift, eps=eps, rms=kind == "rms", conservative=conservative
        )  # fmt: skip
    if branch is None and gate is None and scale is None and shift is None and _small(x, weight, bias):
        if kind == "layer":
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps), x
        if bias is None:
            return functional.rms_norm(x, x.shape[-1:], weight, eps), x
    seed = drawn_seed(x.device) if p > 0 else None
    y, total, _, _ = norm_op(x, branch, gate, seed, p, weight, bias, scale, shift, eps, kind == "rms", conservative)
    return y, total
