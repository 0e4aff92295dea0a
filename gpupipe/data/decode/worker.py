"""A process that decodes in software: ``python -m gpupipe.data.decode.worker FILE_DESCRIPTOR``; see :mod:`.process`."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gpupipe.data import index as indices
from gpupipe.data.bytes import Identity, held
from gpupipe.data.child import serve
from gpupipe.data.decode.cpu import decode_arrays
from gpupipe.data.limit import within_limit
from gpupipe.data.plan import make_plan
from gpupipe.data.stop import never
from gpupipe.errors import DeviceError, GpupipeError, OpenError


class _Shared:
    """The process's side of the memory."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in the shared memory, which grows as needed.

        Raises:
            DeviceError: when there is no room for it.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._map is None or len(self._map) < size:
            try:
                os.ftruncate(self._file, size)
                self._map = mmap.mmap(self._file, size)
            except OSError as error:  # no fault of the video
                raise DeviceError(
                    f"no room for {size} bytes of decoded frames that two processes share: {error.strerror}",
                    fix="free memory, raise the limits on memory and file size (ulimit), or set decode.cpu_workers to 0",
                ) from error
        return np.frombuffer(self._map, dtype, int(np.prod(shape))).reshape(shape)


def _answer(request: dict[str, Any], shared: _Shared) -> Sequence[bytes]:
    identity = Identity(**request["identity"])
    try:
        damaged: list[int] = []
        with within_limit(f"{identity.path} cannot be decoded"), held.lent(identity.path, request["at"]):
            index = indices.load(identity.path)
            if index.identity != identity:
                raise OpenError(
                    f"{identity.path} was replaced or changed after it was indexed",
                    fix="is it being written?",
                    path=identity.path,
                )
            _, layout = decode_arrays(index, make_plan(index, request["frames"]), never, shared.allocate, damaged=damaged)
    except GpupipeError as error:
        told = {"error": type(error).__name__, "message": error.message, "fix": error.fix}
        told["time_seconds"] = getattr(error, "time_seconds", None)
        return [json.dumps(told).encode()]
    return [json.dumps({"format": asdict(layout), "damaged": damaged}).encode()]


def main(file: int) -> None:
    import av  # noqa: F401  loaded before the first request, since it takes longest

    shared = _Shared(file)
    serve(lambda request: _answer(request, shared))


if __name__ == "__main__":
    main(int(sys.argv[1]))
