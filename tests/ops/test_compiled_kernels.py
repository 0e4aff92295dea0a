"""Every Triton kernel compiles for the GPU generations we name, without spills, and loads 8 or 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
MODULES = sorted(path.stem for path in HERE.glob("*_launches.py"))


def reports(module: str) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    command = [sys.executable, str(HERE.parent / "cubins.py"), module]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-4000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_there_are_launches() -> None:
    assert MODULES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES)
def test_compiles_without_spills(module: str) -> None:
    found = reports(module)
    assert {report["capability"] for report in found} == {80, 90, 100}
    assert [report for report in found if report["spilled"]] == []
    assert [report for report in found if report["loads"] and not report["wide_loads"]] == []
