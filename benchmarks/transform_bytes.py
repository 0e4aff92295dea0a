"""Bytes of device memory that a clip costs: measured by Nsight Compute's ``ncu``, and counted from what its operations name.

``dram_mb_per_clip`` is what the counters of the memory controller say, reads and writes together. A process of its own makes
all batches of a case a few times and then once more between ``cudaProfilerStart`` and ``cudaProfilerStop``, where ncu counts.
The batches hold several times the L2 cache, which ncu leaves as it is (``--cache-control none``): what a subject keeps in L2
from kernel to kernel is not counted; for what lies there unwritten at the end, as much of the pass before was written.

``moved_mb_per_clip`` needs no counters: every operation of torch reads its operands once and writes its results once, as if
there were no cache. gpupipe reads the crop of the planes once and writes the clip once; where contrast needs the frames' means
it also writes and reads RGB in 16 bits. It is counted for subjects that consist of such operations.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transform_cases import FRAMES, Case, Clip

DRAM_METRIC, MOVED_METRIC = "dram_mb_per_clip", "moved_mb_per_clip"
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
MODES: dict[str, list[str]] = {
    # One figure for all that runs in the range, as it runs without a profiler. It refuses --profile-from-start.
    "app-range": ["--replay-mode", "app-range"],
    # Kernel by kernel, in a row, wherever a version of ncu or a driver knows no ranges.
    "kernel": ["--replay-mode", "kernel", "--profile-from-start", "off"],
}
SECONDS = 240.0
"""For a run under ncu, which makes every kernel slow."""


def ncu_command(ncu: str, mode: str, log: Path, program: Sequence[str]) -> list[str]:
    """``program`` under ncu, whose table goes to ``log``."""
    return [
        ncu, "--metrics", ",".join(COUNTERS), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        "--target-processes", "all", "--cache-control", "none", "--clock-control", "none", *MODES[mode], *program,
    ]  # fmt: skip


def dram_bytes(table: str) -> float:
    """The sum of both counters over all kernels or ranges of a table that ncu wrote as CSV, on its page ``raw`` (a column a
    metric, units in the first row) or ``details`` (a row a metric).

    Raises:
        ValueError: when there are no figures in it; with what ncu says instead.
    """
    lines = table.splitlines()
    total, found = 0.0, False
    for value, unit in _figures(list(csv.reader(line for line in lines if line.startswith('"')))):
        if unit not in UNITS:
            raise ValueError(f"ncu counts in {unit!r}, not in bytes")
        total, found = total + float(value.replace(",", "")) * UNITS[unit], True
    if not found:
        said = [line for line in lines if line.startswith("==ERROR==") or line.startswith("==WARNING==")]
        raise ValueError(" ".join(said) or "ncu counted nothing")
    return total


def _figures(rows: list[list[str]]) -> Iterator[tuple[str, str]]:
    """(value, unit) of all figures of the two counters."""
    if not rows:
        return
    head, *body = rows
    if "Metric Name" in head:
        name, unit, value = (head.index(f"Metric {part}") for part in ("Name", "Unit", "Value"))
        yield from ((row[value], row[unit]) for row in body if row[name] in COUNTERS)
        return
    columns = [head.index(counter) for counter in COUNTERS if counter in head]
    if not body or not columns:
        return
    units = body[0]
    yield from ((row[column], units[column]) for row in body[1:] for column in columns if row[column] != "n/a")


def has_ncu() -> bool:
    return shutil.which("ncu") is not None


def measured(program: Sequence[str]) -> float:
    """Bytes of device memory that ``program`` reads and writes while its profiler runs.

    Raises:
        RuntimeError: when there is no ncu, or it or the program fails; with what the last try said.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu is not on the PATH")
    fault = ""
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "ncu.csv"
            command = ncu_command(ncu, mode, log, program)
            try:
                run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                return dram_bytes(log.read_text(encoding="utf-8") if log.exists() else run.stdout)
            except subprocess.TimeoutExpired:
                fault = f"not done after {SECONDS:.0f} s"
            except ValueError as error:
                fault = f"{error}; {run.stderr.strip()[-200:]}"
    raise RuntimeError(f"ncu: {fault}")


def program_of(case: str, subject: str, device: torch.device) -> list[str]:
    """The process that :func:`measured` runs."""
    script = Path(__file__).with_name("bench_transform.py")
    return [sys.executable, str(script), "--profiled", "--cases", case, "--subjects", subject, "--device", str(device)]


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the operations that run in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            overwritten = name in ("copy_", "fill_", "zero_")
            self.bytes += sum(map(_size, tree_leaves((args[overwritten:], kwargs or {}))))
            self.bytes += sum(map(_size, tree_leaves(result)))
        return result


def _size(leaf: object) -> int:
    """Bytes of a tensor, those that it repeats counted once."""
    if not isinstance(leaf, torch.Tensor):
        return 0
    count = leaf.element_size() if leaf.numel() else 0
    for length, stride in zip(leaf.shape, leaf.stride(), strict=True):
        count *= length if stride else 1
    return count


def moved_by_torch(work: Callable[[], None]) -> int:
    """Bytes that the operations of torch in ``work`` read and write."""
    count = _Count()
    with count:
        work()
    return count.bytes


def moved_at_least(case: Case, clips: Sequence[Clip]) -> float:
    """Bytes that have to move for clips: each crop read once, each clip written once."""
    height, width = case.config.size
    read = sum(1.5 * c.params.crop[2] * c.params.crop[3] * c.planes.format.sample_bytes for c in clips)
    return FRAMES * (read + len(clips) * 2 * 3 * height * width)


def moved_by_gpupipe(case: Case, clips: Sequence[Clip]) -> float:
    """Bytes that its one launch moves for clips, or its two."""
    height, width = case.config.size
    twice = sum(any(op.name == "contrast" for op in clip.params.color) for clip in clips)
    return moved_at_least(case, clips) + twice * FRAMES * 2 * 2 * 3 * height * width
