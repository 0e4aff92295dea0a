"""The heap: what nobody uses goes back to the system, now and then, and a loader on the CPU sees to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from clips import write_clip

from gpupipe import VideoLoader
from gpupipe.device import heap

ROOT = Path(__file__).resolve().parent.parent

needs_glibc = pytest.mark.skipif(heap._malloc_trim() is None, reason="needs glibc")

PIECES = """
import psutil
from gpupipe.device import heap

me = psutil.Process()
pieces = [bytearray(100_000) for _ in range(3000)]  # smaller than what glibc maps by itself
pieces = pieces[::10]  # those that stay keep the heap from being cut at its end
before = me.memory_info().rss
heap.tidy()
assert me.memory_info().rss > before - 1e6, "it was tidied a moment ago"
heap._EVERY_SECONDS = 0
heap.tidy()
print(before - me.memory_info().rss)
"""


@needs_glibc
def test_a_heap_in_pieces_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PIECES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200e6, "of 270 MB that are free"


def test_it_does_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_EVERY_SECONDS", 0)
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    heap.tidy()


def test_a_loader_on_the_cpu_tidies_now_and_then(clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    now, trims = [heap._tidied], []
    monkeypatch.setattr(heap, "_EVERY_SECONDS", 10)
    monkeypatch.setattr(heap, "_malloc_trim", lambda: trims.append)
    monkeypatch.setattr(heap, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(heap, "_tidied", now[0])
    with VideoLoader([clips["h264"]] * 40, clip={"frames": 2}, transform={"size": 16}, batch=1, device="cpu") as loader:
        for _ in loader:
            now[0] += 1
    assert trims == [0] * 3, "after each ten of 40 seconds but the first"


EPOCHS = """
import gc, json, sys
import psutil
from soak import MIB, heap_in_use
from gpupipe import VideoLoader
from gpupipe.device import heap

def held():
    gc.collect()
    heap._malloc_trim()(0)
    return [psutil.Process().memory_info().rss / MIB, heap_in_use(), len(gc.get_objects()), psutil.Process().num_fds()]

readings = []
with VideoLoader(
    sys.argv[1:], clip={"frames": 2}, transform={"preset": "kinetics_train", "size": 16}, batch=3, device="cpu",
    decode={"threads": 2}, jitter={"depth": 2}, cache={"read_ahead": 4},
) as loader:
    for epoch in range(1000):
        for batch in loader:
            if epoch % 5 == 4:  # left early
                break
        if epoch % 100 == 99:
            readings.append(held())
print(json.dumps(readings))
"""


@needs_glibc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_epochs_take_no_more_memory_than_the_first_hundreds(tmp_path: Path) -> None:
    """An epoch that leaves 2 KB behind shows: its threads, its plan, its statistics, a damaged video's errors."""
    files = [write_clip(tmp_path / f"{number}.mp4", width=64, height=48, frames=6, gop=6) for number in range(5)]
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EPOCHS, *map(str, files), str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    readings = json.loads(done.stdout)
    rss, heap_mib, objects, files_open = (last - first for first, last in zip(readings[2], readings[-1], strict=True))
    assert heap_mib < 700 * 2 / 1024, readings
    assert rss < 8, readings
    assert objects < 700, readings
    assert files_open <= 2, readings
