"""Clip transforms alone: from decoded planes in device memory to finished bf16 clips, a batch of 8 clips of 16 frames.

    python benchmarks/bench_transform.py                             # on the GPU; writes results/transform--<gpu>.json
    python benchmarks/bench_transform.py --cases nv12-1080p-224-train --subjects gpupipe torchvision-v2
    python benchmarks/bench_transform.py --ncu                       # device memory traffic too, where ncu is at hand
    python benchmarks/bench_transform.py --quick --out /tmp/results  # seconds, on the CPU: shows that it works

Every subject gets the same planes and the same drawn parameters (crop, flip, colours), and owes the same batch: 8 clips, bf16,
NCTHW, in device memory. Its first and its last clip are compared with gpupipe's float reference on the CPU. Where a peer cannot
do quite the same, its function says so: kornia's antialias, OpenCV's colour matrix, DALI's changes of colour. Whatever fails, a
package that is not there included, is a row with its reason.

``gpu_ms_per_clip`` is device time by events around all batches of a case. The device first gets a kernel that only waits, for
longer than the caller's thread takes to enqueue the batches; so what is timed is the device's work, not the thread's. There are
as many batches as it takes to hold several times the L2 cache, so that no input comes from there. ``host_ms_per_clip`` is what
the caller's thread spends on a clip of one batch, results not waited for; for subjects that work on the CPU it is all of their
time, the upload of the clip included. All of this is the same for every subject; each has made every batch three times before
(on the CPU: its one batch, once). For ``dram_mb_per_clip`` and ``moved_mb_per_clip`` see transform_bytes.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transform_bytes
from common import RESULTS, Row, failed, named_by, summarise, write_results
from transform_bytes import DRAM_METRIC, MOVED_METRIC
from transform_cases import CLIPS, FRAMES, Case, Clip, case_of, make_clips, reference
from transform_subjects import SUBJECTS, Make, Subject

from gpupipe.device.inventory import package
from gpupipe.types import Planes

DEVICE_METRIC, HOST_METRIC = "gpu_ms_per_clip", "host_ms_per_clip"
COLD_BYTES = 256 << 20
"""Planes of a case's batches on a GPU, together, at least: five times the L2 cache of an H200."""
WARM_UPS = 3
CYCLES_A_SECOND = 2e9
"""Of a GPU, at most."""
COPY_BYTES = 512 << 20
"""Size of the copy whose rate the limit is worked out from."""
CASES = [
    "nv12-1080p-224-eval", "nv12-1080p-224-train", "nv12-256p-224-train", "p010-1080p-224-eval", "nv12-1080p-512-train",
]  # fmt: skip
NEAR = 0.25
"""Mean difference from the reference, in standard deviations, that other ways of scaling chroma and rounding stay within.
OpenCV's BT.601 in place of BT.709 makes up to 0.15 of it, DALI's own changes of colour 0.2."""


@dataclass(frozen=True)
class Options:
    """How a subject is measured."""

    runs: int
    budget: float
    """Seconds after which a slow subject stops early."""
    ncu: bool
    """Whether its device memory traffic is measured too."""


@dataclass(frozen=True)
class Batch:
    """Clips, and (8, 3, T, H, W) bf16 that they are made into."""

    clips: Sequence[Clip]
    out: torch.Tensor


def measure(make: Make, batches: Sequence[Batch], runs: int, budget: float, *, on_host: bool) -> dict[str, list[float]]:
    """Milliseconds a clip by metric; device time only where there is a device that does the work."""
    device = batches[0].out.device
    warm_up(make, batches, 1 if on_host else WARM_UPS)
    values: dict[str, list[float]] = {HOST_METRIC: []}
    began = time.perf_counter()
    while len(values[HOST_METRIC]) < runs and (time.perf_counter() - began < budget or len(values[HOST_METRIC]) < 3):
        batch = batches[len(values[HOST_METRIC]) % len(batches)]
        wait(device)
        begin = time.perf_counter()
        make(batch.clips, batch.out)
        spent = time.perf_counter() - begin
        values[HOST_METRIC].append(1000 * spent / len(batch.clips))
        if device.type == "cuda" and not on_host:
            wait(device)
            values.setdefault(DEVICE_METRIC, []).append(device_time(make, batches, 2 * spent * len(batches)))
    return values


def warm_up(make: Make, batches: Sequence[Batch], times: int) -> None:
    for _ in range(times):
        for batch in batches:
            make(batch.clips, batch.out)
        wait(batches[0].out.device)


def device_time(make: Make, batches: Sequence[Batch], enqueuing: float) -> float:
    """Milliseconds of the device a clip, where the batches are enqueued within so many seconds."""
    begin, end = timer(), timer()
    torch.cuda._sleep(int((enqueuing + 0.001) * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    begin.record()
    for batch in batches:
        make(batch.clips, batch.out)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / sum(len(batch.clips) for batch in batches)


def timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batches_of(case: Case, clips: Sequence[Clip], subject: Subject, device: torch.device) -> list[Batch]:
    """Batches of the same clips, each with planes of its own: as many as keep the L2 cache from holding them."""
    held = sum(clip.planes.data.nbytes for clip in clips)
    copies = -(-COLD_BYTES // held) if device.type == "cuda" and not subject.on_host else 1
    return [copy_of(clips, case, torch.device("cpu") if subject.on_host else device, device) for _ in range(copies)]


def copy_of(clips: Sequence[Clip], case: Case, source: torch.device, target: torch.device) -> Batch:
    """A batch of the same clips with planes of its own, nothing made yet."""
    planes = [Planes(clip.planes.data.to(source, copy=True), clip.planes.format) for clip in clips]
    out = torch.full((CLIPS, 3, FRAMES, *case.config.size), torch.nan, dtype=torch.bfloat16, device=target)
    return Batch([Clip(p, clip.info, clip.params) for p, clip in zip(planes, clips, strict=True)], out)


def check(batch: Batch, expected: Mapping[int, torch.Tensor]) -> None:
    """Raises: RuntimeError: when one of the clips with these numbers is not near what is expected."""
    for number, clip in expected.items():
        off = float((batch.out[number].float().cpu() - clip).abs().mean())
        if not off <= NEAR:
            raise RuntimeError(f"wrong output: clip {number} is {off:.2f} off the reference in the mean")


def rows_of(case: Case, subjects: Sequence[str], device: torch.device, options: Options) -> list[Row]:
    clips = make_clips(case, device)
    expected = {number: reference(case, clips[number]) for number in (0, len(clips) - 1)}
    rows = []
    for name in subjects:
        subject = SUBJECTS[name]
        try:
            batches = batches_of(case, clips, subject, device)
            make = subject.prepare(case, device)
            values = measure(make, batches, options.runs, options.budget, on_host=subject.on_host)
            check(batches[-1], expected)
            rows += [summarise(case.name, name, metric, some, "lower") for metric, some in values.items()]
            moved = moved_of(case, name, subject, make, batches[0]) if device.type == "cuda" else None
            if moved is not None:
                rows.append(summarise(case.name, name, MOVED_METRIC, [moved], "lower"))
            if options.ncu and device.type == "cuda" and not subject.on_host:
                rows.append(dram_row(case, name, device, len(batches)))
        except Exception as fault:  # whatever a peer raises is its result, told in its row
            metric = HOST_METRIC if subject.on_host or device.type == "cpu" else DEVICE_METRIC
            rows.append(failed(case.name, name, metric, f"{type(fault).__name__}: {fault}", "lower"))
    if device.type == "cuda":
        rows.append(summarise(case.name, "limit", DEVICE_METRIC, limits(clips, case), "lower"))
        least = transform_bytes.moved_at_least(case, clips) / len(clips) / 1e6
        rows.append(summarise(case.name, "limit", MOVED_METRIC, [least], "lower"))
    for row in rows:
        shown = f"{row.value:9.4f}  ({row.low:.4f} to {row.high:.4f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:22} {row.subject:24} {row.metric:17} {shown}", flush=True)
    return rows


def moved_of(case: Case, name: str, subject: Subject, make: Make, batch: Batch) -> float | None:
    """Counted megabytes a clip; None where nobody can count them."""
    if name == "gpupipe":
        return transform_bytes.moved_by_gpupipe(case, batch.clips) / len(batch.clips) / 1e6
    if not subject.eager:
        return None
    return transform_bytes.moved_by_torch(lambda: make(batch.clips, batch.out)) / len(batch.clips) / 1e6


def dram_row(case: Case, name: str, device: torch.device, batches: int) -> Row:
    """Measured megabytes a clip."""
    try:
        moved = transform_bytes.measured(transform_bytes.program_of(case.name, name, device))
    except RuntimeError as fault:
        return failed(case.name, name, DRAM_METRIC, str(fault), "lower")
    return summarise(case.name, name, DRAM_METRIC, [moved / (batches * CLIPS) / 1e6], "lower")


def profiled(case: Case, name: str, device: torch.device) -> None:
    """Makes all batches once for ncu, which counts from the profiler's start to its stop."""
    batches = batches_of(case, make_clips(case, device), SUBJECTS[name], device)
    make = SUBJECTS[name].prepare(case, device)
    warm_up(make, batches, WARM_UPS)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    warm_up(make, batches, 1)
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def limits(clips: Sequence[Clip], case: Case) -> list[float]:
    """Milliseconds that the bytes of a clip need: each crop read once and each clip written once, at the rate of a copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=clips[0].planes.data.device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(5):
        begin, end = timer(), timer()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * COPY_BYTES / begin.elapsed_time(end))
    least = transform_bytes.moved_at_least(case, clips) / len(clips)
    return [least / rate for rate in rates[1:]]


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--cases", nargs="+", type=named_by(case_of), default=CASES)
    command.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=30)
    command.add_argument("--budget", type=float, default=5.0, help="seconds after which a slow subject stops early")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--ncu", action="store_true", help="measure device memory traffic; half a minute a case and subject")
    command.add_argument("--append", action="store_true", help="keep the rows of other cases in the result file")
    command.add_argument("--quick", action="store_true", help="a tiny case on the CPU, to see that everything runs")
    command.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    given = command.parse_args()
    if given.quick:
        given.cases, given.device, given.runs = ["nv12-tiny-32-train", "nv12-tiny-32-eval"], "cpu", 3
        given.subjects = [name for name, each in SUBJECTS.items() if each.quick and package(each.package).present]
    device = torch.device(given.device)
    cases = [case_of(name) for name in given.cases]
    if given.profiled:
        profiled(cases[0], given.subjects[0], device)
        return
    if given.ncu and not transform_bytes.has_ncu():
        print("ncu is not on the PATH: its metric is left out", file=sys.stderr)
        given.ncu = False
    from gpupipe.observe.measure import machine_facts

    options = Options(given.runs, given.budget, given.ncu)
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    rows: list[Row] = []
    for case in cases:  # written after each, for a run may be ended before its time
        rows += rows_of(case, given.subjects, device, options)
        written = write_results("transform", rows, facts, given.out, keep_other_cases=given.append)
    print(written)


if __name__ == "__main__":
    main()
