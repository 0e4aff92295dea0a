"""Something else in the place of a module's ``forward``, and what was there again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

Forward = Callable[..., Any]


def forward_of(module: torch.nn.Module) -> Forward:
    """A module's ``forward`` as it is now, looked up at each call: its class may change, as :func:`gpupipe.train.fuse` does."""
    return partial(_call, module, module.__dict__.get("forward"))


def _call(module: torch.nn.Module, own: Forward | None, /, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)


class Replaced:
    """Another ``forward`` of one module, until :meth:`undo`. It goes along into copies of the module and files.

    Several may stand on one another, and be undone in any order: each calls the one below it, which lets calls pass once it is
    undone.

    Args:
        call: what is called instead.

    Attributes:
        undone: calls pass to what was there before.
    """

    def __init__(self, module: torch.nn.Module, call: Forward) -> None:
        self._module, self._call, self._own = module, call, forward_of(module)
        self._before = module.__dict__.get("forward")
        self.undone = False
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def undo(self) -> None:
        """Puts back what was there, as soon as nothing stands on it any more. May be called again."""
        self._call, self.undone = self._own, True
        top = self._module.__dict__.get("forward")
        if not isinstance(top, Replaced):  # somebody else's, who calls this one
            return
        while isinstance(top, Replaced) and top.undone:
            top = top._before
        if top is None:
            del self._module.forward
        else:
            self._module.forward = top


class Standing(Replaced):
    """One that does not go along into copies of the module or files: those have what was there before."""

    def __reduce__(self) -> Any:
        return _itself, (self._own if self._before is None else self._before,)


def replaced(module: torch.nn.Module) -> Iterator[Replaced]:
    """What stands in the place of a module's ``forward``, from the outermost down to the first that is somebody else's."""
    found = module.__dict__.get("forward")
    while isinstance(found, Replaced):
        if not found.undone:
            yield found
        found = found._before


def _itself(own: Forward) -> Forward:
    return own
