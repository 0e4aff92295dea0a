"""What calls must have in common to share a graph, and their tensors taken out of what they were given in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpupipe.ops import settings
from gpupipe.train import switches
from gpupipe.types import Batch

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Kinds of which equal ones are the same to a graph."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Batch)


class Opaque(Exception):
    """Of such an object nobody here knows what a graph would have to follow."""


def apart(value: Any, found: list[torch.Tensor]) -> Hashable:
    """The structure of a value; its tensors are appended to ``found``, in order.

    Raises:
        Opaque: for anything but tensors, plain values, and dicts, batches, lists and tuples of these.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _kind(value)
    if type(value) in _MAPPINGS:
        return type(value), tuple((name, apart(part, found)) for name, part in value.items())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value), tuple(apart(part, found) for part in value)
    if type(value) in _VALUES:
        return type(value), value
    raise Opaque(f"a {type(value).__module__}.{type(value).__qualname__}")


def together(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A value of the same structure, with other tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        parts = {name: together(part, tensors) for name, part in value.items()}
        return value.like(parts) if isinstance(value, Batch) else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        made = [together(part, tensors) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def plain(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether all are ordinary tensors of this device, each once."""
    if len({tensor.data_ptr() for tensor in tensors if tensor.numel()}) < sum(tensor.numel() > 0 for tensor in tensors):
        return False  # what is written to the one would have to show in the other
    return all(type(each) in _PLAIN and each.device == device and each.layout == torch.strided for each in tensors)


def _kind(tensor: torch.Tensor) -> Hashable:
    """Of a parameter its place too: a graph reads it where it is, of any other tensor it reads a copy."""
    place = tensor.data_ptr() if isinstance(tensor, torch.nn.Parameter) else None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, place


def surroundings(device: torch.device) -> Hashable:
    """What besides its arguments decides what a call does: gradients, autocast, determinism, the switches of ops and fusing."""
    autocast = torch.is_autocast_enabled(device.type)
    return (
        torch.is_grad_enabled(),
        torch.get_autocast_dtype(device.type) if autocast else None,
        torch.are_deterministic_algorithms_enabled(),
        settings.state(),
        switches.state(),
    )


def inside(module: torch.nn.Module) -> Hashable:
    """What of a module decides what it does: its parts, their modes, where their tensors lie and which get gradients."""
    found: list[Hashable] = []
    for part in module.modules():
        found.append((id(part), type(part), part.training, id(part.__dict__.get("forward"))))
        found += [(each.data_ptr(), each.requires_grad) for each in part._parameters.values() if each is not None]
        found += [each.data_ptr() for each in part._buffers.values() if each is not None]
    return tuple(found)
