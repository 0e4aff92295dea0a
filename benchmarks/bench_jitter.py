"""How long a loop waits when batches do not come evenly: a depth that follows arrival times against queues of a fixed depth.

    python benchmarks/bench_jitter.py                              # writes results/jitter--<gpu>.json
    python benchmarks/bench_jitter.py --quick --out /tmp/results   # a few batches: shows that it runs

A loop with steps of 40 ms takes batches of two clips of small files, decoded in software; the disturbance of the case is put in
by sleeping, so that it is the same for every subject and takes no processor time. Subjects are one loader each, in a process of
its own, that differ in ``jitter`` alone; all owe the same batches, to the bit. README.md has the contract.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from common import RESULTS, Row, answers, failed, summarise, write_results
from make_media import make

MARK = "JITTER "
STEP_SECONDS = 0.04
BATCH = 2
SUBJECTS: dict[str, dict[str, Any]] = {
    "gpupipe": {"depth": "auto"},
    "queue-2": {"depth": 2},
    "queue-4": {"depth": 4},
    "queue-16": {"depth": 16},
}
METRICS = ("stall_seconds", "stalls", "mean_occupancy", "peak_mib")
SLOW_SECONDS, SLOW_EVERY = 0.4, 16
PAUSE_SECONDS, PAUSE_EVERY_SECONDS = 0.4, 2.0


def chance(path: str) -> random.Random:
    """What befalls a file: the same for every subject."""
    return random.Random(Path(path).stem)


@contextmanager
def slow_disk() -> Iterator[None]:
    """Reads take 4 ms and now and then far longer: Pareto with a tail exponent of 1.2, at most a second."""
    from gpupipe.data.bytes import LocalFile

    original = LocalFile._preadv

    def read(self: LocalFile, memory: memoryview, position: int) -> int:
        time.sleep(min(1.0, 0.004 * chance(self.path).paretovariate(1.2)))
        return original(self, memory, position)

    LocalFile._preadv = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalFile._preadv = original  # type: ignore[method-assign]


@contextmanager
def slow_codec() -> Iterator[None]:
    """In one batch of 16 a file takes 0.4 s more, ten of its steps, as a codec would that the hardware lacks."""
    from gpupipe.data.decode import cpu

    original = cpu.decode

    def decode(index: Any, *rest: Any) -> Any:
        if int(Path(index.info.path).stem) % (SLOW_EVERY * BATCH) == SLOW_EVERY:
            time.sleep(SLOW_SECONDS)
        return original(index, *rest)

    cpu.decode = decode  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu.decode = original


@contextmanager
def paused_process() -> Iterator[None]:
    """The processes that decode stand still for 0.4 s every two seconds, as under a neighbour's load."""
    import psutil

    ended = threading.Event()

    def pause() -> None:
        while not ended.wait(PAUSE_EVERY_SECONDS):
            children = psutil.Process().children()
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for child in children:
                    if child.is_running():
                        child.send_signal(number)
                if number == signal.SIGSTOP:
                    ended.wait(PAUSE_SECONDS)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def steady() -> Iterator[None]:
    yield


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "steady": (steady, {"threads": 4}),
    "slow-disk": (slow_disk, {"threads": 4}),
    "slow-codec": (slow_codec, {"threads": 4}),
    "paused-process": (paused_process, {"cpu_workers": 2}),
}
"""The disturbance, and who decodes."""


def one(case: str, subject: str, folder: Path) -> dict[str, Any]:
    """The figures of one run over the files of a folder, and a digest of all its batches."""
    import torch

    from gpupipe import VideoLoader

    disturbance, decode = CASES[case]
    digest, ready = hashlib.sha256(), []
    with (
        disturbance(),
        VideoLoader(
            sorted(folder.iterdir()),
            clip={"frames": 4},
            transform={"size": 64},
            batch=BATCH,
            device="cpu",
            shuffle=False,
            decode=decode,
            jitter=SUBJECTS[subject],
        ) as loader,
    ):
        for batch in loader:
            digest.update(batch.video.view(torch.int16).numpy().tobytes())
            time.sleep(STEP_SECONDS)
            ready.append(loader.stats()["occupancy"])
        stats = loader.stats()
    figures = {name: stats[name] for name in ("stall_seconds", "stalls")}
    figures |= {"mean_occupancy": fmean(ready), "peak_mib": stats["jitter_peak_bytes"] / 2**20}
    return {"figures": figures, "digest": digest.hexdigest()}


def rows_of(case: str, subjects: list[str], runs: int, folder: Path) -> list[Row]:
    """All figures of a case. A subject with other batches than the first one, or that did not end, has none."""
    found: dict[str, list[dict[str, float]]] = {subject: [] for subject in subjects}
    errors: dict[str, str] = {}
    right = ""
    for _ in range(runs):
        for subject in subjects:  # turn by turn, so that what else the machine does meets all of them
            command = [sys.executable, __file__, "--one", case, subject, str(folder)]
            told, ending = answers(command, MARK, seconds=300)
            right = right or (told[0]["digest"] if told else "")
            if not told:
                errors[subject] = ending
            elif told[0]["digest"] != right:
                errors[subject] = f"its batches are not those of {subjects[0]}"
            else:
                found[subject].append(told[0]["figures"])
                print(f"{case} {subject} {told[0]['figures']}", file=sys.stderr)
    return [
        failed(case, subject, metric, errors[subject], "lower")
        if subject in errors
        else summarise(case, subject, metric, [figures[metric] for figures in found[subject]], "lower")
        for metric in METRICS
        for subject in subjects
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits of a loop under jitter, by the depth of the buffer.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true", help="keep the rows of other cases of the same commit and machine")
    parser.add_argument("--quick", action="store_true", help="two cases, two subjects, a few batches")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "SUBJECT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, subject, folder = options.one
        print(MARK + json.dumps(one(case, subject, Path(folder))), flush=True)
        return
    if options.quick:
        options.cases, options.subjects = ["slow-codec", "paused-process"], ["gpupipe", "queue-2"]
        options.batches, options.runs = 24, 1
    from gpupipe.data import index as indices
    from gpupipe.observe.measure import machine_facts

    rows = []
    sources = make(options.media, ["h264-tiny"], sources=2, seconds=2)["h264-tiny"]
    with tempfile.TemporaryDirectory(dir=options.media) as folder:
        os.environ["GPUPIPE_CACHE"] = f"{folder}/cache"
        files = Path(folder) / "files"
        files.mkdir()
        for number in range(options.batches * BATCH):
            path = files / f"{number:05}.mp4"
            path.hardlink_to(sources[number % len(sources)])
            indices.load(str(path))  # no subject is to be the one that makes them
        for case in options.cases:
            rows += rows_of(case, options.subjects, options.runs, files)
    print(write_results("jitter", rows, machine_facts(), options.out, keep_other_cases=options.append))


if __name__ == "__main__":
    main()
