"""This process's heap, kept from growing over what is in use.

On the CPU several threads allocate and free clips, planes and batches in turn. That leaves glibc's heap in pieces, which it
keeps: over some epochs a process grew to more than twice what it was after the first batches, and stayed there.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

_EVERY_SECONDS = 3.0
"""How often the heap is tidied, at most. It takes some tens of milliseconds, in which other threads wait for memory in turn; no
difference in processor time was measured."""
_lock = threading.Lock()
_tidied = time.monotonic()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function of this name; None where there is none."""
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim  # type: ignore[no-any-return]


def tidy() -> None:
    """Gives pages of the heap that nobody uses back to the system, now and then; for long work to call as often as it likes."""
    global _tidied
    if time.monotonic() - _tidied < _EVERY_SECONDS or not _lock.acquire(blocking=False):
        return
    try:
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
        _tidied = time.monotonic()
    finally:
        _lock.release()
