"""Something else in the place of a module's ``forward``, and what was there again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Forward = Callable[..., Any]


def forward_of(module: torch.nn.Module) -> Forward:
    """A module's ``forward`` as it is now, looked up at each call: its class may change, as :func:`gpupipe.train.fuse` does."""
    return partial(_call, module, module.__dict__.get("forward"))


def _call(module: torch.nn.Module, own: Forward | None, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)


class Replaced:
    """Another ``forward`` of one module, until :meth:`undo`."""

    def __init__(self, module: torch.nn.Module, forward: Forward) -> None:
        self._module, self._forward = module, forward
        self._before = module.__dict__.get("forward")
        module.forward = forward  # type: ignore[method-assign]

    def undo(self) -> None:
        """Puts back what was there; nothing where somebody has put another one in its place since. May be called again."""
        if self._module.__dict__.get("forward") is not self._forward:
            return
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before  # type: ignore[method-assign]


class Standing:
    """What stands in the place of a module's ``forward``, and does not go along into copies of the module or files: those have
    their own ``forward`` again.

    Args:
        own: the module's own, as :func:`forward_of` gives it.
        call: what is called instead.
    """

    def __init__(self, own: Forward, call: Forward) -> None:
        self._own, self._call = own, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._own,)


def _itself(own: Forward) -> Forward:
    return own
