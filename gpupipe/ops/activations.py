"""Activations and their slopes, for kernels and in plain torch.

Formulas: SiLU is z * sigmoid(z) (Elfwing et al. 2017), GELU is z * Phi(z) with the normal distribution's Phi (Hendrycks and
Gimpel 2016), whose tanh form is z * sigmoid(2u) with u = sqrt(2 / pi) * (z + 0.044715 z^3). The gated ones (Shazeer 2020) take
the value from the first half of the columns and multiply it by the activation of the second.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from gpupipe.device.jit import jit, tl
from gpupipe.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh"]
AnyActivation = Literal["silu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
PLAIN = ("silu", "gelu", "gelu_tanh")
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""What the second half of the columns goes through."""


def known(activation: str | None, *, gated: bool = False) -> str:
    """The activation as kernels name it: ``"none"`` for None.

    Raises:
        ConfigError: for one that does not exist, or a gated one where none may be.
    """
    if activation is None:
        return "none"
    names = (*PLAIN, *GATED) if gated else PLAIN
    if activation not in names:
        raise ConfigError(f"activation is {activation!r}", fix=f"choose one of {', '.join(map(repr, names))}, or None")
    return activation


def split(act: str) -> tuple[str, bool]:
    """What values go through, and whether only the second half of the columns does."""
    return GATED.get(act, act), act in GATED


def apply(z: torch.Tensor, act: str) -> torch.Tensor:
    """A plain activation in torch."""
    if act == "silu":
        return functional.silu(z)
    if act == "none":
        return z
    return functional.gelu(z, approximate="tanh" if act == "gelu_tanh" else "none")


@jit
def _sigmoid(z):
    """sigmoid(z), and its slope without the loss of digits that share * (1 - share) has."""
    e = tl.exp2(tl.abs(z) * -1.4426950408889634)
    near = 1.0 / (1.0 + e)
    return tl.where(z >= 0, near, e * near), e * near * near


@jit
def activated(z, narrow, ACT: tl.constexpr):
    """The activation of float32 values alone, for a forward: ``narrow`` is the type that they come from.

    Where no slope is wanted, 1 / (1 + exp(-u)) has its digits on both sides of zero, down to where exp overflows and the result
    is next to nothing. exp2 is one instruction, where exp also minds results below the normal numbers. So is a reciprocal
    root, and its square is a division but for the last digits, which only float32 shows.
    """
    if ACT == "none" or ACT == "gelu":
        y, _ = curve(z, ACT)
        return y
    else:
        u = z
        if ACT == "gelu_tanh":
            u = z * (1.5957691216057308 + 0.07135481627159936 * z * z)
        below = 1.0 + tl.exp2(u * -1.4426950408889634)
        if narrow == tl.float32:
            return z / below
        else:
            root = tl.rsqrt(below)
            return z * (root * root)


@jit
def curve(z, ACT: tl.constexpr):
    """The activation of float32 values, and its slope."""
    if ACT == "none":
        return z, 1.0
    elif ACT == "gelu":
        share = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        return z * share, share + z * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * z * z)
    elif ACT == "gelu_tanh":
        square = z * z
        share, both = _sigmoid(z * (1.5957691216057308 + 0.07135481627159936 * square))
        return z * share, share + z * (1.5957691216057308 + 0.21406444881479807 * square) * both
    else:
        share, both = _sigmoid(z)
        return z * share, share + z * both
