"""The heap: what nobody uses goes back to the system, now and then, and a loader on the CPU sees to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpupipe import VideoLoader
from gpupipe.device import heap

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
