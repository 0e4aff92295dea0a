"""Which kinds of modules are fused where nobody says: those that measure faster, or smaller, than what they replace."""

from __future__ import annotations

from gpupipe.train.switches import KINDS

SLOWER: dict[str, str] = {}
"""Kinds that are off by default, each with what was measured."""


def on() -> tuple[str, ...]:
    """The kinds that are on."""
    return tuple(kind for kind in KINDS if kind not in SLOWER)
