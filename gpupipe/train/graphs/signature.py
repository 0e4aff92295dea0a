"""What calls must have in common to share a graph, and their tensors taken out of what they were given in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Kinds of which equal ones are the same to a graph. Any other object is told by its identity."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def apart(value: Any, found: list[torch.Tensor]) -> Hashable:
    """The structure of a value; its tensors are appended to ``found``, in order."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _kind(value)
    if isinstance(value, Mapping):
        return type(value), tuple((name, apart(part, found)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(apart(part, found) for part in value)
    if isinstance(value, _VALUES):
        return type(value), value
    return type(value), id(value)


def together(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A value of the same structure, with other tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        parts = {name: together(part, tensors) for name, part in value.items()}
        like = getattr(value, "like", None)  # a batch keeps what goes with its tensors
        return like(parts) if like is not None else parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        made = [together(part, tensors) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def plain(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether all are ordinary tensors of this device."""
    return all(type(tensor) in _PLAIN and tensor.device == device for tensor in tensors)


def _kind(tensor: torch.Tensor) -> Hashable:
    """Of a parameter its place too: a graph reads it where it is, of any other tensor it reads a copy."""
    place = tensor.data_ptr() if isinstance(tensor, torch.nn.Parameter) else None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, place


def surroundings(device: torch.device) -> Hashable:
    """What besides its arguments decides what a call does: gradients, autocast, determinism."""
    autocast = torch.is_autocast_enabled(device.type)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(device.type) if autocast else None,
        torch.are_deterministic_algorithms_enabled(),
    )
