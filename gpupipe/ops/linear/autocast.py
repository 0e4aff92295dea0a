"""What ``torch.autocast`` asks of a linear op: the types that ``linear`` would work in."""

from __future__ import annotations

import torch


def cast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in autocast's type, where autocast holds on the first one's device."""
    first = tensors[0]
    assert first is not None
    return [None if value is None else value.to(type_of(value, first.device)) for value in tensors]


def cast_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a layer in autocast's type."""
    made, shift = cast(weight, bias)
    assert made is not None
    return made, shift


def type_of(value: torch.Tensor, device: torch.device) -> torch.dtype:
    """The type in which a product on a device takes a tensor: its own, or autocast's; float64 is left alone, as torch does."""
    if value.dtype == torch.float64 or not torch.is_autocast_enabled(device.type):
        return value.dtype
    return torch.get_autocast_dtype(device.type)
