"""How many files this process may have open, and what is said when it may open no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpupipe.errors import DeviceError

_FIX = "raise it (`ulimit -n 4096` before the start), or use fewer decode.threads, decode.cpu_workers and cache.open_files"


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


@contextmanager
def within_limit(what: str) -> Iterator[None]:
    """Around ``what`` opens files in ways of its own, as Python does for a module that is loaded late.

    Raises:
        DeviceError: in the place of the error of a file too many.
    """
    try:
        yield
    except (OSError, ImportError) as error:
        if not too_many(error):
            raise
        raise no_more_files(what) from error
