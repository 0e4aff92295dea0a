"""Giving up work that nobody waits for any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stop = Callable[[], bool]
"""Asked now and then by long work: true when it is to be given up."""


class Stopped(Exception):
    """The pipeline is ending: the work at hand was given up."""


def never() -> bool:
    """For work that nobody stops."""
    return False


_asked = threading.local()


@contextmanager
def stoppable(stop: Stop) -> Iterator[None]:
    """Around the work of this thread: what waits in it for others, as for a store far away, asks ``stop`` now and then."""
    before = stop_of_thread()
    _asked.stop = stop
    try:
        yield
    finally:
        _asked.stop = before


def stop_of_thread() -> Stop:
    """What this thread's work was told to ask."""
    stop: Stop = getattr(_asked, "stop", never)
    return stop
