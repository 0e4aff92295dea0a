"""A process that scans files and stores their records: ``python -m gpupipe.data.scan.worker``.

A demux gives up the interpreter lock at each packet, and winning it back beside busy decode threads costs far more than the
demux. So videos that are met while an epoch runs are scanned here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

from gpupipe.data.bytes import Identity, held
from gpupipe.data.child import Child, ChildEnded, serve
from gpupipe.data.scan.store import make
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.errors import GpupipeError, OpenError
from gpupipe.telemetry import log

_NICE = 5
"""Below the threads that decode and the user's own work; above processes that only help: the first batch waits for indices."""
_START_SECONDS = 20.0
"""How long a process may take to get ready; most need less than one."""
_LIMIT_SECONDS = 120.0
"""How long an answer may take; a film of two hours takes three seconds, and only short ones are asked for together."""


class ScanProcess(Child):
    """The asking side."""

    def __init__(self) -> None:
        super().__init__("gpupipe.data.scan.worker", nice=_NICE)

    def start(self, stop: Stop = never) -> bool:
        """As :meth:`Child.start`; a process that does not get ready in time is killed.

        Raises:
            Stopped: when ``stop()`` turned true.
        """
        begin = time.monotonic()
        try:
            return super().start(lambda: stop() or time.monotonic() - begin > _START_SECONDS)
        except Stopped:
            if stop():
                raise
            self.kill()
            with _telling:  # two threads may find so at once
                _tell_of_the_late()
            return False

    def make(self, identity: Identity) -> tuple[bytes, str]:
        """As :func:`gpupipe.data.scan.store.make`, in the process.

        Raises:
            OpenError: when it cannot be made there: the file's own turn will tell why.
        """
        (made,) = self.make_all([identity])
        if made is None:
            raise OpenError(f"{identity.path} could not be scanned ahead of its turn", path=identity.path)
        return made

    def make_all(self, identities: Sequence[Identity]) -> list[tuple[bytes, str] | None]:
        """As :meth:`make` for each; None for one that cannot be made there.

        Raises:
            OpenError: when the process has ended.
        """
        if not identities:
            return []
        try:
            with ExitStack() as lent:
                files = [{"identity": identity.as_dict(), "at": _lent(identity, lent)} for identity in identities]
                begin = time.monotonic()
                parts = self.ask({"files": files}, lambda: self._ended or time.monotonic() - begin > _LIMIT_SECONDS)
        except (ChildEnded, Stopped) as error:
            self.end()
            path = identities[0].path
            raise OpenError(f"the scanning process ended while it read {path}", path=path) from error
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [(record, not_stored.decode()) if record else None for record, not_stored in pairs]


def _lent(identity: Identity, lent: ExitStack) -> str | None:
    """Where the process finds the bytes of a video that only this program has; it will say that it found none where these
    cannot be had."""
    with suppress(GpupipeError, OSError):  # OSError: no more files, or no memory for a copy
        return lent.enter_context(held.shared(identity.path))
    return None


_telling = threading.Lock()


@cache  # told once
def _tell_of_the_late() -> None:
    log.warning(
        "a process that scans videos was not ready within %g s and is given up; what it was to scan is scanned in this one",
        _START_SECONDS,
    )


def _answer(request: dict[str, Any]) -> list[bytes]:
    return [part for file in request["files"] for part in _made(Identity(**file["identity"]), file["at"])]


def _made(identity: Identity, at: str | None) -> tuple[bytes, bytes]:
    try:
        with held.lent(identity.path, at):
            record, not_stored = make(identity)
    except GpupipeError:
        return b"", b""
    return record, not_stored.encode(errors="replace")


if __name__ == "__main__":
    import av  # noqa: F401  loaded before the first request, since it takes longest

    serve(_answer)
