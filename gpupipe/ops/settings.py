"""Switches that hold for all ops: kernels or references, and how exact.

Set for the process, or for the time of a ``with`` block; either way for all threads, since gradients are worked out in threads
of their own. ``torch.compile`` compiles anew after a change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Literal, Self, get_args

import torch
from torch.autograd import forward_ad

from gpupipe.device.jit import serves
from gpupipe.errors import ConfigError

Implementation = Literal["kernel", "reference"]
Precision = Literal["fast", "balanced", "conservative"]

ALL = "*"
_implementations: dict[str, str] = {ALL: "kernel"}
_precision: list[str] = ["balanced"]


class Undo:
    """What a setting returns: as a ``with`` block, it puts back what was there before."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo()


def _known(value: str, of: object, name: str) -> None:
    if value not in (choices := get_args(of)):
        raise ConfigError(f"{name} is {value!r}", fix=f"choose one of {', '.join(map(repr, choices))}")


def use(implementation: Implementation, *names: str) -> Undo:
    """Chooses between the fused kernels and their plain torch twins, so that a doubt can be settled by bisection.

    Args:
        implementation: ``"kernel"`` (wherever one serves) or ``"reference"``.
        names: of ops, as in ``use("reference", "rms_norm")``. None given: all ops, whatever was said of single ones before.

    Returns:
        Something that may be ignored, or used in ``with`` to hold for a block only.

    Raises:
        ConfigError: for an implementation or an op that does not exist.
    """
    from gpupipe.ops import NAMES

    _known(implementation, Implementation, "the implementation")
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"there is no op {name!r}", fix=f"choose among {', '.join(sorted(NAMES))}")
    before = dict(_implementations)
    if names:
        _implementations.update(dict.fromkeys(names, implementation))
    else:
        _implementations.clear()
        _implementations[ALL] = implementation

    def undo() -> None:
        _implementations.clear()
        _implementations.update(before)

    return Undo(undo)


def state() -> Hashable:
    """All switches, as something to compare with what they were."""
    return _precision[-1], tuple(sorted(_implementations.items()))


def kernel_wanted(name: str) -> bool:
    """True unless the reference was chosen for this op."""
    return (_implementations.get(name) or _implementations[ALL]) == "kernel"


def kernel_runs(name: str, x: torch.Tensor) -> bool:
    """True when an op's kernel is wanted, runs on x's device and takes x's type; sizes are the op's own matter.

    Not under a transform of ``torch.func`` or forward-mode differentiation, which only plain torch goes through.
    """
    return kernel_wanted(name) and serves(x.device) and x.dtype != torch.float64 and not _transformed()


def _transformed() -> bool:
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def precision(mode: Precision) -> Undo:
    """Sets what ops do where a call says nothing; ``"balanced"`` at the start.

    Args:
        mode: ``"conservative"`` rounds wherever the chain of torch's own ops would, so that only the order of sums differs;
            ``"balanced"`` keeps float32 within an op and rounds what it stores; ``"fast"`` also allows what an op's own text
            names.

    Returns:
        Something that may be ignored, or used in ``with`` to hold for a block only.

    Raises:
        ConfigError: for a mode that does not exist.
    """
    _known(mode, Precision, "the precision")
    before = _precision[0]
    _precision[0] = mode

    def undo() -> None:
        _precision[0] = before

    return Undo(undo)


def mode(asked: Precision | None) -> str:
    """The precision of a call: what it asks for, else what is set."""
    if asked is None:
        return _precision[0]
    _known(asked, Precision, "precision")
    return asked


if os.environ.get("GPUPIPE_OPS", "kernel") != "kernel":
    _known(os.environ["GPUPIPE_OPS"], Implementation, "GPUPIPE_OPS")
    _implementations[ALL] = os.environ["GPUPIPE_OPS"]
