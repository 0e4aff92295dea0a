"""Whether fused modules run fused or as they were written: all of them, those of a kind, or single ones.

``GPUPIPE_FUSE`` says it from the start: ``off`` for all, or kinds that run as written, as in ``GPUPIPE_FUSE=-mlp,-attention``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from gpupipe.errors import ConfigError
from gpupipe.ops.settings import Undo
from gpupipe.train.arguments import of

if TYPE_CHECKING:
    from collections.abc import Iterator

Way = Literal["fused", "original"]
KINDS = ("norm", "group_norm", "modulated_norm", "mlp", "linear_act", "attention", "rotary", "positions", "block", "conv_block")
"""Of fused modules: what :func:`use` and :func:`gpupipe.train.fuse` take."""
STATE = "_gpupipe_fused"
"""The attribute of a fused module that holds what belongs to its fused form."""

SPLIT = "_gpupipe_split"
"""That of a module that is split between ranks."""

_off: set[str] = set()
_ALL = "*"
_here = threading.local()


def use(way: Way, *what: str | torch.nn.Module) -> Undo:
    """Chooses how fused modules run, so that a doubt can be settled by bisection. It holds for all threads.

    Args:
        way: ``"fused"``, or ``"original"``: as they were written.
        what: kinds such as ``"mlp"``, and modules, which stand for all that is in them. None given: all, whatever was said
            of kinds before.

    Returns:
        Something that may be ignored, or used in ``with`` to hold for a block only.

    Raises:
        ConfigError: for another way or kind, or a module in which nothing is fused.
    """
    if way not in ("fused", "original"):  # also of what is no text at all
        raise ConfigError(f"the way is {way!r}", fix="choose 'fused' or 'original'")
    kinds, states = set(), []
    for one in what:
        if isinstance(one, torch.nn.Module):
            found = [module.__dict__[STATE] for module in one.modules() if STATE in module.__dict__]
            if not found:
                raise ConfigError(f"nothing is fused in this {type(one).__name__}", fix="fuse it first: gpupipe.train.fuse")
            states += found
        else:
            kinds.add(known(of(str, one, "what", "give kinds such as 'mlp', and modules")))
    before, were = set(_off), [(state, state.on) for state in states]
    for state in states:
        state.on = way == "fused"
    if not what:
        _off.clear()
        _off.update((_ALL,) if way == "original" else ())
    elif way == "original":
        _off.update(kinds)
    else:
        if _ALL in _off and kinds:
            _off.remove(_ALL)
            _off.update(KINDS)
        _off.difference_update(kinds)

    def undo() -> None:
        _off.clear()
        _off.update(before)
        for state, was in were:
            state.on = was

    return Undo(undo)


def known(kind: str) -> str:
    """The kind.

    Raises:
        ConfigError: when there is none of this name.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r} of fused modules", fix=f"choose among {', '.join(KINDS)}")
    return kind


def wanted(kind: str) -> bool:
    """True when modules of this kind are to run fused."""
    return not _off or not (kind in _off or _ALL in _off)


def state() -> Hashable:
    """All switches but those of single modules, as something to compare with what they were."""
    return as_written_here(), tuple(sorted(_off))


def as_written_here() -> bool:
    """True within :func:`as_written`, in this thread."""
    return getattr(_here, "as_written", False)


@contextmanager
def as_written() -> Iterator[None]:
    """All fused modules run as written for the time of the block, in this thread alone."""
    before = as_written_here()
    _here.as_written = True
    try:
        yield
    finally:
        _here.as_written = before


def _from_environment(value: str) -> None:
    for word in filter(None, (word.strip() for word in value.split(","))):
        if word == "off":
            use("original")
        elif word.startswith("-"):
            use("original", word[1:])
        elif word != "on":
            raise ConfigError(f"GPUPIPE_FUSE is {value!r}", fix="write on, off, or kinds such as -mlp,-attention")


_from_environment(os.environ.get("GPUPIPE_FUSE", ""))
