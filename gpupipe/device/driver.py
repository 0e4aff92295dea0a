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
