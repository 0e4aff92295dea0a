"""A matrix product whose epilogue stores two results: what cuBLASLt has and torch does not offer.

The library is the one that torch itself has loaded, and works on torch's own handle and stream. Names and numbers are those of
cublasLt.h (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api), alike in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
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
_MAX_WORKSPACE_BYTES, _REDUCTION_SCHEME_MASK, _MIN_ALIGNMENT_A_BYTES, _MIN_ALIGNMENT_B_BYTES = 1, 3, 5, 6
"""Of CUBLASLT_MATMUL_PREF_…"""
_REDUCTION_SCHEME_COMPUTE_TYPE = 2
_WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends on Hopper and later."""
_ALIGNED, _MOST_ALIGNED = 16, 256
"""Bytes: what rows must be aligned to here, and what cuBLASLt takes a matrix to be aligned to unless it is told."""
_MOST_PLANS = 1024
"""Kept by a thread, a kilobyte or so each: batches of many lengths need many."""
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
    """None where torch has not loaded it: another copy could do nothing with torch's handle."""
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        # It keeps the interpreter lock: a call is shorter than winning it back.
        library = ctypes.PyDLL(f"libcublasLt.so.{major}", mode=getattr(os, "RTLD_NOLOAD", 0))
    except OSError:
        return None
    handle, size = ctypes.c_void_p, ctypes.c_size_t
    library.cublasLtMatmulDescCreate.argtypes = [ctypes.POINTER(handle), ctypes.c_int, ctypes.c_int]
    library.cublasLtMatrixLayoutCreate.argtypes = [
        ctypes.POINTER(handle), ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64
    ]  # fmt: skip
    library.cublasLtMatmulPreferenceCreate.argtypes = [ctypes.POINTER(handle)]
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{kind}SetAttribute").argtypes = [handle, ctypes.c_int, handle, size]
        getattr(library, f"cublasLt{kind}Destroy").argtypes = [handle]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [
        *[handle] * 7, ctypes.c_int, ctypes.POINTER(_Found), ctypes.POINTER(ctypes.c_int)
    ]  # fmt: skip
    library.cublasLtMatmul.argtypes = [*[handle] * 14, size, handle]
    return library


class _Refused(Exception):
    """A status that is not CUBLAS_STATUS_SUCCESS, or no algorithm."""


def _call(function: Any, *given: Any) -> None:
    if function(*given) != 0:
        raise _Refused


class _Object:
    """What cuBLASLt makes of a kind such as ``MatmulDesc``; it goes with this."""

    def __init__(self, library: Any, kind: str, *given: Any) -> None:
        self.handle = ctypes.c_void_p()
        self._set = getattr(library, f"cublasLt{kind}SetAttribute")
        _call(getattr(library, f"cublasLt{kind}Create"), ctypes.byref(self.handle), *given)
        weakref.finalize(self, getattr(library, f"cublasLt{kind}Destroy"), self.handle).atexit = False

    def set(self, name: int, value: Any) -> None:
        _call(self._set, self.handle, name, ctypes.addressof(value), ctypes.sizeof(value))


@dataclass
class _Plan:
    """A product of one shape. It is of one thread, which writes pointers into it before each use."""

    operation: _Object
    weight: _Object
    x: _Object
    y: _Object
    found: _Found


_plans = threading.local()


def gelu_and_input(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """GELU in its tanh form of ``x @ weight.T + bias``, applied to sums in float32, and what it was applied to, rounded.

    Args:
        x: (M, K), rows contiguous, bfloat16 or float16, on a CUDA device.
        weight: (N, K), rows contiguous, of that type.
        bias: (N,), of that type.

    Returns:
        (M, N) twice, contiguous: the input of GELU, and its result. None where cuBLASLt does not serve: another type, rows that
        are not aligned to 16 bytes or that overlap, no algorithm, no library.
    """
    library = _library()
    rows, inner = x.shape
    size = weight.shape[0]
    kind = _TYPES.get(x.dtype)
    if library is None or kind is None or 0 in (rows, inner, size) or size % 8:
        return None
    bias = None if bias is None else bias.contiguous()
    steps = (x.stride(0) if rows > 1 else inner, weight.stride(0) if size > 1 else inner)
    aligned = tuple([_alignment(each) for each in (x, weight, bias) if each is not None])
    if min(aligned) < _ALIGNED or any(step < inner or step * x.element_size() % _ALIGNED for step in steps):
        return None
    with torch.cuda.device(x.device):
        pre, y = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
        handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        plans: dict[Any, _Plan | None] = vars(_plans).setdefault("known", {})
        key = (x.device.index, kind, rows, inner, size, steps, aligned)
        try:
            if key not in plans:
                if len(plans) >= _MOST_PLANS:
                    plans.clear()
                plans[key] = _planned(library, handle, kind, rows, inner, size, steps, aligned, bias, pre)
            plan = plans[key]
            if plan is None:
                return None
            _point(plan.operation, bias, pre)
            workspace = torch.empty(plan.found.workspace_bytes, dtype=torch.uint8, device=x.device)
            _call(
                library.cublasLtMatmul, handle, plan.operation.handle, ctypes.addressof(_ONE), weight.data_ptr(),
                plan.weight.handle, x.data_ptr(), plan.x.handle, ctypes.addressof(_ZERO), y.data_ptr(), plan.y.handle,
                y.data_ptr(), plan.y.handle, ctypes.addressof(plan.found.algorithm), workspace.data_ptr(),
                plan.found.workspace_bytes, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
        except _Refused:
            plans[key] = None
            return None
    return pre, y


def _alignment(x: torch.Tensor) -> int:
    """The largest power of two that divides a tensor's address, up to 256."""
    address = x.data_ptr()
    return min(address & -address, _MOST_ALIGNED)


def _planned(
    library: Any,
    handle: int,
    kind: int,
    rows: int,
    inner: int,
    size: int,
    steps: tuple[int, int],
    aligned: tuple[int, ...],
    bias: torch.Tensor | None,
    pre: torch.Tensor,
) -> _Plan:
    """The fastest algorithm by cuBLASLt's own estimate, for what is aligned so and for a bias aligned as this one.

    Its matrices are stored by columns, so that what is (M, N) here is (N, M) there: weight transposed, times x.
    """
    operation = _Object(library, "MatmulDesc", _COMPUTE_32F, _R_32F)
    operation.set(_TRANSA, ctypes.c_int32(_OP_T))
    operation.set(_EPILOGUE, ctypes.c_uint32(_GELU_AUX if bias is None else _GELU_AUX_BIAS))
    operation.set(_AUX_LD, ctypes.c_int64(size))
    _point(operation, bias, pre)
    shapes = ((inner, size, steps[1]), (inner, rows, steps[0]), (size, rows, size))
    layouts = [_Object(library, "MatrixLayout", kind, *shape) for shape in shapes]
    preference = _Object(library, "MatmulPreference")
    preference.set(_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE_BYTES))
    preference.set(_REDUCTION_SCHEME_MASK, ctypes.c_uint32(_REDUCTION_SCHEME_COMPUTE_TYPE))  # parts of a sum stay in float32
    preference.set(_MIN_ALIGNMENT_A_BYTES, ctypes.c_uint32(aligned[1]))
    preference.set(_MIN_ALIGNMENT_B_BYTES, ctypes.c_uint32(aligned[0]))
    handles = [each.handle for each in (operation, *layouts, layouts[2], preference)]
    found, count = _Found(), ctypes.c_int()
    _call(library.cublasLtMatmulAlgoGetHeuristic, handle, *handles, 1, ctypes.byref(found), ctypes.byref(count))
    if count.value == 0 or found.status != 0:
        raise _Refused
    return _Plan(operation, layouts[0], layouts[1], layouts[2], found)


def _point(operation: _Object, bias: torch.Tensor | None, pre: torch.Tensor) -> None:
    operation.set(_AUX_POINTER, ctypes.c_void_p(pre.data_ptr()))
    if bias is not None:
        operation.set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
