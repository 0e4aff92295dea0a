"""Activations on a GPU, whose exponentials and roots are its own."""

from __future__ import annotations

import pytest
import torch
from activation_cases import check_everywhere

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_has_its_activation(act: str, dtype: torch.dtype) -> None:
    check_everywhere(act, dtype, "cuda")
