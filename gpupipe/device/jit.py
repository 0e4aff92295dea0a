"""Triton: whether its kernels can run here, and names for kernel files that also load where it is not installed.

With ``TRITON_INTERPRET=1`` in the environment before the first import, kernels run on CPU tensors, slowly, as tests want it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from gpupipe.device.driver import beside_capture

reason: str | None = None
"""Why no Triton kernel can run in this process; None when some can."""
try:
    import triton
    import triton.language as tl
    from triton import jit
except (ImportError, RuntimeError, OSError) as error:
    reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    triton = tl = None

    def jit(function: Any) -> Any:
        """Leaves a kernel as it stands: nobody will launch it."""
        return function


__all__ = ["interpreted", "jit", "launch", "reason", "serves", "tl", "triton"]

_OLDEST = (8, 0)
"""The compute capability from which on bf16 is native."""


_INTERPRETED = reason is None and bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """True when Triton runs its kernels on the CPU."""
    return _INTERPRETED


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel on the current stream of its tensors' GPU: arguments by position, constants and options by name.

    Triton's own way to a kernel that is compiled takes tens of microseconds for as many arguments as ours have. One that was
    launched before with arguments of the same kinds and the same numbers is therefore started directly.
    """
    if not _direct():
        _launch_by_triton(kernel, grid, args, constants)
        return
    gpu = torch._C._cuda_getDevice()
    key = (
        kernel, gpu, *constants.items(),
        *[
            (arg.dtype, arg.data_ptr() & 15, arg.get_device()) if arg.__class__ in _TENSORS
            else (arg, float) if arg.__class__ is float  # 0.0 is not 0 to a kernel
            else arg
            for arg in args
        ],
    )  # fmt: skip
    ready = _ready.get(key)
    if ready is None:
        made = _launch_by_triton(kernel, grid, args, constants)
        if not hasattr(made, "result") and all(arg.get_device() == gpu for arg in args if isinstance(arg, torch.Tensor)):
            if len(_ready) >= _MOST_READY:
                _ready.clear()
            _ready[key] = made.run, made.function, made.packed_metadata, _order(kernel, len(args), constants)
        return
    run, function, metadata, order = ready
    given = (*args, *constants.values())
    across, down, deep = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(gpu)
    run(across, down, deep, stream, function, metadata, None, None, None, *[given[place] for place in order])


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MOST_READY = 4096
_ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""Compiled kernels, by all that Triton would choose one by, and more: numbers by value rather than by kind."""


def _launch_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type != "cuda":
        return kernel[grid](*args, enable_fp_fusion=True, **constants)
    with torch.cuda.device(device):  # Triton goes by the current GPU
        if not torch.cuda.is_current_stream_capturing():
            return kernel[grid](*args, enable_fp_fusion=True, **constants)
        with beside_capture():  # it may have to be loaded first
            return kernel[grid](*args, enable_fp_fusion=True, **constants)


def _order(kernel: Any, count: int, constants: dict[str, Any]) -> list[int]:
    """Where a kernel's parameters, in their order, are found among ``count`` arguments and the constants after them."""
    names = iter(range(count))
    places = {name: count + place for place, name in enumerate(constants)}
    return [places[name] if name in places else next(names) for name in kernel.arg_names]


def _direct() -> bool:
    """True where a compiled kernel can be started past Triton: it calls one as we know it, and no profiler listens."""
    if not _can_start():
        return False
    runtime = triton.knobs.runtime
    return not (_listened(runtime.launch_enter_hook) or _listened(runtime.launch_exit_hook))


def _listened(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@functools.cache
def _can_start() -> bool:
    on_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return on_nvidia and reason is None and not _INTERPRETED and known_call()


def known_call() -> bool:
    """True where Triton starts a compiled kernel as it did when this was written: later versions may do it in another way."""
    source = "".join(inspect.getsource(triton.runtime.jit.JITFunction.run).split())
    call = "kernel.run(grid_0,grid_1,grid_2,stream,kernel.function,kernel.packed_metadata,launch_metadata,"
    ending = "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*bound_args.values())"
    return call + ending in source


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def serves(device: torch.device) -> bool:
    """True when Triton kernels run on tensors of this device."""
    if device.type == "cuda":
        return reason is None and not _INTERPRETED and _capable(device.index or 0)
    return device.type == "cpu" and _INTERPRETED


@functools.cache
def _capable(gpu: int) -> bool:
    """False too for a torch built for another maker's GPUs, which also call themselves ``cuda``."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(gpu) >= _OLDEST
