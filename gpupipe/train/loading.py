"""What is to be done when a model has loaded other weights, or has other tensors for them; a model, and its parameters' names,
without what wraps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded

T = TypeVar("T")
_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_OUTERMOST = "module."
_users = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
"""By parameters: who took them."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def bare(name: str) -> str:
    """A parameter's name without what ``torch.compile``, DistributedDataParallel and other wrappers put into it."""
    for part in _WRAPPED:
        name = name.replace(part, "")
    return name.removeprefix(_OUTERMOST)


def renamed(found: Mapping[str, T], known: Iterable[str]) -> dict[str, T]:
    """Values by names as they are known here, where they differ by what wrappers put into them; others as they are."""
    names = {bare(name): name for name in known}
    taken = set(names.values())
    return {name if name in taken else names.get(bare(name), name): value for name, value in found.items()}


def on_load(model: nn.Module, call: Callable[[nn.Module], None]) -> None:
    """Has ``call`` called with the model behind each ``load_state_dict`` of it. Copies of the model, and those read from a
    file, are models of their own: behind theirs nothing is called."""
    model.register_load_state_dict_post_hook(_Hook(model, call))  # type: ignore[no-untyped-call]


class _Hook:
    def __init__(self, model: nn.Module, call: Callable[[nn.Module], None]) -> None:
        self._model, self._call = weakref.ref(model), call

    def __call__(self, model: nn.Module, _: Any) -> None:
        if model is self._model():
            self._call(model)

    def __reduce__(self) -> Any:
        return _nothing_hook, ()


def _nothing_hook() -> Callable[[nn.Module, Any], None]:
    return _nothing


def _nothing(_: nn.Module, __: Any) -> None:
    pass


class Taken:
    """A model's parameters as somebody took them, to notice when the model has other tensors in their places: whatever is done
    with the former ones does nothing to it then. DTensors are let pass: ``fully_shard`` changes those to and fro.

    Args:
        model: whose parameters they are; None for nobody's.
        by: who took them, as messages name it.
    """

    def __init__(self, model: nn.Module | None = None, by: str = "") -> None:
        self._model, self._by = weakref.ref(model) if model is not None else None, by
        self._places: dict[int, tuple[dict[str, Any], str, torch.Tensor]] = {}
        for module in model.modules() if model is not None else ():
            for last, value in module._parameters.items():
                if value is not None and not is_sharded(value):
                    self._places.setdefault(id(value), (module._parameters, last, value))
                    _users[value] = by

    def __reduce__(self) -> Any:
        return Taken, ()  # copies are of other models

    def check(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Looks whether parameters, given with their names, are the model's still.

        Raises:
            ConfigError: where it has others.
        """
        for name, value in values:
            holder, last, taken = self._places.get(id(value), ({}, "", None))
            if taken is value and holder.get(last) is not value and not self._elsewhere(value):
                raise ConfigError(
                    f"{name!r} is another tensor now than {self._by} was given: the model would stay as it is",
                    fix=f"tensor_parallel, fully_shard and load_state_dict(assign=True) go before {self._by} and the optimizer",
                )

    def _elsewhere(self, value: torch.Tensor) -> bool:
        """Whether the model has it in another place, as a parametrization puts it."""
        model = self._model() if self._model is not None else None
        return model is None or any(value is one for one in model.parameters())


def taken_by(value: torch.Tensor) -> str | None:
    """Who took a parameter, such as an optimizer's: who puts another in its place should know."""
    return _users.get(value)  # type: ignore[no-untyped-call, no-any-return]
