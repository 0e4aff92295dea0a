"""Software decoding in a process of its own, beside NVDEC.

PyAV's decoders give up the interpreter lock and win it back at each packet. In the process of the NVDEC threads that starves
these: a dozen software threads cut their rate on small frames by more than half. So software decoding beside NVDEC is done by
processes that run :mod:`gpupipe.data.decode.worker`. Frames come back through memory that both processes map.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpupipe.data.bytes import held
from gpupipe.data.child import Child, ChildEnded
from gpupipe.data.limit import most_open
from gpupipe.data.plan import Plan
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.errors import DecodeError, DeviceError, DeviceMemoryError, OpenError
from gpupipe.types import PlaneFormat, Planes

if TYPE_CHECKING:
    from gpupipe.data.index import VideoIndex

_START_SECONDS = 120.0
"""How long a process may take to get ready."""
_ERRORS: dict[str, type[OpenError | DecodeError | DeviceError | DeviceMemoryError]] = {
    "OpenError": OpenError,
    "DecodeError": DecodeError,
    "DeviceError": DeviceError,
    "DeviceMemoryError": DeviceMemoryError,
}


class DecodeProcess:
    """The asking side: decodes one plan at a time in a process that it starts, and starts again after a failure.

    For use by one thread.

    Args:
        nice: how much lower the process's priority is than this one's, 0 to 19.
    """

    def __init__(self, nice: int = 0) -> None:
        self.nice = nice
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._child: Child | None = None
        self._killed = False

    @property
    def ready(self) -> bool:
        """Whether a decode would begin at once."""
        return self._child is not None and self._child.ready

    def get_ready(self, stop: Stop = never) -> None:
        """Starts the process where there is none, or it has ended, and waits until it is ready.

        Raises:
            DeviceError: when it cannot be had.
            Stopped: when ``stop()`` turned true. The process goes on getting ready.
        """
        if self._child is not None and self._child.ended:
            self._drop_child()
        self._start(stop)

    def _start(self, stop: Stop) -> tuple[Child, IO[bytes]]:
        """The process, ready, and the memory shared with it. Raises as :meth:`get_ready`."""
        begin = time.monotonic()
        try:
            if self._file is None:
                self._file = _nameless_file()
            for _ in range(2):  # somebody may have ended it, as the system does when memory is short for a moment
                if self._child is None:
                    self._child = Child("gpupipe.data.decode.worker", [self._file.fileno()], self.nice)
                if self._killed:  # asked after the child is there to be killed, so that none slips through
                    raise Stopped
                if self._child.start(lambda: stop() or time.monotonic() - begin > _START_SECONDS):
                    return self._child, self._file
                why = self._child.why
                self._drop_child()
            raise OSError(f"twice {why}")
        except Stopped:
            if stop() or self._killed:
                raise
            self._drop_child()
            raise _no_process(f"it was not ready within {_START_SECONDS:g} s") from None
        except OSError as error:  # no fault of the video
            self._drop_child()
            raise _no_process(str(error)) from error
        except BaseException:
            self._drop_child()
            raise

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never, damaged: list[int] | None = None) -> Planes:
        """As :func:`gpupipe.data.decode.cpu.decode`; the planes are valid until the next call.

        Raises:
            OpenError, DecodeError: as there, and when the process ends amid the work, as a damaged file may make it.
            DeviceError: when there is no process to be had.
            Stopped: when ``stop()`` turned true.
        """
        import torch

        path = index.identity.path
        request: dict[str, Any] = {"identity": index.identity.as_dict(), "frames": plan.frames}
        with held.shared(path) as request["at"]:
            try:
                answer, file = self._ask(request, stop)
            except ChildEnded:
                try:  # somebody may have ended it: that is no fault of the file's, unless it happens again
                    answer, file = self._ask(request, stop)
                except ChildEnded as error:
                    raise DecodeError(
                        f"{path}: the process that decoded it ended, twice",
                        fix="is the file damaged, or memory short?",
                        path=path,
                    ) from error
        told = json.loads(answer)
        if "error" in told:
            kind = _ERRORS.get(told["error"], DecodeError)
            raise kind(told["message"], fix=told["fix"], path=path, time_seconds=told["time_seconds"])
        if damaged is not None:
            damaged += told["damaged"]
        layout = PlaneFormat(**told["format"])
        shape = (len(plan.frames), layout.rows, layout.row_samples)
        dtype = np.uint8 if layout.sample_bytes == 1 else np.uint16
        samples = np.frombuffer(self._mapped(file.fileno()), dtype, int(np.prod(shape)))
        return Planes(torch.from_numpy(samples.reshape(shape)), layout)

    def _ask(self, request: dict[str, Any], stop: Stop) -> tuple[bytes, IO[bytes]]:
        """The answer, and the memory shared with the process. Raises ChildEnded, and as :meth:`get_ready`."""
        child, file = self._start(stop)
        try:
            (answer,) = child.ask(request, stop)
        except BaseException:  # an answer that is not taken would be that to the next request
            self._drop_child()
            raise
        return answer, file

    def _mapped(self, file: int) -> mmap.mmap:
        size = os.fstat(file).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(file, size)  # the old one goes with the last planes in it
        return self._map

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def kill(self) -> None:
        """Ends the process at once, and lets no other begin; from any thread."""
        self._killed = True
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Ends the process and lets go of the memory."""
        self._drop_child()
        self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _no_process(why: str) -> DeviceError:
    return DeviceError(
        f"a process that decodes in software cannot be started: {why}",
        fix=f"free processes, memory or open files (there may be {most_open()}: ulimit -n), or set decode.cpu_workers to 0 on "
        "the CPU",
    )


def _nameless_file() -> IO[bytes]:
    """Memory that processes can share: not in /dev/shm, which containers make small."""
    if hasattr(os, "memfd_create"):
        import fcntl  # where there is no memfd, as on Windows, there may be none of this either

        file = os.memfd_create("gpupipe-planes")
        if file < 3:  # in a process whose standard streams are closed, its child would take it for one of these
            low, file = file, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(low)
        return open(file, "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
