"""Triton kernels compiled for GPUs that are not here: what a launch would compile, and what the compiler made of it.

Run as a program, without ``TRITON_INTERPRET``: reads launches from a module of tests and writes a report as JSON lines.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Of one kernel: registers of a thread, bytes of local memory it spills to, bytes of shared memory, and its PTX."""

    registers: int
    spilled: int
    shared: int
    ptx: str


def compiled(kernel: Any, args: dict[str, Any], capability: int, **options: int) -> Report:
    """Compiles a kernel as launching it with ``args`` would: tensors aligned to 16 bytes, ints specialised as Triton does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name for name, param in zip(kernel.arg_names, kernel.params, strict=True) if param.is_constexpr}
    signature, fixed, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = args[name]
        if name in constants or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
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
    registers, local = re.search(r"REG:(\d+).*?LOCAL:(\d+)", shown).groups()  # type: ignore[union-attr]
    stack = re.search(r"STACK:(\d+)", shown).group(1)  # type: ignore[union-attr]
    return Report(int(registers), int(local) + int(stack), made.metadata.shared, made.asm["ptx"])


if __name__ == "__main__":
    sys.exit("import me")
