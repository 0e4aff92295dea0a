"""Tensors that are there: which Python knows of, and how many bytes come to be while a step runs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Kind:
    """What tensors have in common that are counted together."""

    type: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    graph: str | None
    """The autograd node that made it, without its number; None for tensors without a graph."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a scalar"
        name = "tensors" if self.type == "Tensor" else f"of {self.type}"
        text = f"{name} of {shape} {str(self.dtype).removeprefix('torch.')}"
        return text + (f" with a graph ({self.graph})" if self.graph else "")


@dataclass
class Census:
    """What Python knows of at one moment.

    Attributes:
        tensors: of each kind, how many storages of their own there are, and their bytes.
        objects: how many objects of each type the garbage collector knows.
    """

    tensors: dict[Kind, tuple[int, int]] = field(default_factory=dict)
    objects: Counter[str] = field(default_factory=Counter)


def python_tensors(device: torch.device) -> Iterator[torch.Tensor]:
    """Plain tensors of a device that Python objects exist for, gradients included; those that only C++ holds are not found."""
    seen = set()
    for each in gc.get_objects():
        # isinstance() would ask proxies for their class, and mock objects for anything
        if not issubclass(type(each), torch.Tensor):
            continue
        if not _is_plain(each):
            continue
        for tensor in (each, _gradient(each)):
            if tensor is not None and id(tensor) not in seen and _is_plain(tensor) and tensor.device == device:
                seen.add(id(tensor))
                yield tensor


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # of a view from under no_grad whose base was changed since, torch will not say where it is from
        return None


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each piece of memory that tensors lie in, by its address; each counts once."""
    found = {}
    for tensor in tensors:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def census(device: torch.device) -> Census:
    """Counts what is there. Takes as long as the collector takes to go through all objects: about half a second."""
    gc.collect()
    found, seen = Census(), set()
    for tensor in python_tensors(device):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        kind = kind_of(tensor)
        count, size = found.tensors.get(kind, (0, 0))
        found.tensors[kind] = (count + 1, size + storage.nbytes())
    # without the kinds of an earlier census, which is kept beside this one
    found.objects.update(type(each).__qualname__ for each in gc.get_objects() if type(each) is not Kind)
    return found


def kind_of(tensor: torch.Tensor) -> Kind:
    node = tensor.grad_fn
    graph = None if node is None else node.name().rstrip("0123456789")
    return Kind(type(tensor).__name__, tuple(tensor.shape), tensor.dtype, graph)


def holder_of(kind: Kind, device: torch.device) -> str | None:
    """What holds most tensors of a kind, in words: ``Trainer.losses, a list of 120``; None where no Python object does."""
    alike = [tensor for tensor in python_tensors(device) if kind_of(tensor) == kind]
    wanted, own = {id(tensor) for tensor in alike}, id(alike)
    found: dict[str, tuple[int, Any]] = {}
    for holder in gc.get_referrers(*alike):
        if id(holder) == own or isinstance(holder, FrameType):
            continue
        if isinstance(holder, list | tuple | set | deque):
            held = sum(id(value) in wanted for value in list(holder))
            found[f"{type(holder).__name__} {id(holder)}"] = (held, holder)
            continue
        values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        owner = _owner_of(holder) if isinstance(holder, dict) else holder
        keys = [key for key, value in list(values.items()) if id(value) in wanted]  # other threads may change it meanwhile
        if owner is None and keys:
            found[f"dict {id(holder)}"] = (len(keys), holder)
        for key in keys if owner is not None else ():
            label = f"{type(owner).__qualname__}.{key}"
            found[label] = (found.get(label, (0, None))[0] + 1, None)
    if not found:
        return None
    label, (_, container) = max(found.items(), key=lambda item: item[1][0])
    if container is None:
        return label
    text = f"a {type(container).__name__} of {len(container)}"
    name = _name_of(container)
    return f"{name}, {text}" if name else text


def _owner_of(values: dict[Any, Any]) -> Any:
    """The object or module whose attributes these are."""
    return next((each for each in gc.get_referrers(values) if getattr(each, "__dict__", None) is values), None)


def _name_of(container: Any) -> str | None:
    """The attribute or variable that a container is known by."""
    for outer in gc.get_referrers(container):
        values = outer if isinstance(outer, dict) else getattr(outer, "__dict__", {})
        key = next((key for key, value in list(values.items()) if value is container), None)
        owner = _owner_of(outer) if isinstance(outer, dict) else outer
        if isinstance(key, str) and owner is not None:
            return f"{owner.__name__ if isinstance(owner, ModuleType) else type(owner).__qualname__}.{key}"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            for key, value in frame.f_locals.items():
                if value is container:
                    return f"{key} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # before what a subclass may answer for
        and not isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of tensors that are made inside of it, as long as each lives; forward and backward alike on the CPU.

    Attributes:
        now: bytes that were made in it and live.
        peak: the most that this came to.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._refs: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for each in tree_leaves(made):
            if not isinstance(each, torch.Tensor) or each.device != self._device or not _is_plain(each):
                continue
            storage = each.untyped_storage()
            if storage._cdata in self._refs:
                continue
            if given is None:
                given = {
                    each.untyped_storage()._cdata
                    for each in tree_leaves((args, kwargs))
                    if isinstance(each, torch.Tensor) and _is_plain(each)
                }
            if storage._cdata not in given:  # else it was there before
                self._count(storage)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: object) -> None:
            del self._refs[key]
            self.now -= size

        self._refs[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
