"""What ``make`` would install where: tools/setup_env.sh with an interpreter that only notes what it is asked to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="make and bash are not part of Windows")

INTERPRETER = """#!/usr/bin/env bash
case "$*" in
  *"-m pip install"*) echo "${@:4}" >> "$PIP_LOG"; [[ "$*" != *"+cpu"* || -n "${CPU_BUILD:-}" ]] ;;
  *"import torch"*) exit 1 ;;
esac
"""


def setup(tmp_path: Path, *arguments: str, cuda: str | None = None, **settings: str) -> tuple[int, list[str], str]:
    """(exit status, arguments of each ``pip install``, what was said) on a machine whose driver runs ``cuda``."""
    tools = tmp_path / "tools"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    answer = f"echo '| Driver Version: 580.1   CUDA Version: {cuda}   |'" if cuda else "exit 9"
    for path, text in ((tmp_path / "venv/bin/python", INTERPRETER), (tools / "nvidia-smi", f"#!/usr/bin/env bash\n{answer}\n")):
        path.write_text(text)
        path.chmod(0o755)
    log = tmp_path / "log"
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv"), "TORCH": "9.9", "PIP_LOG": str(log)}
    script = ROOT / "tools" / "setup_env.sh"
    run = subprocess.run([str(script), *arguments], env=environment | settings, capture_output=True, text=True, check=False)
    calls = (
        [line.removeprefix("--quiet --disable-pip-version-check ") for line in log.read_text().splitlines()]
        if log.exists()
        else []
    )
    return run.returncode, calls, run.stderr


def test_without_a_gpu_the_cpu_build_comes_first(tmp_path: Path) -> None:
    assert setup(tmp_path, CPU_BUILD="1")[:2] == (0, ["torch==9.9+cpu", "--editable ."])


def test_without_a_cpu_build_in_reach_the_user_is_told(tmp_path: Path) -> None:
    status, calls, said = setup(tmp_path, "dev,docs")
    assert (status, calls) == (0, ["torch==9.9+cpu", "torch==9.9", "--editable .[dev,docs] triton~=3.6.0 numpy<2.4"])
    if sys.platform == "linux":
        assert "several GB" in said
        assert "TORCH_INDEX" in said


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda13"), ("14.1", "cuda13"), ("12.4", "cuda12")])
def test_the_driver_chooses_the_gpu_packages(tmp_path: Path, cuda: str, extra: str) -> None:
    status, calls, said = setup(tmp_path, "dev", cuda=cuda)
    assert (status, calls) == (0, ["torch==9.9", f"--editable .[{extra},dev]"])
    assert ("TORCH_INDEX" in said) is (extra == "cuda12")


def test_an_old_driver_means_the_cpu(tmp_path: Path) -> None:
    status, calls, said = setup(tmp_path, cuda="11.8", CPU_BUILD="1")
    assert (status, calls) == (0, ["torch==9.9+cpu", "--editable ."])
    assert "CUDA 11" in said


def test_an_index_and_a_choice_of_gpu_can_be_forced(tmp_path: Path) -> None:
    status, calls, _ = setup(tmp_path, cuda="13.0", GPU="none", TORCH_INDEX="file:///wheels")
    assert (status, calls) == (0, ["--index-url file:///wheels torch==9.9", "--editable ."])


def test_bad_settings_are_named(tmp_path: Path) -> None:
    status, calls, said = setup(tmp_path / "gpu", GPU="yes")
    assert (status, calls) == (1, [])
    assert "GPU=yes" in said
    status, calls, said = setup(tmp_path / "python", VENV=str(tmp_path / "none"), PYTHON="/nowhere/python3")
    assert (status, calls) == (1, [])
    assert "PYTHON=/nowhere/python3 is not a Python >= 3.11" in said
