"""A stand-in for CUDA graphs on the CPU: the operations of a piece of work, done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpupipe.train.graphs.recorder import NotCaptured

_NOT_PERMITTED = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal")
"""What makes the host wait for the device, which no capture survives."""


class Tape:
    """Records as CUDA does: what is recorded has not been done, as far as memory from before shows."""

    made = 0
    """Recordings of all tapes, for tests to count."""

    def record(self, run: Callable[[], None]) -> TapeRecording:
        watch = _Watch()
        try:
            with watch:
                run()
        except Exception as error:
            raise NotCaptured(str(error)) from error
        finally:
            with torch.no_grad():
                for memory, before in watch.before.values():
                    memory.copy_(before)
        Tape.made += 1
        return TapeRecording(watch.done)

    pool_bytes = 0

    def release(self) -> None:
        pass


class TapeRecording:
    def __init__(self, done: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]]) -> None:
        self._done = done

    @property
    def launches(self) -> int:
        return len(self._done)

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts are among what was recorded
            for func, args, kwargs, outs in self._done:
                found = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
                for own, other in zip(outs, found, strict=True):
                    if own.data_ptr() != other.data_ptr():
                        own.copy_(other)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._inside: set[int] = set()

    def _keep(self, given: Any) -> None:
        """Keeps what tensors from before hold."""
        for tensor in tree_leaves(given):
            place = tensor.untyped_storage().data_ptr()
            if place not in self._inside and place not in self.before:
                self.before[place] = (tensor.detach(), tensor.detach().clone())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith(_NOT_PERMITTED):
            raise RuntimeError("operation not permitted when stream is capturing")
        for given, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or (argument.name.startswith("running_") and str(func).startswith("aten.native_batch_norm")):
                self._keep(given)
        made = func(*args, **kwargs)
        outs = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        self._inside |= {each.untyped_storage().data_ptr() for each in outs} - known
        self.done.append((func, args, kwargs, [each.detach() for each in outs]))
        return made
