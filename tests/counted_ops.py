"""How many ops torch was asked for: each gives up the interpreter lock, which a loader's thread must then win back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counted(TorchDispatchMode):
    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ops.append(str(op))
        return op(*args, **(kwargs or {}))


@contextmanager
def counted_ops(ops: list[str] | None = None) -> Iterator[list[str]]:
    """Adds the names of the ops that this thread asks for within the block to a list."""
    ops = ops if ops is not None else []
    with _Counted(ops):
        yield ops
