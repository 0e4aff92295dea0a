"""What a module computes, found out by trying it on a few small numbers, with stand-ins for its weights and linear layers.

So a module is recognised by what it does, whoever wrote it, whatever it is called, and wherever its parameters are: it is tried
in float32 on the CPU, also when they lie on the meta device or are sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from gpupipe.ops import activations

EXACT = 1e-5
"""The relative error at which two functions are one, in float32."""
ACTIVATIONS = (*activations.PLAIN, *activations.GATED)
OBSERVES = "_gpupipe_observes"
"""The attribute of a hook to which it is no matter that a module is not called."""
_SPAN = 5.0
"""Activations are tried from minus to plus this: within it, both forms of GELU differ by 4e-4."""


Stub = Callable[[torch.Tensor], Any]
"""What stands in the place of a layer."""


class _InPlace(nn.Module):
    """Stands in the place of a layer, and writes down that it was called."""

    def __init__(self, name: str, stub: Stub, events: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._name, self._stub, self._events = name, stub, events

    def forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        self._events.append((self._name, x))
        return self._stub(x)


def passed(x: torch.Tensor) -> torch.Tensor:
    """The stub that gives back what it gets, as a tensor of its own, which may be written into."""
    return x.clone()


@dataclass
class Trial:
    """A module tried with its layers out of the way.

    Attributes:
        given: what it was given.
        result: what it gave back.
        events: the layers called, in order, each with its input.
    """

    given: tuple[Any, ...]
    result: Any
    events: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.events]


def attempt(
    module: nn.Module, *given: Any, without: dict[str, Stub] | None = None, training: bool = False, **named: Any
) -> Trial | None:
    """Calls a module in evaluation mode, or as in ``training``, without gradients, with stubs in the place of some of its
    layers, by name.

    None when it does not take these arguments.
    """
    events: list[tuple[str, torch.Tensor]] = []
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
    with _out_of_the_way(module, without or {}, events), _as_it_is(module, training), torch.no_grad():
        try:
            result = type(module).forward(module, *copies, **named)
        except Exception:  # somebody else's module was given what it may not expect: then it is not what we look for
            return None
    return Trial(given, result, events)


def same(one: Any, other: torch.Tensor) -> bool:
    """A tensor equal to another but for rounding, in float32."""
    if not isinstance(one, torch.Tensor) or one.device != other.device or one.shape != other.shape:
        return False
    return bool((one.float() - other.float()).abs().max() <= EXACT * other.float().abs().max().clamp(min=1e-30))


def which_activation(of: Callable[[torch.Tensor], Any], width: int = 4) -> str | None:
    """The one of our activations that a function of (rows, width) is; None if it is none of them."""
    ramp = torch.linspace(-_SPAN, _SPAN, 3 * width).view(width, 3).t().contiguous()
    found = of(ramp)
    for name in ACTIVATIONS:
        curve, gated = activations.split(name)
        if gated and width % 2:
            continue
        value, other = ramp.chunk(2, -1) if gated else (torch.ones(()), ramp)
        if same(found, value * activations.apply(other, curve)):
            return name
    return None


def which_norm(module: nn.Module, size: int, eps: float | None) -> Literal["layer", "rms"] | None:
    """``"layer"`` or ``"rms"`` for a module that takes (rows, size) and normalises each row so; None for any other."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    spread = torch.linspace(-1.0, 2.0, 3 * size).view(3, size).sin() + 0.3
    x = torch.stack((spread[0], 1e-3 * spread[1], 30 * spread[2]))
    stand_in = {
        name: 1 + 0.5 * torch.arange(size).float().cos() if name == "weight" else torch.arange(size).float().sin()
        for name, value in (("weight", weight), ("bias", bias))
        if value is not None
    }
    with replaced(module, stand_in):
        trial = attempt(module, x)
    if trial is None:
        return None
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    w, b = stand_in.get("weight"), stand_in.get("bias")
    if same(trial.result, functional.layer_norm(x, (size,), w, b, eps)):
        return "layer"
    return "rms" if b is None and same(trial.result, functional.rms_norm(x, (size,), w, eps)) else None


def activation_of(module: Any) -> str | None:
    """The one of our activations that a module is; None if it is none of them."""
    if not isinstance(module, nn.Module) or any(True for _ in module.parameters()):
        return None
    return which_activation(lambda x: None if (trial := attempt(module, x)) is None else trial.result)


def takes(function: Any, *names: str) -> bool:
    """True for a function that has parameters of these names, in this order."""
    try:
        found = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    places = [found.index(name) if name in found else -1 for name in names]
    return -1 not in places and places == sorted(places)


@contextmanager
def replaced(module: nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Other tensors in the place of a module's own parameters."""
    kept = {name: module._parameters[name] for name in values if name in module._parameters}
    for name in kept:
        module._parameters[name] = nn.Parameter(values[name], requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(kept)


@contextmanager
def _out_of_the_way(
    module: nn.Module, stubs: dict[str, Stub], events: list[tuple[str, torch.Tensor]]
) -> Iterator[None]:  # fmt: skip
    places: list[tuple[nn.Module, str, nn.Module | None]] = []
    for path, stub in stubs.items():
        parent, _, name = path.rpartition(".")
        holder = module.get_submodule(parent)
        places.append((holder, name, holder._modules[name]))
        holder._modules[name] = _InPlace(path, stub, events)
    try:
        yield
    finally:
        for holder, name, layer in places:
            holder._modules[name] = layer


@contextmanager
def _as_it_is(module: nn.Module, training: bool) -> Iterator[None]:
    """In one mode, off every default that would make tensors elsewhere, and without a trace in what torch draws."""
    others = [one for one in module.modules() if one.training != training]
    for one in others:
        one.training = training
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng([], enabled=training):
            yield
    finally:
        for one in others:
            one.training = not training


def plain(layer: Any) -> bool:
    """True for a ``Linear`` as torch has it, which nobody watches: what it does can be done without calling it."""
    return type(layer) is nn.Linear and silent(layer)


def at(module: nn.Module, path: tuple[str, ...]) -> Any:
    """The module that a path leads to."""
    found: Any = module
    for name in path:
        found = getattr(found, name)
    return found


def silent(*modules: Any) -> bool:
    """True when nobody watches these modules: what they do can be done without calling them."""
    for one in modules:
        if one is None:
            continue
        if "forward" in one.__dict__:  # how offloading and casting a layer at a time get between
            return False
        if not (one._forward_hooks or one._forward_pre_hooks):
            continue
        if one._forward_pre_hooks or not all(hasattr(hook, OBSERVES) for hook in one._forward_hooks.values()):
            return False
    return True
