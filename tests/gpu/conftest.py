"""What holds for tests on a GPU only."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Timing six ways to launch each kernel at each size would take most of the run. The model's first choice is as right as any,
# and the tests of every tile go through all of them.
os.environ.setdefault("GPUPIPE_AUTOTUNE", "off")

KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def share_the_memory() -> Iterator[None]:
    """Gives back what torch keeps after a large test: decoders of other processes may need it."""
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
