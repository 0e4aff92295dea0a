"""tools/gpu_figures.sh: that a benchmark has its time and no more, and that what it asks of each one is understood there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "gpu_figures.sh"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="bash is not part of Windows")


def run(tmp_path: Path, interpreter: str, *arguments: str, **settings: str) -> tuple[int, list[str], list[list[str]]]:
    """(exit status, lines, the arguments of each benchmark) with an interpreter that only notes what it is asked to do."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(f'#!/usr/bin/env bash\necho "$*" >> "{notes}"\n{interpreter}\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": str(python), **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )
    asked = notes.read_text().splitlines() if notes.exists() else []
    return done.returncode, done.stdout.splitlines(), [line.split() for line in asked]


def test_each_is_asked_for_what_it_understands(tmp_path: Path) -> None:
    """An option that a benchmark does not have would cost the minutes of a GPU that were meant for it."""
    for quick in ((), ("--quick",)):
        (tmp_path / "notes").unlink(missing_ok=True)
        code, lines, asked = run(tmp_path, "echo done", *quick, "--minutes", "4", str(tmp_path / "out"))
        assert code == 0
        assert len(lines) == len(asked) == (11 if quick else 14)
        assert all("exit 0" in line and line.endswith("done") for line in lines)
        for script, *options in asked:
            files = [ROOT / script, *(ROOT / "benchmarks" / f"{name}.py" for name in ("clip_rates", "train_feed"))]
            text = "".join(
                file.read_text(encoding="utf-8") for file in files if file.stem in files[0].read_text(encoding="utf-8")
            )
            text += files[0].read_text(encoding="utf-8")
            known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))
            assert {option for option in options if option.startswith("--")} <= known, script
        limits = {Path(script).stem: dict(pairwise(options)) for script, *options in asked}
        if not quick:
            found = limits["bench_train"]["--minutes"], limits["bench_loader_train"]["--budget"], limits["soak"]["--minutes"]
            assert found == ("3.4", "150", "3.4")


def test_what_does_not_end_is_ended_and_the_next_one_begins(tmp_path: Path) -> None:
    sleeps = 'case "$*" in *bench_beside*) exec sleep 50 ;; *bench_block*) exit 3 ;; esac'
    code, lines, asked = run(tmp_path, sleeps, "--minutes", "0.02", str(tmp_path), "beside", "block", "train", ARGS="--runs 1")
    assert [line.split()[:2] for line in lines] == [["beside", "ended"], ["block", "exit"], ["train", "exit"]]
    assert code == 1, "one of them failed"
    assert [one[-4:-2] for one in asked] == [["--runs", "1"]] * 3
    assert run(tmp_path, "", str(tmp_path), "nothing")[0] == 2
    assert run(tmp_path, "", "--minuets", "3")[0] == 2
