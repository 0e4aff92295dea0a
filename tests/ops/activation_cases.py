"""How far an activation is off, at any number that its type has."""

from __future__ import annotations

import torch

from gpupipe.device.jit import interpreted
from gpupipe.ops import bias_act_dropout_add


def numbers(dtype: torch.dtype, device: str) -> torch.Tensor:
    """All numbers of a narrow type, and a sample of float32 that is dense where activations bend."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    wide = torch.logspace(-38, 38, 2001, dtype=torch.float64, device=device).float()
    special = torch.tensor([0.0, torch.inf, torch.nan], device=device)
    half = torch.cat([torch.linspace(0, 100, 20001, device=device), wide, special])
    return torch.cat([half, -half])


def check_everywhere(act: str, dtype: torch.dtype, device: str) -> None:
    """Within the digits of float32 and the type's rounding of z * sigmoid(u); infinite or no number where that is.

    u is off by a few of its own last digits, which are what exp makes a factor of. What is below 1e-36 may be 0.
    """
    z = numbers(dtype, device)
    wide = z.double()
    u = wide if act == "silu" else wide * (1.5957691216057308 + 0.07135481627159936 * wide * wide)
    right = wide * torch.sigmoid(u)
    found = bias_act_dropout_add(z, activation=act).double()  # type: ignore[arg-type]
    assert torch.equal(found.isnan(), right.isnan())
    ordinary = right.abs() < torch.finfo(dtype).max
    assert torch.equal(found[right.isinf()], right[right.isinf()])
    off = (found - right)[ordinary].abs()
    rounding = torch.finfo(dtype).eps * (1 if interpreted() and dtype == torch.bfloat16 else 0.5)
    allowed = right[ordinary].abs() * (rounding + torch.finfo(torch.float32).eps * (4 + 2 * u[ordinary].abs().clamp(max=100)))
    assert (off - allowed).max() <= max(1e-36, torch.finfo(dtype).smallest_normal * rounding)
