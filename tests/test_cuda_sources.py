"""Every CUDA source compiles for the GPU generations we name, and keeps its variables in registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parent.parent / "cuda_src").glob("*.cu"))


def test_there_are_sources() -> None:
    assert SOURCES


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.timeout(400)  # a large kernel takes a minute where two cores do several things
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_spills(source: Path, arch: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v"]
    result = subprocess.run(
        [*command, "-o", str(tmp_path / "out.cubin"), str(source)], capture_output=True, text=True, timeout=390, check=False
    )
    assert result.returncode == 0, result.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert spills, "ptxas reported no kernel"
    assert set(spills) == {("0", "0")}, result.stderr
