"""What each thread is at just now, for whoever waits for it and wants to say for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Doing(NamedTuple):
    """A stage, what it is at work on (a path, where it has one), and since when by ``time.monotonic``."""

    stage: str
    what: str | None
    since: float


_at: dict[int, Doing] = {}


@contextmanager
def at(stage: str, what: str | None = None) -> Iterator[None]:
    """Says that this thread is in a stage. Within another one it counts alone, until it ends."""
    me = threading.get_ident()
    before = _at.get(me)
    _at[me] = Doing(stage, what, time.monotonic())
    try:
        yield
    finally:
        if before is None:
            _at.pop(me, None)
        else:
            _at[me] = before


def doing(thread: threading.Thread | None) -> Doing | None:
    """What a thread is at; None when it has not said."""
    return _at.get(thread.ident) if thread is not None and thread.ident is not None else None
