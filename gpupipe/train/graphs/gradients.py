"""What a step does to gradients, and with which optimizers: a replay does that again to the memory that the capture found, so
that it is right only where the call finds it alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpupipe.errors import ConfigError
from gpupipe.train.arguments import of
from gpupipe.train.graphs.recorder import NotCaptured

_NUMBERS = (int, float, bool, str, type(None), tuple)
_MOST = 1024
"""Kinds of calls that are remembered."""


class Gradients:
    """Of one function: which leaves it was seen to give gradients, and which optimizers it ran.

    Args:
        optimizers: known from the start.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._leaves: dict[torch.Tensor, None] = {}
        self._cleared: dict[Hashable, dict[torch.Tensor, bool]] = {}
        """Kinds of calls, and whether they were seen to clear each leaf's gradient before they added to it."""
        self._optimizers: list[torch.optim.Optimizer] = []
        for optimizer in optimizers:
            self._take_on(optimizer)

    def _take_on(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            self._leaves |= dict.fromkeys(group["params"])

    def state(self, kind: Hashable) -> Hashable:
        """What such a call finds: the optimizers' numbers, and where gradients lie, but for those that it clears first."""
        numbers = tuple(
            (name, value)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
            if isinstance(value, _NUMBERS)
        )
        cleared = self._cleared.get(kind, {})
        return numbers, tuple([None if cleared.get(leaf) else _place(leaf.grad) for leaf in self._leaves])

    @contextmanager
    def observed(self, kind: Hashable) -> Iterator[Observed]:
        """Looks on while the function runs."""
        cleared = self._cleared.get(kind, {})
        seen = Observed(self._leaves, self._optimizers, {leaf for leaf, was in cleared.items() if was})
        handle = register_optimizer_step_pre_hook(seen.stepped)
        before = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            seen.went_back(tensors, kwargs.get("inputs"))
            before(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        try:
            yield seen
        finally:
            torch.autograd.backward = before
            handle.remove()
            for optimizer in seen.optimizers:
                self._take_on(optimizer)
            self._leaves |= dict.fromkeys(seen.met)
            if len(self._cleared) >= _MOST:
                self._cleared.clear()
            known = self._cleared.setdefault(kind, {})
            for leaf, grad in seen.met.items():
                found = seen.found.get(leaf)
                if found is not None:
                    known[leaf] = grad is not found and known.get(leaf, True)


class Observed:
    """One call.

    Attributes:
        found: each leaf that was known, and the gradient that the call found.
        met: each leaf that took part, and its gradient when it did so first.
        optimizers: that took a step.
    """

    def __init__(
        self,
        leaves: Iterable[torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        cleared: set[torch.Tensor],
    ) -> None:
        self.found: dict[torch.Tensor, torch.Tensor | None] = {leaf: leaf.grad for leaf in leaves}
        self.met: dict[torch.Tensor, torch.Tensor | None] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._known, self._cleared = {id(each) for each in optimizers}, cleared

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for value in group["params"]:
                self.met.setdefault(value, value.grad)

    def went_back(self, tensors: Any, inputs: Any) -> None:
        ends = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for leaf in leaves_of(ends) if inputs is None else ([inputs] if isinstance(inputs, torch.Tensor) else inputs):
            self.met.setdefault(leaf, leaf.grad)

    def restore(self) -> None:
        """Gradients as the call found them: a capture has not filled those that it made."""
        for leaf, grad in {**self.met, **self.found}.items():
            leaf.grad = grad

    def left(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """(leaves that have no gradient now, but may have had one; those with another one than the call found, and it)."""
        now = {leaf: leaf.grad for leaf in {**self.found, **self.met}}
        bare = [leaf for leaf, grad in now.items() if grad is None and (leaf in self.met or self.found[leaf] is not None)]
        return bare, [(leaf, grad) for leaf, grad in now.items() if grad is not None and grad is not self.found.get(leaf)]

    def check(self) -> None:
        """Raises NotCaptured where a replay would not be what the call is."""
        if self.met.keys() - self.found.keys() or any(id(each) not in self._known for each in self.optimizers):
            raise NotCaptured("gradients or an optimizer take part in it that did not before")
        if any(
            leaf not in self.met or (self.met[leaf] is not None and self.met[leaf] is self.found[leaf])
            for leaf in self._cleared
        ):
            raise NotCaptured("it leaves or adds to gradients that other calls like it cleared first")
        for optimizer in self.optimizers:
            if any(not group.get("capturable", True) for group in optimizer.param_groups):
                raise NotCaptured(f"{type(optimizer).__name__} takes a step in it that was not made with capturable=True")


def leaves_of(ends: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that a backward from ``ends`` gives gradients to."""
    seen: set[Any] = set()
    ahead: list[Any] = []
    for end in ends:
        if end.grad_fn is not None:
            ahead.append(end.grad_fn)
        elif end.requires_grad:
            yield end
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        ahead += [each for each, _ in node.next_functions if each is not None]


def copies(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in memory of their own, by few launches."""
    made = [torch.empty_like(value) for value in values]
    kinds: dict[torch.dtype, list[int]] = {}
    for number, value in enumerate(values):
        kinds.setdefault(value.dtype, []).append(number)
    with torch.no_grad():
        for numbers in kinds.values():
            torch._foreach_copy_([made[number] for number in numbers], [values[number] for number in numbers])
    return made


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Whether a step with it can be captured.

    Raises:
        ConfigError: if not.
    """
    of(torch.optim.Optimizer, optimizer, "one of optimizers", "give optimizers of torch.optim, which a graph can follow")
    for number, group in enumerate(optimizer.param_groups):
        if not group.get("capturable", False):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} cannot be captured (group {number} has capturable=False)",
                fix="make it with capturable=True and fused=True where it has them, or capture the module alone",
            )
        if not isinstance(group["lr"], torch.Tensor):
            raise ConfigError(
                f"group {number} of {type(optimizer).__name__} has a number for learning rate, {group['lr']!r}: it would stay",
                fix="give lr=torch.tensor(…), which schedulers change in place",
            )


def _place(grad: torch.Tensor | None) -> int | None:
    return None if grad is None else grad.data_ptr()
