"""The CUDA kernels compiled for the host by g++, and launches sent to them: see tests/cuda_on_host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupipe.data.transform import finish, fuse, gaussian, levels, move, resize
from gpupipe.device.texture import TEXEL

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"resize": resize, "color": finish, "move": move, "blur": gaussian, "levels": levels}
"""What packs the arguments of ``cuda_src/clip_NAME.cu``."""


class _Texture(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("width", ctypes.c_int), ("rows", ctypes.c_int), ("pitch", ctypes.c_int))


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """The kernels of ``cuda_src/name.cu``: ``run_KERNEL(argument, grid x, y, z, block x, y)`` runs one."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    target = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'tests/cuda_on_host'}", f"-I{ROOT / 'cuda_src'}"]
    source = ROOT / f"tests/cuda_on_host/{name}.cpp"
    subprocess.run([*command, "-o", str(target), str(source)], check=True, timeout=100)
    return ctypes.CDLL(str(target))


def all_compiled(folder: Path) -> dict[str, ctypes.CDLL]:
    """The libraries of all that clips are made by together."""
    return {name: compiled(f"clip_{name}", folder) for name in MODULES}


def send_to_host(libraries: Mapping[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has clips made by these libraries wherever CUDA would make them together; the kernels that were launched, as they are."""
    log: list[str] = []

    def launch(
        function: str, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any], *, shared_bytes: int = 0
    ) -> None:
        assert shared_bytes <= resize.SHARED_BYTES
        log.append(function)
        argument = bytes(args[0]) if isinstance(args[0], bytearray) else args[0].tobytes()
        packed = ctypes.create_string_buffer(argument, len(argument))
        outside = getattr(libraries[function.split("_")[0]], f"run_{function}")(packed, *grid, *block[:2])
        assert "texture" not in function or outside == 0, f"{outside} fetches outside the texture"

    textures: list[_Texture] = []

    def texture_of(frames: torch.Tensor) -> int:
        count, rows, pitch = frames.shape
        width = pitch // TEXEL
        textures.append(_Texture(frames.data_ptr(), width, count * rows, width))
        return ctypes.addressof(textures[-1])

    monkeypatch.setattr(move, "texture_of", texture_of)
    monkeypatch.setattr(move, "can_be_textured", lambda frames: frames.shape[2] % TEXEL == 0)
    for module in MODULES.values():
        monkeypatch.setattr(module, "kernel", lambda file, name, options=(): name)
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(fuse, "takes", lambda out: True)
    return log
