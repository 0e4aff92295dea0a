"""The few calls of the CUDA driver's own interface that no package here offers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def _driver() -> Any:
    library = ctypes.PyDLL("libcuda.so.1")  # keeps the interpreter lock: these calls are shorter than winning it back
    for name in ("cuCtxGetCurrent", "cuCtxPopCurrent_v2"):
        getattr(library, name).argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    return library


def unwind_contexts() -> None:
    """Leaves this thread with its current CUDA context alone on its context stack.

    For code that pushes contexts without popping them: the stack grows by an entry each time, for as long as the thread lives.
    """
    driver = _driver()
    current, popped = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(current)) != 0 or not current.value:
        return
    while driver.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0 and popped.value:
        pass
    driver.cuCtxPushCurrent_v2(current)
