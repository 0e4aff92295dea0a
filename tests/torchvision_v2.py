"""torchvision.transforms.v2, where it is installed: the tests' second opinion."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

# Kept, as the operators that it declares go with it.
_library: list[torch.library.Library] = []


def torchvision_v2() -> Any:
    """The module, or a skip of the calling test file where torchvision is not there.

    A torchvision built for CUDA beside a torch that is not cannot load its own operators, and then refuses to be imported for
    want of their names; the transforms need none of them, so the two names that it asks for are declared here.
    """
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision", allow_module_level=True)
    try:
        from torchvision.transforms import v2
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _library.append(library)
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision.transforms import v2
    return v2
