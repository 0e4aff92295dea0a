"""Giving up work that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]
"""Asked now and then by long work: true when it is to be given up."""


class Stopped(Exception):
    """The pipeline is ending: the work at hand was given up."""


def never() -> bool:
    """For work that nobody stops."""
    return False
