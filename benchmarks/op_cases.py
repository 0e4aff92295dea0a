"""All cases of the ops' benchmark."""

from __future__ import annotations

from op_case import TOKENS, OpCase
from op_cases_attention import attention_cases, tiny_attention_cases
from op_cases_conv import conv_cases, tiny_conv_cases
from op_cases_linear import all_linear_cases, tiny_linear_cases
from op_cases_norms import norm_cases


def all_cases() -> list[OpCase]:
    """Those of the published run."""
    norms = [case for tokens, size in ((TOKENS, 3072), (TOKENS, 2048), (1024, 3072)) for case in norm_cases(tokens, size)]
    return [*norms, *attention_cases(), *conv_cases(), *all_linear_cases()]


def named(cases: list[OpCase], wanted: list[str] | None) -> list[OpCase]:
    """Those whose op or whole name is wanted; all for None."""
    return [case for case in cases if not wanted or case.name in wanted or case.name.split("-")[0] in wanted]


def tiny_cases() -> list[OpCase]:
    """One of each op, small enough for a CPU."""
    return [*norm_cases(8, 32), *tiny_attention_cases(), *tiny_conv_cases(), *tiny_linear_cases()]
