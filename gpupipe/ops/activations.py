"""Activations and their slopes, for kernels and in plain torch: SiLU, and GELU in its exact and its tanh form.

Formulas: SiLU is z * sigmoid(z) (Elfwing et al. 2017), GELU is z * Phi(z) with the normal distribution's Phi (Hendrycks and
Gimpel 2016), whose tanh form is z * sigmoid(2u) with u = sqrt(2 / pi) * (z + 0.044715 z^3).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from gpupipe.device.jit import jit, tl
from gpupipe.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh"]
NAMES = ("silu", "gelu", "gelu_tanh")


def known(activation: str | None) -> str:
    """The activation as kernels name it: ``"none"`` for None.

    Raises:
        ConfigError: for one that does not exist.
    """
    if activation is None:
        return "none"
    if activation not in NAMES:
        raise ConfigError(f"activation is {activation!r}", fix=f"choose one of {', '.join(map(repr, NAMES))}, or None")
    return activation


def apply(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation in plain torch."""
    if activation == "silu":
        return functional.silu(z)
    if activation == "none":
        return z
    return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


@jit
def _twice_u(z):
    return 1.5957691216057308 * z * (1.0 + 0.044715 * z * z)


@jit
def activate(z, ACT: tl.constexpr):
    """The activation of float32 values."""
    if ACT == "silu":
        z = z * tl.sigmoid(z)
    elif ACT == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(0.7071067811865476 * z))
    elif ACT == "gelu_tanh":
        z = z * tl.sigmoid(_twice_u(z))
    return z


@jit
def slope(z, ACT: tl.constexpr):
    """The activation's derivative at float32 values."""
    if ACT == "silu":
        gate = tl.sigmoid(z)
        found = gate + z * gate * (1.0 - gate)
    elif ACT == "gelu":
        found = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        gate = tl.sigmoid(_twice_u(z))
        found = gate + z * gate * (1.0 - gate) * (1.5957691216057308 + 0.21406444881780073 * z * z)
    return found
