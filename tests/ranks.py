"""Ranks of gloo on this machine, and what each of them reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def reports(count: int, command: Sequence[str], seconds: float = 100.0) -> list[list[dict[str, Any]]]:
    """Of each of so many processes of Python, what it printed behind ``FOUND``, as JSON, a line each.

    Args:
        count: ranks, which find each other by ``MASTER_ADDR`` and ``MASTER_PORT``.
        command: what Python is given.
        seconds: after which they are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "samples", "tests"))
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        processes.append(
            subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
            )
        )
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [[line[5:] for line in out.splitlines() if line.startswith("FOUND")] for out, _ in said]
    assert all(found), "\n".join(errors for _, errors in said)
    return [[json.loads(line) for line in lines] for lines in found]
