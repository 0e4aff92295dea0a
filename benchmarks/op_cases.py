"""All cases of the ops' benchmark."""

from __future__ import annotations

from op_case import TOKENS, OpCase
from op_cases_norms import norm_cases


def all_cases() -> list[OpCase]:
    """Those of the published run."""
    return [case for tokens, size in ((TOKENS, 3072), (TOKENS, 2048), (1024, 3072)) for case in norm_cases(tokens, size)]


def tiny_cases() -> list[OpCase]:
    """One of each op, small enough for a CPU."""
    return norm_cases(8, 32)
