"""What all benchmarks share: rows, their summary, and the one form of a result file (see README.md)."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).resolve().parent / "results"
Better = Literal["higher", "lower"]
NOT_BEGUN = "the time was up before it began"
"""Why a row has no value where a benchmark was given no more time."""


@dataclass(frozen=True)
class Row:
    """One figure: what ``subject`` reached at ``metric`` in ``case``.

    ``value`` is the median of ``runs`` measurements, ``low`` and ``high`` the least and the greatest of them. A subject that
    failed has no value and says why in ``error``.
    """

    case: str
    subject: str
    metric: str
    better: Better
    value: float | None
    low: float | None
    high: float | None
    runs: int
    error: str | None = None

    def __post_init__(self) -> None:
        if self.value is None:
            assert self.error, "a row without a value says why"
        else:
            assert self.low is not None
            assert self.high is not None
            assert self.low <= self.value <= self.high, (self.low, self.value, self.high)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "error" or value}


def summarise(case: str, subject: str, metric: str, values: Sequence[float], better: Better = "higher") -> Row:
    """The row of a subject that ran ``len(values)`` times."""
    return Row(case, subject, metric, better, statistics.median(values), min(values), max(values), len(values))


def failed(case: str, subject: str, metric: str, error: str, better: Better = "higher") -> Row:
    """The row of a subject that could not run: the first 300 characters of why, on one line."""
    return Row(case, subject, metric, better, None, None, None, 0, " ".join(error.split())[:300] or "unknown error")


def named_by(known: Callable[[str], object]) -> Callable[[str], str]:
    """For argparse: takes a name that ``known`` takes, and says of another why that raised a ValueError."""

    def checked(name: str) -> str:
        try:
            known(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return name

    return checked


def answers(
    command: list[str], mark: str, seconds: float, environment: dict[str, str] | None = None, *, quiet: bool = False
) -> tuple[list[Any], str]:
    """Runs a process that answers in lines of JSON behind ``mark``: (what it said, how it ended if that was too early).

    Processes of its own end with it: those that outlived it would hold up what is measured next.
    """
    told = subprocess.DEVNULL if quiet else None
    with tempfile.TemporaryFile("w+") as said:  # no pipe, whose end would come with that of the last of its processes
        process = subprocess.Popen(command, stdout=said, stderr=told, env=environment, process_group=0)
        try:
            ending = f"the process ended with status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ending = f"not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    return [json.loads(line[len(mark) :]) for line in lines if line.startswith(mark)], ending


def commit() -> str:
    """The commit that is measured: GPUPIPE_COMMIT (for copies without a repository), else git's, else ``unknown``.

    A working tree with changes in it is marked with ``+``.
    """
    named = os.environ.get("GPUPIPE_COMMIT")
    if named:
        return named
    root = Path(__file__).resolve().parent.parent
    try:
        ask = {"cwd": root, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **ask).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **ask).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return str(head) + ("+" if changed else "")


def gpu_slug(name: str | None) -> str:
    """``NVIDIA H200`` → ``h200``; ``cpu`` without a GPU."""
    words = re.sub(r"[^a-z0-9]+", "-", (name or "cpu").lower()).strip("-")
    return re.sub(r"^nvidia-(geforce-)?", "", words)


def machine_slug(machine: dict[str, Any]) -> str:
    """The name of a machine in that of a file: its GPU's, and behind an ``x`` the ranks where a result is of so many."""
    ranks = machine.get("ranks")
    return gpu_slug(machine.get("gpu")) + (f"x{ranks}" if ranks else "")


def write_results(
    benchmark: str, rows: Sequence[Row], machine: dict[str, Any], folder: Path = RESULTS, *, keep_other_cases: bool = False
) -> Path:
    """Writes ``<benchmark>--<gpu>.json`` and returns its path. ``machine`` comes from gpupipe.observe.measure; with ``ranks``
    in it the file is ``<benchmark>--<gpu>x<ranks>.json``.

    With ``keep_other_cases`` the file keeps the rows of cases that are not among ``rows``, so that a long benchmark can be run
    case by case; those of another machine are not kept, those of another commit name it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}--{machine_slug(machine)}.json"
    now = commit()
    kept: list[dict[str, Any]] = []
    if keep_other_cases and path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["machine"] == machine:
            others = [row for row in old["rows"] if row["case"] not in {new.case for new in rows}]
            kept = [_of_commit(row, row.get("commit", old["commit"]), now) for row in others]
    content = {
        "benchmark": benchmark,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": now,
        "machine": machine,
        "rows": kept + [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _of_commit(row: dict[str, Any], its: str, now: str) -> dict[str, Any]:
    """A row that says its commit where that is not the file's, which is ``now``."""
    own = {key: value for key, value in row.items() if key != "commit"}
    return own if its == now else {**own, "commit": its}
