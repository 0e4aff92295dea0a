"""A long run over a few hundred files with bad ones among them: does memory stay flat, and is anything left at the end?

    python benchmarks/soak.py --minutes 8                       # on the GPU; writes results/soak--<gpu>.json
    python benchmarks/soak.py --minutes 0.3 --device cpu --files 24 --kinds h264-tiny --out /tmp/results

One loader goes through epoch after epoch. The loop that takes its batches is now fast and now slow, keeps some batches and
drops others unread, and leaves every fifth epoch early. Memory is read after each epoch. Growth is the median of the last third
of these readings less that of the second, so that caches have filled before it counts. The process exits with 1 when memory
grew by more than ``--allow`` MiB on the host or the device, or when a thread or a process is left after ``close()``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import psutil
import torch
from common import RESULTS, Row, summarise, write_results
from make_media import make

from gpupipe import VideoLoader
from gpupipe.observe.machine import open_nvml
from gpupipe.observe.measure import machine_facts
from gpupipe.types import Batch

MIB = 1 << 20
DEFAULT_KINDS = ["h264-1080p", "h264-256p", "hevc-1080p"]
CASE = "mixed-with-bad-files"
PROBE_BYTES = 434 * MIB
"""A size that nothing else allocates at once."""


def make_files(folder: Path, kinds: list[str], count: int, media: Path) -> list[Path]:
    """``count`` names of good files and one bad file for every twelve: empty, cut in the middle, not a video, missing."""
    sources = [path for paths in make(media, kinds, sources=2, seconds=10.0).values() for path in paths]
    files = []
    for number in range(count):
        source = sources[number % len(sources)]
        path = folder / f"{number:04}{source.suffix}"
        path.hardlink_to(source)
        files.append(path)
    for number in range(0, count, 12):
        path = folder / f"{number:04}-bad.mp4"
        content = sources[number % len(sources)].read_bytes()
        kind = number // 12 % 4
        if kind < 3:
            path.write_bytes((b"", content[: len(content) // 2], b"not a video" * 1000)[kind])
        files.append(path)
    return files


class _HeapFacts(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def heap_in_use() -> float:
    """MiB that this process has allocated and not freed, which tells a leak from a heap in pieces; 0 without glibc."""
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return 0.0
    ask.restype = _HeapFacts
    facts = ask()
    return float(facts.uordblks + facts.hblkhd) / MIB


def used(device: torch.device, number: int | None) -> tuple[float, float, float]:
    """(host, heap, device) memory in MiB: of this process and its children; see :func:`heap_in_use`; :func:`on_gpu`, or 0."""
    me = psutil.Process()
    host = float(me.memory_info().rss)
    for child in me.children(recursive=True):
        try:
            host += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    if device.type != "cuda":
        return host / MIB, heap_in_use(), 0.0
    return host / MIB, heap_in_use(), on_gpu(device, number) / MIB


def on_gpu(device: torch.device, me: int | None) -> int:
    """Bytes that the process ``me`` holds on a GPU; that everybody holds where NVML does not tell processes apart."""
    by_process = _held(device)
    if me in by_process:
        return by_process[me]
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _held(device: torch.device) -> dict[int | None, int]:
    """Bytes on a GPU by process, in NVML's numbers; empty where it does not say."""
    opened = open_nvml(device)
    if opened is None:
        return {}
    nvml, handle = opened
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {process.pid: int(process.usedGpuMemory) for process in running if process.usedGpuMemory is not None}


def my_number(device: torch.device) -> int | None:
    """NVML's number of this process, None where it does not say.

    In a container it is not ``os.getpid()``: then it is the process that holds just as much more as this one allocates."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    for _ in range(5):
        before = _held(device)
        if os.getpid() in before:
            return os.getpid()
        block = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        after = _held(device)
        del block
        torch.cuda.empty_cache()
        grown = [pid for pid, held in after.items() if held - before.get(pid, held) == PROBE_BYTES]
        if len(grown) == 1:
            return grown[0]
    return None


def one_epoch(loader: VideoLoader, draw: random.Random, leave_early: bool, deadline: float) -> int:
    """Takes an epoch's batches as an unsteady consumer does; returns the clips taken."""
    kept: deque[Batch] = deque(maxlen=3)
    clips = 0
    for number, batch in enumerate(loader):
        clips += len(batch.clips)
        mood = draw.random()
        if mood < 0.3:
            batch.video.float().mean().item()
        elif mood < 0.5:
            kept.append(batch)
        elif mood < 0.6:
            time.sleep(draw.random() * 0.05)
        if (leave_early and number == 3) or time.monotonic() > deadline:
            break
    return clips


def growth(readings: list[float]) -> float:
    third = max(1, len(readings) // 3)
    return statistics.median(readings[-third:]) - statistics.median(readings[third : 2 * third] or readings[:third])


def left_behind(before: set[threading.Thread]) -> tuple[list[str], list[str]]:
    """Threads and child processes that are still there five seconds after the loader was closed."""
    end = time.monotonic() + 5
    while True:
        threads = [thread.name for thread in threading.enumerate() if thread not in before]
        processes = [child.name() for child in psutil.Process().children(recursive=True)]
        if not (threads or processes) or time.monotonic() > end:
            return threads, processes
        time.sleep(0.05)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--files", type=int, default=300, help="good files; one bad one for every twelve comes on top")
    parser.add_argument("--kinds", nargs="+", default=DEFAULT_KINDS, help="see make_media.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--allow", type=float, default=64.0, help="MiB by which memory may grow")
    parser.add_argument(
        "--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench", help="where the sources lie"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    draw = random.Random(0)
    threads = set(threading.enumerate())
    folder = Path(tempfile.mkdtemp(prefix="gpupipe-soak-", dir=options.media.parent))
    host: list[float] = []
    heap: list[float] = []
    gpu: list[float] = []
    clips = epochs = 0
    try:
        files = make_files(folder, options.kinds, options.files, options.media)
        number = my_number(torch.device(options.device))
        if number is None and options.device != "cpu":
            print("NVML does not tell processes apart here: the GPU must be this process's alone", file=sys.stderr)
        began = time.monotonic()
        deadline = began + 60 * options.minutes
        with VideoLoader(files, batch=8, device=options.device, clip={"stride": 2}, seed=1) as loader:
            while time.monotonic() < deadline:
                clips += one_epoch(loader, draw, epochs % 5 == 4, deadline)
                epochs += 1
                for readings, value in zip((host, heap, gpu), used(loader.device, number), strict=True):
                    readings.append(value)
                print(
                    f"epoch {epochs}: {clips} clips, host {host[-1]:.0f} MiB, heap {heap[-1]:.0f} MiB, GPU {gpu[-1]:.0f} MiB",
                    file=sys.stderr,
                )
            stats, bad = loader.stats(), loader.bad_files
        seconds = time.monotonic() - began
        threads_left, processes_left = left_behind(threads)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = {"host": growth(host), "heap": growth(heap), "device": growth(gpu)}
    values = {f"{where}_growth_mib": value for where, value in grown.items()}
    values |= {"host_peak_mib": max(host), "device_peak_mib": max(gpu)}
    values |= {"threads_left": float(len(threads_left)), "processes_left": float(len(processes_left))}
    rows: list[Row] = [summarise(CASE, "gpupipe", metric, [value], "lower") for metric, value in values.items()]
    rows += [summarise(CASE, "gpupipe", "clips_per_s", [clips / seconds]), summarise(CASE, "gpupipe", "seconds", [seconds])]
    print(write_results("soak", rows, machine_facts(), options.out))
    print(
        f"{epochs} epochs, {clips} clips, {len(bad)} bad files, {stats.get('substituted', 0):.0f} substitutes", file=sys.stderr
    )
    faults = [f"{where} memory grew by {value:.0f} MiB" for where, value in grown.items() if value > options.allow]
    faults += [f"left behind: {', '.join(threads_left + processes_left)}"] if threads_left or processes_left else []
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
