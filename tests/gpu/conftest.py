"""What holds for tests on a GPU only."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Timing six ways to launch each kernel at each size would take most of the run. The model's first choice is as right as any,
# and the tests of every tile go through all of them.
os.environ.setdefault("GPUPIPE_AUTOTUNE", "off")

KEPT_BYTES = 1 << 30
SCARCE = 0.5


@pytest.fixture(autouse=True)
def share_the_memory() -> Iterator[None]:
    """Gives back what torch keeps after a large test, and idle decoders where memory is scarce: other processes need it."""
    yield
    import torch

    from gpupipe import free_decoders

    if not torch.cuda.is_available():
        return
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if free < SCARCE * total:
        free_decoders()
