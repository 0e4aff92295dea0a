"""What calls must have in common to share a graph, and their tensors taken out of what they were given in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from gpupipe.ops import settings
from gpupipe.train import switches
from gpupipe.types import Batch

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Kinds of which equal ones are the same to a graph."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Batch)
_VALUES_OF, _MODE, _PLACE, _WANTED = dict.values, itemgetter("training"), torch.Tensor.data_ptr, attrgetter("requires_grad")


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
    if isinstance(value, float | complex):  # 0.0 equals -0.0, and a NaN nothing
        return type(value), repr(value)
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


def unfit(tensors: Sequence[torch.Tensor], device: torch.device) -> str | None:
    """What is among the tensors that a graph of this device cannot take; None where all are ordinary ones, each once."""
    for each in tensors:
        if type(each) not in _PLAIN or each.layout != torch.strided:
            layout = str(each.layout).removeprefix("torch.")
            return f"a {type(each).__name__} of layout {layout} among the arguments, which a graph cannot follow"
        if each.device != device:
            return f"a tensor on {each.device} among the arguments, where a graph takes those of {device}"
    if len({tensor.data_ptr() for tensor in tensors if tensor.numel()}) < sum(tensor.numel() > 0 for tensor in tensors):
        return "one tensor twice among the arguments: what is written to the one would have to show in the other"
    return None


def shares_memory(places: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of the tensors at these places may share memory with another one, told by where each begins and ends."""
    spans = []
    for each in tensors:
        steps = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
        spans.append(
            (each.data_ptr(), each.data_ptr() + (steps + 1) * each.element_size() if each.numel() else each.data_ptr())
        )
    return any(
        spans[place][0] < end and start < spans[place][1]
        for place in places
        for other, (start, end) in enumerate(spans)
        if other != place
    )


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


class Inside:
    """What of a module decides what it does: its parts, their modes, where their tensors lie and which get gradients.

    Called, it gives a number that stands for all of it as it is now. In a training loop that is as it was at the last call,
    which is found out by comparing lists; only what has changed is taken down anew.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._numbers: dict[Hashable, int] = {}
        self._number = self._taken_down()

    def __call__(self) -> int:
        if not self._as_it_was():
            self._number = self._taken_down()
        return self._number

    def _taken_down(self) -> int:
        self._parts = list(self._module.modules())
        self._own = [part.__dict__ for part in self._parts]
        holders = [part.__dict__[name] for part in self._parts for name in ("_modules", "_parameters", "_buffers")]
        self._holders, self._empty = [each for each in holders if each], [each for each in holders if not each]
        self._held = list(chain.from_iterable(map(_VALUES_OF, self._holders)))
        self._types = list(map(type, self._parts))
        self._modes = list(map(_MODE, self._own))
        self._forwards = [own.get("forward") for own in self._own]
        self._tensors = [each for each in self._held if isinstance(each, torch.Tensor)]
        self._places = list(map(_PLACE, self._tensors))
        self._wanted = list(map(_WANTED, self._tensors))
        found = (
            tuple(map(id, self._parts)), tuple(self._types), tuple(self._modes), tuple(map(id, self._forwards)),
            tuple(self._places), tuple(self._wanted),
        )  # fmt: skip
        return self._numbers.setdefault(found, len(self._numbers))

    def _as_it_was(self) -> bool:
        held = list(chain.from_iterable(map(_VALUES_OF, self._holders)))
        return (
            not any(self._empty)
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and list(map(type, self._parts)) == self._types
            and list(map(_MODE, self._own)) == self._modes
            and all(map(is_, [own.get("forward") for own in self._own], self._forwards))
            and list(map(_PLACE, self._tensors)) == self._places
            and list(map(_WANTED, self._tensors)) == self._wanted
        )
