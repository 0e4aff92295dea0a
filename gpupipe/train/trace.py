"""One step with every module watched: which tensor is the first that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class NotFinite:
    """The first tensor of a step that is not finite.

    Attributes:
        what: ``parameter``, ``batch``, ``input``, ``output``, ``loss``, ``gradient`` (of what the module gave out) or
            ``parameter's gradient``.
        name: of the parameter, of the batch's tensor or of the module.
        kind: the module's class; empty where it is none.
        tensor: its type and shape.
        nan, infinite: how many of its values are.
        largest: the greatest finite one by size; 0 if there is none.
        largest_input: the same of what the module was given; None where that is not known.
        rows: positions along the first dimension that have such values, at most sixteen.
        files: the videos of those rows, where the dimension is that of the batch; else of the whole batch.
    """

    what: str
    name: str
    kind: str
    tensor: str
    nan: int
    infinite: int
    largest: float
    largest_input: float | None
    rows: tuple[int, ...]
    files: tuple[str, ...]

    def __str__(self) -> str:
        whose = f"{self.name} ({self.kind})" if self.kind else self.name
        text = f"{self.what} of {whose}" if self.kind else f"{self.what} {whose}".rstrip()
        text += f", {self.tensor}: {self.nan} NaN, {self.infinite} infinite, else at most {self.largest:.4g}"
        return text + (f", from inputs of at most {self.largest_input:.4g}" if self.largest_input is not None else "")


class Found(Exception):
    """Ends the step that is watched."""

    def __init__(self, found: NotFinite) -> None:
        super().__init__(str(found))
        self.found = found


def first_not_finite(
    model: nn.Module, batches: Sequence[Any], take: Callable[[Any], torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> NotFinite | None:
    """Does the forward and backward of a step again, and stops where the first tensor is not finite. The host waits.

    Args:
        model: unwrapped; its gradients are added to.
        batches: of the step; see :func:`tensors_of` and :func:`paths_of`.
        take: the loss of one of them.
        backward: adds the gradients of a loss.

    Returns:
        None where all is finite this time.
    """
    watch = _Modules(model)
    try:
        for name, parameter in model.named_parameters():
            watch.look("parameter", name, "", parameter)
        for batch in batches:
            watch.batch = batch
            for name, value in tensors_of(batch):
                watch.look("batch", name, "", value)
            with watch.hooks():
                loss = take(batch)
                watch.look("loss", "", "", loss)
                backward(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                watch.look("parameter's gradient", name, "", parameter.grad)
    except Found as found:
        return found.found
    return None


def tensors_of(batch: Any, name: str = "", depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their names in it: of mappings, lists, tuples, dataclasses and other plain objects, one in
    the other down to a depth."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    if isinstance(batch, torch.Tensor) or not depth:
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, list | tuple):
        parts = enumerate(batch)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type | nn.Module):
        parts = vars(batch).items()
    for key, value in parts:
        yield from tensors_of(value, f"{name}.{key}" if name else str(key), depth - 1)


def paths_of(batch: Any) -> tuple[str, ...]:
    """The videos of a batch, a row each: its ``paths``, as an attribute or a key; none where it has no such thing."""
    found = getattr(batch, "paths", None)
    if found is None and isinstance(batch, Mapping):
        found = batch.get("paths")
    if not isinstance(found, list | tuple):
        return ()
    return tuple(str(path) for path in found)


class _Modules:
    """Hooks on all modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.batch: Any = None
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters())

    def look(self, what: str, name: str, kind: str, value: torch.Tensor, inputs: Any = ()) -> None:
        """Raises Found where a tensor is not finite."""
        value = value.detach()
        if not value.is_floating_point() or bool(value.isfinite().all()):
            return
        odd = ~value.isfinite()
        rows = tuple(odd.reshape(value.shape[0], -1).any(1).nonzero().flatten().tolist()[:16]) if value.dim() else ()
        paths = list(paths_of(self.batch))
        own = [paths[row] for row in rows] if what != "parameter" and value.dim() and value.shape[0] == len(paths) else paths
        given = [_largest(each) for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        raise Found(
            NotFinite(
                what,
                name,
                kind,
                f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
                int(value.isnan().sum()),
                int(value.isinf().sum()),
                _largest(value),
                max(given) if given else None,
                rows,
                tuple(own),
            )
        )

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Within the block what modules take and give is looked at, and its gradients too."""
        handles: list[Any] = []
        for module in self._names:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        for name, value in self._parameters.items():
            if value.requires_grad:
                handles.append(value.register_hook(self._gradient("parameter's gradient", name, "")))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.look("input", self._names[module], type(module).__name__, value)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        name, kind = self._names[module], type(module).__name__
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.look("output", name, kind, value, (args, kwargs))
                if value.requires_grad:
                    value.register_hook(self._gradient("gradient", name, kind))  # type: ignore[no-untyped-call]

    def _gradient(self, what: str, name: str, kind: str) -> Callable[[torch.Tensor], None]:
        def look(grad: torch.Tensor) -> None:
            self.look(what, name, kind, grad)

        return look


def _largest(value: torch.Tensor) -> float:
    """The greatest finite value of a tensor by size."""
    finite = value.detach().abs()
    return float(torch.where(finite.isfinite(), finite, 0).max()) if value.numel() else 0.0
