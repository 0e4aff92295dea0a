"""A module's parameters under other names for autograd: tensors of a capture's own on the same memory.

Autograd keeps a node for each parameter, with the stream it was made on, as long as anybody holds a graph that ends in it: the
loop's last loss does, and DistributedDataParallel. From a capture such a node would lead out to that stream, which spoils it.
And a parameter's hooks are for the gradient that it gets in the end, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Leaves:
    """Twins of parameters, which share their memory.

    Args:
        parameters: those that need no gradient, and those of classes of their own, stand for themselves.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._twins = {
            id(each): torch.nn.Parameter(each.detach())
            for each in parameters
            if type(each) is torch.nn.Parameter and each.requires_grad
        }

    def twin(self, parameter: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter; itself where nothing does."""
        return self._twins.get(id(parameter), parameter)

    @contextmanager
    def in_place_of_parameters(self, module: torch.nn.Module | None) -> Iterator[None]:
        """For the time of the block a module has the twins."""
        replaced = [
            (part._parameters, name, value)
            for part in (module.modules() if module is not None else ())
            if not isinstance(part, torch.nn.RNNBase)  # it keeps a list of its parameters, and moves them where that is old
            for name, value in part._parameters.items()
            if id(value) in self._twins
        ]
        try:
            for parameters, name, value in replaced:
                parameters[name] = self._twins[id(value)]  # type: ignore[assignment]
            yield
        finally:
            for parameters, name, value in replaced:
                parameters[name] = value
