"""What a case of the ops' benchmark is: inputs at the sizes of video transformers, and subjects that do equal work on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from op_timing import Inputs

Subject = Callable[..., Any]
TOKENS = 32768
"""T 32 x 32 x 32."""


@dataclass(frozen=True)
class OpCase:
    """``{op}-{shape}-{dtype}``.

    ``inputs`` makes tensors by name; ``eager`` is what torch's own ops do, ``gpupipe`` ours, ``peers`` others; the bytes are
    those that must move.
    """

    name: str
    family: str
    inputs: Callable[[torch.device], Inputs]
    gpupipe: Subject
    eager: Subject
    forward_bytes: float
    backward_bytes: float
    peers: dict[str, Callable[[], Subject]] = field(default_factory=dict)
    bare: Subject | None = None
    """The vendor library's product alone, without what the op adds to it; for those that are bound by it."""
    compiled: tuple[str, ...] = ("compile", "compile-nomix")
    """Which ways of compiling eager are tried: mixed-order reductions matter to sums over rows alone."""
    repeatable: bool = True
    """False where outputs are random, so that subjects cannot be compared value by value."""


def random(device: torch.device, *shape: int, grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(grad)


def without(inputs: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}
