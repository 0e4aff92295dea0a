"""A process that scans files: ``python -m gpupipe.data.scan.worker``.

A demux gives up the interpreter lock at each packet, and winning it back beside busy decode threads costs far more than the
demux. So videos that are met while an epoch runs are scanned here, and their records stored from here. The process writes one
byte when it is ready. A request is one line on standard input: the JSON of a file's identity. An answer on standard output is
the lengths of two parts, 8 bytes each, and the parts: the record, and why it could not be stored. An empty record means that it
cannot be made, which the asking process finds out again when the file's turn comes. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.store import make
from gpupipe.errors import GpupipeError, OpenError

_LENGTH_BYTES = 8
_GRACE_SECONDS = 2.0
"""What a process gets to clear up before it is killed."""
_READY = b"r"


class ScanProcess:
    """The asking side; for use by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._ended = False

    @property
    def ended(self) -> bool:
        """True once the process is no more, or is not to be."""
        return self._ended or (self._process is not None and self._process.poll() is not None)

    def make(self, identity: Identity) -> tuple[bytes, str]:
        """As :func:`gpupipe.data.scan.store.make`, in the process.

        Raises:
            OpenError: when it cannot be made there.
        """
        try:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asdict(identity)).encode() + b"\n")
            process.stdin.flush()
            head = process.stdout.read(2 * _LENGTH_BYTES)
            sizes = [int.from_bytes(part, "little") for part in (head[:_LENGTH_BYTES], head[_LENGTH_BYTES:])]
            record, not_stored = (process.stdout.read(size) for size in sizes)
        except (OSError, ValueError) as error:
            raise OpenError(f"the scanning process ended while it read {identity.path}", path=identity.path) from error
        if not record or [len(record), len(not_stored)] != sizes:
            raise OpenError(f"{identity.path} could not be scanned ahead of its turn", path=identity.path)
        return record, not_stored.decode()

    def start(self) -> bool:
        """Starts the process and waits until it is ready; False when it ended instead. May be called again."""
        if not self._ready:
            with suppress(OSError, ValueError):
                output = self._started().stdout
                assert output is not None
                self._ready = output.read(len(_READY)) == _READY
        return self._ready

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            here = str(Path(__file__).resolve().parents[3])
            search = os.pathsep.join([*filter(None, sys.path), here])  # what this process finds, without a search of its own
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-m", "gpupipe.data.scan.worker"],  # -P: a json.py lying about here is not meant
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # FFmpeg's remarks on bad files: the file's own turn tells of them
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,  # Ctrl-C is for the main process, which ends this one
            )
            if self._ended:
                self._process.terminate()
        return self._process

    def end(self) -> None:
        """Asks the process to end; from any thread. An answer that is awaited becomes an error."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """Ends the process and clears up after it; by the thread that used it."""
        self.end()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
            self._process.kill()
            with suppress(BrokenPipeError), self._process:  # closes the pipes and waits; a request may be stuck in one
                pass


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # not killed amid writing an index file
    import av  # noqa: F401  loaded before the first request, since it takes longest

    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        identity = Identity(**json.loads(line))
        try:
            record, not_stored = make(identity)
        except GpupipeError:
            record, not_stored = b"", ""
        parts = (record, not_stored.encode(errors="replace"))
        sys.stdout.buffer.write(b"".join([*(len(part).to_bytes(_LENGTH_BYTES, "little") for part in parts), *parts]))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
