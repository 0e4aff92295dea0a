"""Triton kernels compiled for GPUs that are not here: what a launch would compile, and what the compiler made of it.

``python cubins.py MODULE ...``, without ``TRITON_INTERPRET``, compiles what the ``launches()`` of each module lists, and prints
a line of JSON for each kernel and GPU generation.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

CAPABILITIES = (80, 90, 100)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip

Launch = tuple[str, Any, dict[str, Any], dict[str, int]]
"""A name for people, the kernel, its arguments and constants by name, and options such as ``num_warps``."""


@dataclass(frozen=True)
class Report:
    """Of one kernel: registers of a thread, bytes it spills, bytes of shared memory, loads of 8 or 16 bytes, loads."""

    registers: int
    spilled: int
    shared: int
    wide_loads: int
    loads: int


def compiled(kernel: Any, args: dict[str, Any], capability: int, **options: int) -> Report:
    """Compiles a kernel as launching it with ``args`` would: tensors aligned to 16 bytes, ints specialised as Triton does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {param.name for param in kernel.params if param.is_constexpr}
    signature, fixed, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = args[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], fixed[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(re.search(rf"{name}:(\d+)", shown).group(1)) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[union-attr]
    ptx = made.asm["ptx"]
    direct, ahead = (
        r"ld\.global\S*\.(?:v[24]\.[bfus]32|v2\.[bfus]64|[bfus]64)",
        r"cp\.async\.\S+ \[[^\]]+\], \[[^\]]+\], (?:0x10|16|0x8|8)",
    )
    wide = len(re.findall(f"{direct}|{ahead}", ptx))
    loads = len(re.findall(r"ld\.global|cp\.async\.c[ag]", ptx))
    return Report(used["REG"], used["STACK"] + used["LOCAL"], made.metadata.shared, wide, loads)


@contextmanager
def recording(*rooms: str) -> Iterator[Callable[[str], list[Launch]]]:
    """Within the block, the ``launch`` of these modules only notes what would be launched: call ops' launchers on meta tensors.

    Yields:
        A function that gives what was noted since it was last called, under a name.
    """
    noted: list[tuple[Any, dict[str, Any], dict[str, int]]] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
        names = [name for name in kernel.arg_names if name not in constants]
        noted.append((kernel, dict(zip(names, args, strict=True)) | constants, options))

    def taken(name: str) -> list[Launch]:
        found = [(f"{name}: {kernel.__name__}", kernel, args, options) for kernel, args, options in noted]
        noted.clear()
        return found

    with ExitStack() as stack:
        for room in rooms:
            stack.enter_context(mock.patch(f"{room}.launch", note))
        yield taken


def main(modules: list[str]) -> None:
    for module in modules:
        for name, kernel, args, options in importlib.import_module(module).launches():
            for capability in CAPABILITIES:
                report = compiled(kernel, args, capability, **options)
                print(json.dumps({"name": name, "capability": capability, **asdict(report)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
