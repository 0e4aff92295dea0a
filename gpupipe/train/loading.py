"""What is to be done when a model has loaded other weights; a model, and its parameters' names, without what wraps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")
_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_OUTERMOST = "module."


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
