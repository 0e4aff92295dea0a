"""Bias, activation, dropout, gate and residual in one pass over memory."""

from __future__ import annotations

import torch

from gpupipe.ops import activations, checks, settings
from gpupipe.ops.activation import reference
from gpupipe.ops.activation.op import act_op
from gpupipe.ops.activations import AnyActivation
from gpupipe.ops.dropout import drawn_seed
from gpupipe.ops.modulation import modulations
from gpupipe.ops.settings import Precision

_MOST_ROWS = 2**31 - 2**16
"""Rows are counted in 32 bits."""


def bias_act_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: AnyActivation | None = None,
    gate: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    precision: Precision | None = None,
) -> torch.Tensor:
    """residual + gate * dropout(act(x + bias)), each part only if given.

    Dropout draws from torch's generator of the device, as in :func:`gpupipe.ops.dropout_add_norm`. On the CPU, for float64 and
    for 2³¹ rows it is plain torch. Second derivatives are not offered.

    Args:
        x: (..., C), float32, bfloat16, float16 or float64, any strides; (..., 2C) for ``"geglu"``, ``"geglu_tanh"`` and
            ``"swiglu"``, which multiply the first C columns by the activation of the last.
        bias: (C,) or (2C,), one value a column of x.
        residual: (..., C), any floating type.
        activation: ``"gelu"`` (by the error function), ``"gelu_tanh"``, ``"silu"``, a gated one, or None.
        gate: (C,), one row a sample (B, C) or (B, 1, C), one a token (..., C), or for any other number of leading dimensions.
        p: the share that is dropped, 0 to 1; the rest is divided by 1 - p.
        training: False: nothing is dropped.
        precision: see :func:`gpupipe.ops.precision`; ``"fast"`` adds nothing here; gradients keep float32 within in all
            modes.

    Returns:
        (..., C), of the residual's type, else of that of x.

    Raises:
        ShapeError: when an argument does not fit x.
        ConfigError: for another ``activation``, or a ``p`` that is no share.
    """
    act = activations.known(activation, gated=True)
    _, glu = activations.split(act)
    checks.share(p)
    checks.floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0 or (glu and x.shape[-1] % 2):
        raise checks.refuse("x", x, f"(..., 2C) with columns, for {act}" if glu else "(..., C) with at least one column")
    checks.vector("bias", bias, x.shape[-1], x)
    half = x[..., : x.shape[-1] // 2] if glu else x
    if residual is not None:
        checks.same_shape("residual", residual, half, "the result")
    gate = modulations(half, gate=gate)[0] if gate is not None else None
    return act_pass(
        "bias_act_dropout_add", x, bias, gate, residual, p if training else 0.0, act, settings.mode(precision) == "conservative"
    )  # fmt: skip


def act_pass(
    name: str,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    act: str,
    conservative: bool,
) -> torch.Tensor:
    """The pass for arguments that fit, by the kernel or by its twin; gate is (M, C)."""
    if not served(name, x):
        return reference.bias_act(x, bias, gate, residual, p, act, conservative)
    seed = drawn_seed(x.device) if p > 0 else None
    return act_op(x, bias, gate, residual, seed, p, act, conservative)  # type: ignore[no-any-return]


def served(name: str, x: torch.Tensor) -> bool:
    """True when the kernel takes rows such as those of x, and nobody asked for its twin."""
    return settings.kernel_runs(name, x) and x.shape[:-1].numel() < _MOST_ROWS
