"""What ``torch.autocast`` asks of a linear op: the types that ``linear`` would work in."""

from __future__ import annotations

import torch


def cast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in autocast's type, where autocast holds on the first one's device; float64 is left alone, as torch does."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [value if value is None or value.dtype == torch.float64 else value.to(dtype) for value in tensors]
