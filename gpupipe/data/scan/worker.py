"""A process that scans files: ``python -m gpupipe.data.scan.worker``.

A demux gives up the interpreter lock at each packet, and winning it back beside busy decode threads costs more than the
demux. So videos that are met while an epoch runs are scanned here. The process writes one byte when it is ready. A request is
one line on standard input: the JSON of a file's identity. An answer on standard output is 8 bytes of length and then the
pickled scan; length 0 means that it cannot be made, which the asking process finds out again when the file's turn comes. The
process ends with its input.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from gpupipe.data.bytes import Identity
from gpupipe.data.scan.scan import Scan, scan
from gpupipe.errors import GpupipeError, OpenError

_LENGTH_BYTES = 8
_READY = b"r"


class ScanProcess:
    """The asking side; for use by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def scan(self, identity: Identity) -> Scan:
        """The scan of a file, made by the process.

        Raises:
            OpenError: when it cannot be made there.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(identity)).encode() + b"\n")
            process.stdin.flush()
            size = int.from_bytes(process.stdout.read(_LENGTH_BYTES), "little")
            data = process.stdout.read(size)
        except (OSError, ValueError) as error:
            raise OpenError(f"the scanning process ended while it read {identity.path}", path=identity.path) from error
        if not size or len(data) != size:
            raise OpenError(f"{identity.path} could not be scanned ahead of its turn", path=identity.path)
        found: Scan = pickle.loads(data)
        return found

    def start(self) -> bool:
        """Starts the process and waits until it is ready; False when it ended instead."""
        with suppress(OSError, ValueError):
            output = self._started().stdout
            assert output is not None
            return output.read(len(_READY)) == _READY
        return False

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            here = str(Path(__file__).resolve().parents[3])
            search = os.pathsep.join([here, *filter(None, sys.path)])  # what this process finds, without a search of its own
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-m", "gpupipe.data.scan.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # FFmpeg's remarks on bad files: the file's own turn tells of them
                env={**os.environ, "PYTHONPATH": search},
                start_new_session=True,  # Ctrl-C is for the main process, which ends this one
            )
            if self._ended:
                self._process.kill()
        return self._process

    def end(self) -> None:
        """Ends the process at once; from any thread. An answer that is awaited becomes an error."""
        self._ended = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process and clears up after it; by the thread that used it."""
        self.end()
        if self._process is not None:
            with suppress(BrokenPipeError), self._process:  # closes the pipes and waits; a request may be stuck in one
                pass


def main() -> None:
    import av  # noqa: F401  loaded before the first request, since it takes longest

    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        identity = Identity(**json.loads(line))
        try:
            data = pickle.dumps(scan(identity))
        except GpupipeError:
            data = b""
        sys.stdout.buffer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
