"""The CUDA kernels compiled for the host by g++: see tests/cuda_on_host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """The kernels of ``cuda_src/name.cu``: ``run_KERNEL(argument, grid x, y, z, block x, y)`` runs one."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    target = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'tests/cuda_on_host'}", f"-I{ROOT / 'cuda_src'}"]
    source = ROOT / f"tests/cuda_on_host/{name}.cpp"
    subprocess.run([*command, "-o", str(target), str(source)], check=True, timeout=100)
    return ctypes.CDLL(str(target))
