"""Helper processes: plain subprocesses of this interpreter that answer one request at a time and end with their input.

Not multiprocessing, which runs the user's own script again and breaks where that has no guard. A process writes one byte when
it is ready. A request is one line of JSON; an answer is the number of its parts, the length of each and the parts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from gpupipe.data.bytes import settings
from gpupipe.data.stop import Stop, Stopped, never

_READY = b"r"
_NUMBER_BYTES = 8
_GRACE_SECONDS = 2.0
"""What a process gets to clear up before it is killed."""
_ASK_SECONDS = 0.05
"""How often a thread that waits for an answer asks whether it is still wanted."""


class ChildEnded(Exception):
    """The process ended before it answered, or was not to be had."""


class Child:
    """A process that runs ``module``, started when it is first needed; for use by one thread.

    Args:
        module: one that calls :func:`serve` when it is run.
        shared: file descriptors that the process gets too, under the same numbers, which are its arguments.
        nice: how much lower its priority is than this process's, 0 to 19; where the system has such.
    """

    def __init__(self, module: str, shared: Sequence[int] = (), nice: int = 0) -> None:
        self._module = module
        self._shared = shared
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._ended = False
        self._errors: IO[bytes] | None = None
        self._refused: Exception | None = None

    @property
    def ended(self) -> bool:
        """True once the process is no more, or is not to be."""
        return self._ended or (self._process is not None and self._process.poll() is not None)

    @property
    def ready(self) -> bool:
        """True while it answers at once."""
        return self._ready and not self.ended

    def start(self, stop: Stop = never) -> bool:
        """Starts the process and waits until it is ready; False when it ended instead. May be called again.

        Raises:
            Stopped: when ``stop()`` turned true.
        """
        if self._ended and self._process is None:
            self._refused = ChildEnded("it was ended before it was started")
            return False
        if not self._ready:
            try:
                output = self._started().stdout
                assert output is not None
                _wait(output, stop)
                self._ready = output.read(len(_READY)) == _READY
            except (OSError, ValueError) as error:
                self._refused = error
        return self._ready

    def begin(self) -> None:
        """Starts the process and does not wait; :meth:`start` then does, and tells whether it came to anything."""
        with suppress(OSError, ValueError):
            self._started()

    @property
    def heard(self) -> bool:
        """True once :meth:`start` would not wait, or an answer has begun to come."""
        if self._process is None or self._process.stdout is None:
            return True
        return _readable(self._process.stdout, 0.0)

    @property
    def why(self) -> str:
        """What is known of a start that came to nothing."""
        if self._process is None or self._refused is not None:
            return str(self._refused)
        with suppress(subprocess.TimeoutExpired):  # its output ends a little before it does
            self._process.wait(_GRACE_SECONDS)
        status, said = self._process.poll(), ""
        if self._errors is not None:
            self._errors.seek(0)
            said = next(
                (f": {line}" for line in reversed(self._errors.read().decode(errors="replace").splitlines()) if line), ""
            )
        if status is None or status >= 0:
            return f"it ended with exit status {status} before it was ready{said}"
        memory = ", as for want of memory," if status == -9 else ""
        return f"it was ended by signal {-status}{memory} before it was ready{said}"

    def ask(self, request: Mapping[str, Any], stop: Stop = never) -> list[bytes]:
        """The parts of the answer to a request. After anything but an answer the process is of no more use.

        Raises:
            ChildEnded: when there is none.
            Stopped: when ``stop()`` turned true.
        """
        if not self.start(stop):
            raise ChildEnded
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            _wait(process.stdout, stop)
            return _read_parts(process.stdout)
        except (OSError, ValueError) as error:
            raise ChildEnded from error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            here = str(Path(__file__).resolve().parents[2])
            with suppress(OSError):  # nowhere to write: then it is not heard why it cannot start
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
            search = os.pathsep.join([*filter(None, sys.path), here])  # what this process finds, without a search of its own
            self._process = subprocess.Popen(
                # -P: a json.py that lies about in the working directory is not meant
                [sys.executable, "-S", "-P", "-m", self._module, *map(str, self._shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors or subprocess.DEVNULL,
                env={**os.environ, **settings.environment(), "PYTHONPATH": search},
                pass_fds=self._shared,
                # Ctrl-C is for the main process, which ends this one. A session of its own would see to that too, but Linux may
                # give each session like shares of the cores (autogroups), whatever the priorities of its processes.
                process_group=0,
            )
            if self._nice:
                _lower(self._process.pid, self._nice)
            if self._ended:
                self._process.terminate()
        return self._process

    def end(self) -> None:
        """Asks the process to end; from any thread. An answer that is awaited does not come."""
        self._ended = True
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process at once; from any thread."""
        self._ended = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process and clears up after it; by the thread that used it."""
        self.end()
        if self._process is not None:
            if self._ready:  # else it has nothing to clear up, and may never come to it
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_SECONDS)
            self._process.kill()
            with suppress(BrokenPipeError), self._process:  # closes the pipes and waits; a request may be stuck in one
                pass
        if self._errors is not None:
            self._errors.close()


def _lower(process: int, nice: int) -> None:
    """Lowers the priority of a process that has just begun: its further threads will have the same."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):  # it is no more
            os.setpriority(os.PRIO_PROCESS, process, min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice))


def _leave(*_: object) -> None:
    """An orderly end, in which files half written are removed; once, so that a second signal does not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def serve(answer: Callable[[dict[str, Any]], Sequence[bytes]]) -> None:
    """The process's side: answers requests until its input ends."""
    signal.signal(signal.SIGTERM, _leave)
    output = sys.stdout.buffer
    with open(os.devnull, "wb") as nowhere:  # from here on: FFmpeg's remarks on bad files, of which errors tell
        os.dup2(nowhere.fileno(), 2)
    output.write(_READY)
    output.flush()
    for line in sys.stdin.buffer:
        parts = answer(json.loads(line))
        numbers = [len(parts), *(len(part) for part in parts)]
        output.write(b"".join([*(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers), *parts]))
        output.flush()


def _wait(stream: IO[bytes], stop: Stop) -> None:
    """Waits until there is something to read.

    Raises:
        Stopped: when ``stop()`` turned true.
    """
    while stop is not never and not _readable(stream, _ASK_SECONDS):
        if stop():
            raise Stopped


def _readable(stream: IO[bytes], seconds: float) -> bool:
    """Whether there is something to read within this time. Not by ``select.select``, which knows no descriptors beyond 1023."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _read_parts(stream: BinaryIO | Any) -> list[bytes]:
    """Raises: ValueError: when the stream ends amid the answer."""

    def exactly(size: int) -> bytes:
        data: bytes = stream.read(size)
        if len(data) != size:
            raise ValueError("the answer ends early")
        return data

    def number() -> int:
        return int.from_bytes(exactly(_NUMBER_BYTES), "little")

    return [exactly(size) for size in [number() for _ in range(number())]]
