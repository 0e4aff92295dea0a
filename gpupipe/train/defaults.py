"""Which kinds of modules are fused where nobody says: all but those that measured slower than what they replace.

What measured slower is written below by ``python benchmarks/fuse_defaults.py``, from the results of the benchmarks.
"""

from __future__ import annotations

import re

import torch

# measured:begin
SLOWER: dict[str, dict[str, str]] = {}
# measured:end
"""Of each GPU that was measured the kinds that are off there, with what was measured."""


def slower(gpu: str | None = None) -> dict[str, str]:
    """The kinds that are off by default on a GPU, each with what was measured.

    Args:
        gpu: its name as in the result files, such as ``h200``; None: the current one. Without one nothing is off.
    """
    if gpu is None and torch.cuda.is_available():
        gpu = slug(torch.cuda.get_device_name())
    return SLOWER.get(gpu or "", {})


def slug(name: str) -> str:
    """A GPU's name as result files have it: ``NVIDIA H200`` is ``h200``."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return re.sub(r"^nvidia-(geforce-)?", "", words)
