"""What the system lets this process have: open files, threads, memory; and what is said when it gives no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpupipe.errors import DeviceError, DeviceMemoryError

_FIX = "raise it (`ulimit -n 4096` before the start), or use fewer decode.threads, decode.cpu_workers and cache.open_files"
_NO_MAP = ("failed to map segment", "cannot map zero-fill pages", "cannot allocate memory")
"""What the dynamic linker says of a library that has no room."""
_NO_THREAD = "can't start new thread"
_SPARE_BYTES = 64 << 20
"""More than FFmpeg asks for at once, but for the largest pictures."""


def most_open() -> int:
    """How many files this process may have open."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def too_many(error: BaseException) -> bool:
    """Whether this is the error of a file too many, or of a module whose library is one."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # FFmpeg's errors have one too
        return True
    return isinstance(error, ImportError) and os.strerror(errno.EMFILE) in str(error)


def no_more_files(what: str, path: str | None = None) -> DeviceError:
    """The error that says so; ``what`` could not be done."""
    reason = os.strerror(errno.EMFILE)
    return DeviceError(f"{what}: {reason}, this process may have {most_open()} (ulimit -n)", fix=_FIX, path=path)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the error of memory that was not to be had, or of a module whose library found none."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, ImportError) and any(sign in str(error) for sign in _NO_MAP)


def memory_is_short() -> bool:
    """Whether FFmpeg's error, whatever it says, may be for want of memory.

    It takes that for damage, as its H.264 decoder does, and damage has it ask for more than any machine has. So not the error
    tells, but whether a usual amount is to be had.
    """
    try:
        bytes(_SPARE_BYTES)  # of which no page is touched
    except MemoryError:
        return True
    return False


def no_more_memory(what: str, error: BaseException, path: str | None = None) -> DeviceMemoryError:
    """The error that says so; ``what`` could not be done."""
    return DeviceMemoryError(
        f"{what}: this machine is out of memory: {str(error).strip() or 'no message'}",
        fix="free memory or raise its limit (ulimit -v, the container's), or use smaller batches, clips or sizes, a smaller "
        "jitter depth, fewer decode.threads or decode.cpu_workers",
        path=path,
    )


@contextmanager
def within_limit(what: str) -> Iterator[None]:
    """Around ``what`` opens files, starts threads and takes memory in ways of its own, as Python does for a module that is
    loaded late.

    Raises:
        DeviceError: in the place of the error of a file or a thread too many.
        DeviceMemoryError: in the place of that of memory that was not to be had.
    """
    try:
        yield
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        if too_many(error):
            raise no_more_files(what) from error
        if out_of_memory(error):
            raise no_more_memory(what, error) from error
        if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
            raise DeviceError(
                f"{what}: {error}",
                fix="raise the limits on processes and memory (ulimit -u, ulimit -v, the container's), or use fewer "
                "decode.threads",
            ) from error
        raise
