"""What a user installs: the wheel, built from the source archive, is complete, and importing it is cheap."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_NOT_LOAD = ("torch", "cupy", "PyNvVideoCodec", "numpy", "av", "pydantic", "matplotlib", "nvidia.dali")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``python -m build`` makes out of the source archive it has made before."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    assert list(folder.glob("*.tar.gz"))
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on PYTHONPATH, with the wheel's files in it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=installed, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_wheel_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.name for path in (ROOT / "cuda_src").iterdir() if path.suffix in (".cu", ".cuh")}
    assert sources
    assert {f"gpupipe/cuda_src/{name}" for name in sources} <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gpupipe").rglob("*.py")}
    assert modules <= names
    assert "gpupipe/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_finds_its_kernels(installed: Path) -> None:
    code = (
        "from gpupipe.device.module import cuda_source_dir as d; print(d()); print(*sorted(p.name for p in d().glob('*.cu')))"
    )
    folder, names = run_installed(installed, code).splitlines()
    assert Path(folder) == installed / "gpupipe" / "cuda_src"
    assert names.split() == sorted(path.name for path in (ROOT / "cuda_src").glob("*.cu"))


def test_importing_is_cheap(installed: Path) -> None:
    code = "import time; t = time.perf_counter(); import gpupipe; print(time.perf_counter() - t)"
    run_installed(installed, code)  # warms the file cache and writes the bytecode
    seconds = statistics.median(float(run_installed(installed, code)) for _ in range(3))
    assert seconds < 0.3
    loaded = run_installed(installed, "import sys, gpupipe; print(*sys.modules)").split()
    assert not set(loaded) & set(MAY_NOT_LOAD)


def test_the_version_is_that_of_the_package(installed: Path, wheel: Path) -> None:
    version = run_installed(installed, "import gpupipe; print(gpupipe.__version__)")
    assert wheel.name.startswith(f"gpupipe-{version}-py3-none-any")
