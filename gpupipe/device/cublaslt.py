"""A matrix product whose epilogue stores two results: what cuBLASLt has and torch does not offer.

The library is the one that torch itself has loaded, and works on torch's own handle and stream. Names and numbers are those of
cublasLt.h (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch

_TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""CUDA_R_16BF and CUDA_R_16F."""
_R_32F, _COMPUTE_32F = 0, 68
_TRANSA, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD = 3, 7, 8, 11, 12
"""Of CUBLASLT_MATMUL_DESC_…"""
_OP_T = 1
_GELU_AUX, _GELU_AUX_BIAS = 160, 164
_MAX_WORKSPACE_BYTES = 1
"""Of CUBLASLT_MATMUL_PREF_…"""
_WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends on Hopper and later."""
_ALIGNED = 16
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("_reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library() -> Any:
    """None where it is not there."""
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        # It keeps the interpreter lock: a call is shorter than winning it back, and no thread may come between its parts.
        library = ctypes.PyDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None
    handle, size = ctypes.c_void_p, ctypes.c_size_t
    library.cublasLtMatmulDescCreate.argtypes = [ctypes.POINTER(handle), ctypes.c_int, ctypes.c_int]
    library.cublasLtMatmulDescSetAttribute.argtypes = [handle, ctypes.c_int, handle, size]
    library.cublasLtMatrixLayoutCreate.argtypes = [
        ctypes.POINTER(handle), ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64
    ]  # fmt: skip
    library.cublasLtMatmulPreferenceCreate.argtypes = [ctypes.POINTER(handle)]
    library.cublasLtMatmulPreferenceDestroy.argtypes = [handle]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [handle, ctypes.c_int, handle, size]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [
        *[handle] * 7, ctypes.c_int, ctypes.POINTER(_Found), ctypes.POINTER(ctypes.c_int)
    ]  # fmt: skip
    library.cublasLtMatmul.argtypes = [*[handle] * 14, size, handle]
    return library


@dataclass
class _Plan:
    """A product of one shape. It is of one thread, which writes pointers into it before each use."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    y: ctypes.c_void_p
    found: _Found


_plans = threading.local()


def gelu_and_input(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """GELU in its tanh form of ``x @ weight.T + bias``, applied to sums in float32, and what it was applied to, rounded.

    Args:
        x: (M, K), rows contiguous, bfloat16 or float16, on a CUDA device.
        weight: (N, K), rows contiguous, of that type.
        bias: (N,), contiguous, of that type.

    Returns:
        (M, N) twice, contiguous: the input of GELU, and its result. None where cuBLASLt does not serve: another type, rows that
        are not aligned to 16 bytes, no algorithm, no library.
    """
    library = _library()
    rows, inner = x.shape
    size = weight.shape[0]
    kind = _TYPES.get(x.dtype)
    if library is None or kind is None or 0 in (rows, inner, size) or size % 8:
        return None
    steps = (x.stride(0) if rows > 1 else inner, weight.stride(0) if size > 1 else inner)
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(each.data_ptr() % _ALIGNED for each in given) or any(step * x.element_size() % _ALIGNED for step in steps):
        return None
    with torch.cuda.device(x.device):
        pre, y = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
        handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        plans: dict[Any, _Plan | None] = vars(_plans).setdefault("known", {})
        key = (x.device.index, kind, rows, inner, size, steps, bias is None)
        if key not in plans:
            plans[key] = _planned(library, handle, kind, rows, inner, size, steps, bias, pre)
        plan = plans[key]
        if plan is None:
            return None
        _point(library, plan.operation, bias, pre)
        workspace = torch.empty(plan.found.workspace_bytes, dtype=torch.uint8, device=x.device)
        status = library.cublasLtMatmul(
            handle, plan.operation, ctypes.addressof(_ONE), weight.data_ptr(), plan.weight, x.data_ptr(), plan.x,
            ctypes.addressof(_ZERO), y.data_ptr(), plan.y, y.data_ptr(), plan.y, ctypes.addressof(plan.found.algorithm),
            workspace.data_ptr(), plan.found.workspace_bytes, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    if status != 0:
        plans[key] = None
        return None
    return pre, y


def _planned(
    library: Any, handle: int, kind: int, rows: int, inner: int, size: int, steps: tuple[int, int], bias: Any, pre: torch.Tensor
) -> _Plan | None:
    """The fastest algorithm by cuBLASLt's own estimate; None where there is none.

    Its matrices are stored by columns, so that what is (M, N) here is (N, M) there: weight transposed, times x.
    """
    operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
    if library.cublasLtMatmulDescCreate(ctypes.byref(operation), _COMPUTE_32F, _R_32F) != 0:
        return None
    _set(library, operation, _TRANSA, ctypes.c_int32(_OP_T))
    _set(library, operation, _EPILOGUE, ctypes.c_int32(_GELU_AUX if bias is None else _GELU_AUX_BIAS))
    _set(library, operation, _AUX_LD, ctypes.c_int64(size))
    _point(library, operation, bias, pre)
    layouts = [ctypes.c_void_p() for _ in range(3)]
    shapes = ((inner, size, steps[1]), (inner, rows, steps[0]), (size, rows, size))
    for layout, shape in zip(layouts, shapes, strict=True):
        if library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *shape) != 0:
            return None
    found, count, most = _Found(), ctypes.c_int(), ctypes.c_size_t(_WORKSPACE_BYTES)
    library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
    library.cublasLtMatmulPreferenceSetAttribute(
        preference, _MAX_WORKSPACE_BYTES, ctypes.addressof(most), ctypes.sizeof(most)
    )  # fmt: skip
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, *layouts[:2], layouts[2], layouts[2], preference, 1, ctypes.byref(found), ctypes.byref(count)
    )  # fmt: skip
    library.cublasLtMatmulPreferenceDestroy(preference)
    if status != 0 or count.value == 0 or found.status != 0:
        return None
    return _Plan(operation, layouts[0], layouts[1], layouts[2], found)


def _point(library: Any, operation: ctypes.c_void_p, bias: torch.Tensor | None, pre: torch.Tensor) -> None:
    _set(library, operation, _AUX_POINTER, ctypes.c_void_p(pre.data_ptr()))
    if bias is not None:
        _set(library, operation, _BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))


def _set(library: Any, operation: ctypes.c_void_p, name: int, value: Any) -> None:
    library.cublasLtMatmulDescSetAttribute(operation, name, ctypes.addressof(value), ctypes.sizeof(value))
