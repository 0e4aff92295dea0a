"""CUDA C++ kernels by name: finding the sources, compiling them with NVRTC through CuPy and its disk cache."""

from __future__ import annotations

import functools
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupipe.device import driver
from gpupipe.device.inventory import load
from gpupipe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_PLAIN_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that any kernel may have without asking."""

_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "uint8": "unsigned char"}

_compiling = threading.Lock()
_kernels: dict[tuple[str, str, tuple[str, ...], int], Any] = {}


@functools.cache
def cuda_source_dir() -> Path:
    """The folder of the ``.cu`` files: ``cuda_src`` of a checkout, else the copy inside the installed package.

    Raises:
        DeviceError: when neither is there.
    """
    package_dir = Path(__file__).resolve().parents[1]
    for folder in (package_dir.parent / "cuda_src", package_dir / "cuda_src"):
        if any(folder.glob("*.cu")):
            return folder
    raise DeviceError(f"no CUDA sources beside or inside {package_dir}", fix="install gpupipe again: its wheel holds cuda_src")


@functools.cache
def _module(file: str, options: tuple[str, ...], gpu: int) -> Any:
    cupy = load("cupy")
    source = cuda_source_dir() / file
    headers = b"".join(header.read_bytes() for header in sorted(source.parent.glob("*.cuh")))
    edition = zlib.crc32(headers)  # CuPy's disk cache goes by the source's own text and the options, not by what it includes
    flags = ("-std=c++17", f"-I{source.parent}", f"-DGPUPIPE_HEADERS={edition}u", *options)
    return cupy.RawModule(code=source.read_text(encoding="utf-8"), options=flags)


def kernel(file: str, name: str, options: tuple[str, ...] = ()) -> Any:
    """The ``extern "C"`` kernel ``name`` of ``cuda_src/file`` for the current GPU, compiled on first use.

    Compiled code is kept in CuPy's cache folder between processes.

    Raises:
        DeviceError: when CuPy, NVRTC or the CUDA headers are missing, or the source does not compile.
    """
    import torch

    gpu = torch.cuda.current_device()
    found = _kernels.get((file, name, options, gpu))
    if found is None:
        with _compiling:
            found = _kernels[file, name, options, gpu] = _compiled(file, name, options, gpu)
    return found


def _compiled(file: str, name: str, options: tuple[str, ...], gpu: int) -> Any:
    cupy = load("cupy")
    with cupy.cuda.Device(gpu):
        try:
            return _module(file, options, gpu).get_function(name)
        except (cupy.cuda.compiler.CompileException, ImportError, OSError, RuntimeError) as error:
            text = str(error)
            headers = "cannot open source file" in text or "could not open source file" in text
            what = "the CUDA headers are missing" if headers else "NVRTC could not compile it"
            raise DeviceError(
                f"kernel {name!r} of {file} is not available: {what}: {text[:2000]}",
                fix="install CuPy with its headers: pip install 'cupy-cuda13x[ctk]' (cuda12x for a CUDA 12 driver), "
                "or set CUDA_PATH to a CUDA toolkit",
            ) from error


def cuda_type(dtype: torch.dtype) -> str:
    """What CUDA C++ calls a torch dtype: float32, float16, bfloat16 or uint8."""
    return _TYPES[str(dtype).removeprefix("torch.")]


def launch(function: Any, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_bytes: int = 0) -> None:
    """Launches on torch's current stream. Through the driver: CuPy takes several times as long, and has a stream of its own.

    Args:
        args: passed by value: NumPy scalars or structured scalars, pointers as ``numpy.uint64``; or their bytes.
    """
    import torch

    stream = torch.cuda.current_stream()
    if shared_bytes > _PLAIN_SHARED_BYTES:
        _allow(function, shared_bytes)
    driver.launch(
        function.kernel.ptr, _three(grid), _three(block),
        [arg if isinstance(arg, bytearray) else arg.tobytes() for arg in args], shared_bytes,
        stream=stream.cuda_stream, context=driver.primary_context(stream.device_index),
    )  # fmt: skip


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _allow(function: Any, shared_bytes: int) -> None:
    """Lets a kernel have so much dynamic shared memory. Never less than before: another thread may be about to launch it."""
    with _compiling:
        if function.max_dynamic_shared_size_bytes < shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
