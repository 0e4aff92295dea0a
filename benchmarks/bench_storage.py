"""Clips a second from storage that is slow to answer: a cold page cache, and a store over HTTP with a latency and a bandwidth.

    python benchmarks/bench_storage.py                              # writes results/storage--<gpu>.json
    python benchmarks/bench_storage.py --quick --out /tmp/results   # a few small clips: shows that it runs

The store is a server of this process, on the loopback device: each request waits, and all answers share one bandwidth. Subjects
run in processes of their own, each time over files that nobody has read before. README.md has the contract.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, answers, failed, summarise, write_results
from loader_cases import Case, Draw, check, decode_cpu, draw, indices
from loader_subjects import Gpupipe, Session, Threaded
from make_media import make

MARK = "STORAGE "
METRICS = {"clips_per_s": "higher", "first_batch_ms": "lower"}
BATCH = 8
LATENCY_SECONDS = 0.02
BYTES_PER_SECOND = 50e6
_CHUNK = 64 << 10


@dataclass(frozen=True)
class Storage:
    """Where a case's files lie."""

    http: bool
    indexed: bool = False
    """Indices were made ahead, as for any epoch but the first."""


CASES = {
    "disk-cold": Storage(http=False),
    "http-20ms": Storage(http=True),
    "http-20ms-indexed": Storage(http=True, indexed=True),
}


class _Link:
    """A line of one bandwidth that all answers share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free = 0.0

    def send(self, size_bytes: int) -> None:
        """Waits until as many bytes have gone over it."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size_bytes / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    link: _Link

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        time.sleep(LATENCY_SECONDS)
        data = (self.folder / Path(self.path).name).read_bytes()
        total, begin, end = len(data), 0, len(data) - 1
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            begin, end = int(wanted[1]), min(total - 1, int(wanted[2] or total - 1))
        self.send_response(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{total}")
        self.send_header("Content-Length", str(end + 1 - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{total}"')
        self.end_headers()
        while body and begin <= end:
            part = data[begin : min(end + 1, begin + _CHUNK)]
            self.link.send(len(part))
            self.wfile.write(part)
            begin += len(part)


@contextmanager
def store(folder: Path) -> Iterator[str]:
    """Serves a folder for the time of the block; its URL."""
    handler = type("Handler", (_Handler,), {"folder": folder, "link": _Link(BYTES_PER_SECOND)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _pyav(threads: int, case: Case, visits: Sequence[Draw]) -> Session:
    """``fsspec.open`` and PyAV in so many threads."""
    import fsspec

    def decode(visit: Draw) -> torch.Tensor:
        with fsspec.open(visit.path, "rb") as file:
            return decode_cpu(file, indices(case, visit.start))

    return Threaded(case, visits, torch.device("cpu"), threads, decode)


def _gpupipe(read_ahead: int, case: Case, visits: Sequence[Draw]) -> Session:
    return Gpupipe(case, visits, torch.device("cpu"), {}, cache={"read_ahead": read_ahead})


SUBJECTS: dict[str, Callable[[Case, Sequence[Draw]], Session]] = {
    "gpupipe": functools.partial(_gpupipe, 32),
    "gpupipe-no-read-ahead": functools.partial(_gpupipe, 0),
    "fsspec-pyav-1t": functools.partial(_pyav, 1),
    "fsspec-pyav-8t": functools.partial(_pyav, 8),
}


def one(case: Case, subject: str, url: str, visits: Sequence[Draw]) -> dict[str, Any]:
    """The figures of one run over the files of a case, and what is wrong with its first batch.

    Args:
        url: of their folder in a store; empty: they are read where they lie.
    """
    asked = [replace(visit, path=f"{url}/{Path(visit.path).name}") for visit in visits] if url else visits
    torch.zeros(1).sum()
    first: torch.Tensor | None = None
    begin, first_seconds, clips = time.perf_counter(), 0.0, 0
    session = SUBJECTS[subject](case, asked)
    for batch in session.batches():
        if first is None:
            first, first_seconds = batch, time.perf_counter() - begin
        clips += len(batch)
    seconds = time.perf_counter() - begin
    session.close()
    assert first is not None
    figures = {"clips_per_s": clips / seconds, "first_batch_ms": 1000 * first_seconds}
    return {"figures": figures, "wrong": check(first, visits, case)}


def make_indices(paths: Sequence[str]) -> None:
    """Makes the indices of files, and keeps nothing of their bytes."""
    from gpupipe.data import index

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(index.load, paths))


def run(name: str, subject: str, case: Case, sources: Sequence[Path], folder: Path, seed: int) -> tuple[list[Any], str]:
    """One run over new files, in a process of its own: (what it said, how it ended if that was too early)."""
    visits = draw(case, sources, folder / "files", seed)
    storage = CASES[name]
    environment = {**os.environ, "GPUPIPE_CACHE": str(folder / "cache"), "GPUPIPE_REMOTE": '{"cache_gib": 0}'}
    given = json.dumps([[visit.path, visit.start] for visit in visits])

    def ask(what: str, url: str) -> tuple[list[Any], str]:
        (folder / "visits.json").write_text(given, encoding="utf-8")
        facts = [what, str(folder / "visits.json"), url, json.dumps([case.name, case.size, case.frames, case.batch])]
        return answers([sys.executable, __file__, "--one", *facts], MARK, 300, environment)

    if not storage.http:
        return ask(subject, "")
    with store(folder / "files") as url:
        if storage.indexed and ask("index", url)[0] != ["indexed"]:
            return [], "the indices could not be made"
        return ask(subject, url)


def rows_of(name: str, subjects: list[str], runs: int, case: Case, sources: Sequence[Path], media: Path) -> list[Row]:
    """All figures of a case. A subject whose first batch is wrong, or that did not end, has none."""
    found: dict[str, list[dict[str, float]]] = {subject: [] for subject in subjects}
    errors: dict[str, str] = {}
    for number in range(runs):
        for subject in subjects:  # turn by turn, so that what else the machine does meets all of them
            with tempfile.TemporaryDirectory(dir=media) as folder:
                told, ending = run(name, subject, case, sources, Path(folder), number)
            if not told or told[0]["wrong"]:
                errors[subject] = told[0]["wrong"] if told else ending
            else:
                found[subject].append(told[0]["figures"])
                print(f"{name} {subject} {told[0]['figures']}", file=sys.stderr)
    return [
        failed(name, subject, metric, errors[subject], better)  # type: ignore[arg-type]
        if subject in errors
        else summarise(name, subject, metric, [figures[metric] for figures in found[subject]], better)  # type: ignore[arg-type]
        for metric, better in METRICS.items()
        for subject in subjects
    ]


def answer(what: str, visits: str, url: str, facts: str) -> None:
    """In a process of its own: one run, or the indices of the files."""
    asked = [Draw(path, start) for path, start in json.loads(Path(visits).read_text(encoding="utf-8"))]
    name, size, frames, batch = json.loads(facts)
    told: Any = "indexed"
    if what == "index":
        make_indices([f"{url}/{Path(visit.path).name}" for visit in asked])
    else:
        told = one(Case(name, (), 1, frames=frames, size=size, batch=batch, clips=len(asked)), what, url, asked)
    print(MARK + json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Clips a second from a cold page cache and from a store far away.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--clips", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true", help="keep the rows of other cases of the same commit and machine")
    parser.add_argument("--quick", action="store_true", help="one case, two subjects, a few small clips")
    parser.add_argument("--one", nargs=4, metavar=("SUBJECT", "VISITS", "URL", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        answer(*options.one)
        return
    kind, frames, seconds = "h264-256p", 16, 10
    if options.quick:
        options.cases, options.subjects, options.clips, options.runs = (
            ["http-20ms-indexed"],
            ["gpupipe", "fsspec-pyav-8t"],
            16,
            1,
        )
        kind, frames, seconds = "h264-tiny", 8, 2
    from gpupipe.observe.measure import machine_facts

    sources = make(options.media, [kind], sources=2, seconds=seconds)[kind]
    case = Case(kind, (kind,), 1, frames=frames, size=112, batch=BATCH, clips=options.clips, cold=True)
    rows = []
    for name in options.cases:
        rows += rows_of(name, options.subjects, options.runs, case, sources, options.media)
    print(write_results("storage", rows, machine_facts(), options.out, keep_other_cases=options.append))


if __name__ == "__main__":
    main()
