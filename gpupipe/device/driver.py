"""The few calls of the CUDA driver's own interface that no package here offers, or only with a loss of the interpreter lock."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class DecodeCaps(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h. What is asked for stands first, then the answer."""

    _fields_ = [
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bits_above_8", ctypes.c_uint),
        ("_reserved", ctypes.c_uint * 3),
        ("supported", ctypes.c_ubyte),
        ("engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("most_width", ctypes.c_uint),
        ("most_height", ctypes.c_uint),
        ("most_macroblocks", ctypes.c_uint),
        ("least_width", ctypes.c_ushort),
        ("least_height", ctypes.c_ushort),
        ("_rest", ctypes.c_uint * 11),
    ]


def decode_caps(gpu: int, codec: int, chroma: int, bits: int) -> DecodeCaps:
    """What NVDEC of a GPU does with a codec (cudaVideoCodec), a chroma format (cudaVideoChromaFormat) and ``bits`` a sample.

    PyNvVideoCodec's own question makes a CUDA context each time, and ends the process where there is no memory for one.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
        OSError: when the driver has no libnvcuvid.
    """
    caps = DecodeCaps(codec=codec, chroma=chroma, bits_above_8=bits - 8)
    ask = ctypes.CDLL("libnvcuvid.so.1").cuvidGetDecoderCaps  # milliseconds: without the interpreter lock
    with _Within(primary_context(gpu)):
        _check(ask(ctypes.byref(caps)))
    return caps


@functools.cache
def _driver() -> Any:
    library = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter lock: these calls are shorter than winning it back
    for name in ("cuCtxGetCurrent", "cuCtxPopCurrent_v2"):
        getattr(library, name).argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    library.cuStreamGetCtx.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Copy), ctypes.c_void_p]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    library.cuEventCreate.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
    library.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.cuStreamWaitEvent.argtypes = _WAIT_ARGUMENTS
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuInit(0)  # nothing where somebody has done it; what fails here fails again where it is told
    return library


_WAIT_ARGUMENTS: Any = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]


@functools.cache
def _unlocked_wait() -> Any:
    """cuStreamWaitEvent without the interpreter lock."""
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitEvent
    wait.argtypes = _WAIT_ARGUMENTS
    return wait


class _Within:
    """Makes a context current for a block. It may not be the thread's, which may have used CUDA only through libraries that
    clear up. A class: a generator would cost twice as much."""

    __slots__ = ("_context",)

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        _check(_driver().cuCtxPushCurrent_v2(self._context))

    def __exit__(self, *exc: object) -> None:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [
        (f"{end}_{name}", kind)
        for end in ("source", "target")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("memory_type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("row_bytes", ctypes.c_size_t), ("rows", ctypes.c_size_t)]


_ON_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE"""


def context_of(stream: int) -> int:
    """The CUDA context of a stream's handle."""
    context = ctypes.c_void_p()
    _check(_driver().cuStreamGetCtx(stream, ctypes.byref(context)))
    return context.value or 0


def copy_rows(
    places: Iterable[tuple[int, int]],
    target_pitch: int,
    source_pitch: int,
    row_bytes: int,
    rows: int,
    *,
    stream: int,
    context: int,
) -> None:
    """Copies rows from places of a device's memory to others, (target, source) each, on a stream of ``context``. Pitches in
    bytes.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    copy = _Copy(
        source_memory_type=_ON_DEVICE, source_pitch=source_pitch,
        target_memory_type=_ON_DEVICE, target_pitch=target_pitch,
        row_bytes=row_bytes, rows=rows,
    )  # fmt: skip
    call, address = _driver().cuMemcpy2DAsync_v2, ctypes.byref(copy)
    with _Within(context):
        for copy.target_device, copy.source_device in places:
            _check(call(address, stream))


@functools.cache
def primary_context(gpu: int) -> int:
    """The context of a GPU that the CUDA runtime uses, and with it torch. It stays as long as the process."""
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu))
    return context.value or 0


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[bytes | bytearray],
    shared_bytes: int,
    *,
    stream: int,
    context: int,
) -> None:
    """Launches a kernel by its handle, on a stream of ``context``; it has read ``args`` when this returns.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    copies = [(ctypes.c_char * len(arg)).from_buffer_copy(arg) for arg in args]
    addresses = (ctypes.c_void_p * len(copies))(*[ctypes.addressof(copy) for copy in copies])
    with _Within(context):
        _check(_driver().cuLaunchKernel(function, *grid, *block, shared_bytes, stream, addresses, None))


def _check(code: int) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError((name.value or b"CUDA_ERROR_UNKNOWN").decode())


def drop_contexts(most: int) -> None:
    """Takes up to ``most`` copies of the current CUDA context off this thread's context stack; the last one stays.

    For code that pushes a context and forgets to pop it: the stack grows by an entry each time, as long as the thread lives.
    """
    driver = _driver()
    current, top = ctypes.c_void_p(), ctypes.c_void_p()
    if most <= 0 or driver.cuCtxGetCurrent(ctypes.byref(current)) != 0 or not current.value:
        return
    for _ in range(most):
        if driver.cuCtxPopCurrent_v2(ctypes.byref(top)) != 0:
            break
        if top.value != current.value:
            driver.cuCtxPushCurrent_v2(top)
            break
    driver.cuCtxGetCurrent(ctypes.byref(top))
    if top.value != current.value:
        driver.cuCtxPushCurrent_v2(current)


_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING"""


def new_stream(gpu: int) -> int:
    """The handle of a stream that is nobody else's, for good: torch's come from a pool of 32, again and again.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    stream = ctypes.c_void_p()
    with _Within(primary_context(gpu)):
        _check(_driver().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return stream.value or 0


_NO_TIMING = 2
"""CU_EVENT_DISABLE_TIMING"""


def new_event(gpu: int) -> int:
    """The handle of an event without a time, for good.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    event = ctypes.c_void_p()
    with _Within(primary_context(gpu)):
        _check(_driver().cuEventCreate(ctypes.byref(event), _NO_TIMING))
    return event.value or 0


def record_event(event: int, stream: int, gpu: int) -> None:
    """Puts an event behind all that a stream has been given so far.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    with _Within(primary_context(gpu)):
        _check(_driver().cuEventRecord(event, stream))


def wait_event(event: int, stream: int, gpu: int, *, keep_lock: bool) -> None:
    """Has what a stream is given from now on wait for an event as it was recorded last.

    Args:
        keep_lock: the interpreter lock is kept meanwhile. For streams of gpupipe's own alone: the call waits where a stream's
            queue is full, and what drains the user's may need the lock.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    wait = _driver().cuStreamWaitEvent if keep_lock else _unlocked_wait()
    with _Within(primary_context(gpu)):
        _check(wait(stream, event, 0))


_THREAD_LOCAL, _RELAXED = 1, 2
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL and CU_STREAM_CAPTURE_MODE_RELAXED"""


def begin_capture(stream: int) -> None:
    """Begins to capture what a stream is given as a CUDA graph, while other threads may use the GPU as they like.

    Raises:
        RuntimeError: with CUDA's name of what went wrong.
    """
    _check(_driver().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL))


@contextmanager
def beside_capture() -> Iterator[None]:
    """Within the block this thread may do what is not to be a part of its capture and would spoil it: load a kernel, say."""
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    _check(exchange(ctypes.byref(mode)))  # which leaves there the one that was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def graph_nodes(graph: int) -> int:
    """Nodes of a CUDA graph by its handle: what would be launched one by one without it. 0 where CUDA does not say."""
    count = ctypes.c_size_t()
    failed = _driver().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    return 0 if failed else int(count.value)
