"""A process that scans files and stores their records: ``python -m gpupipe.data.scan.worker``.

A demux gives up the interpreter lock at each packet, and winning it back beside busy decode threads costs far more than the
demux. So videos that are met while an epoch runs are scanned here.
"""

from __future__ import annotations

import time
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
"""How long a scan may take; a film of two hours takes three seconds."""


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
            _tell_of_the_late()
            return False

    def make(self, identity: Identity) -> tuple[bytes, str]:
        """As :func:`gpupipe.data.scan.store.make`, in the process.

        Raises:
            OpenError: when it cannot be made there: the file's own turn will tell why.
        """
        begin = time.monotonic()
        try:
            with held.shared(identity.path) as at:
                request = {"identity": identity.as_dict(), "at": at}
                record, not_stored = self.ask(request, lambda: self._ended or time.monotonic() - begin > _LIMIT_SECONDS)
        except (ChildEnded, Stopped) as error:
            self.end()
            raise OpenError(f"the scanning process ended while it read {identity.path}", path=identity.path) from error
        if not record:
            raise OpenError(f"{identity.path} could not be scanned ahead of its turn", path=identity.path)
        return record, not_stored.decode()


@cache  # told once
def _tell_of_the_late() -> None:
    log.warning(
        "a process that scans videos was not ready within %g s and is given up; what it was to scan is scanned in this one",
        _START_SECONDS,
    )


def _answer(request: dict[str, Any]) -> tuple[bytes, bytes]:
    try:
        identity = Identity(**request["identity"])
        with held.lent(identity.path, request["at"]):
            record, not_stored = make(identity)
    except GpupipeError:
        return b"", b""
    return record, not_stored.encode(errors="replace")


if __name__ == "__main__":
    import av  # noqa: F401  loaded before the first request, since it takes longest

    serve(_answer)
