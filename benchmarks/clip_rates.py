"""Measures clips a second: what bench_loader.py and bench_decode.py share, from the clock to the result file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from common import RESULTS, Row, answers, failed, named_by, summarise, write_results
from loader_cases import Case, Draw, case_of, check, draw, packets_needed
from loader_subjects import Gpupipe, Maker, Session, engine_rate
from make_media import make

METRIC = "clips_per_s"
WARM_METRIC = "clips_per_s_warm"
"""The same of another pass of the same session over the same visits, with all that was set up, opened and indexed."""
OTHERS = ("first_batch_ms", "second_iter_ms", "cpu_ms_per_clip", "packets_per_frame_used", "decoders_per_100_clips")
"""Further metrics, of which less is better; where a subject has them."""
FEWEST_CLIPS = 32
"""A subject that is too slow for the budget is still measured on this many clips."""
Subjects = Mapping[str, Maker]


def warm_up(device: torch.device) -> None:
    """Pays what belongs to the process and not to any subject: the CUDA context and torch's own first kernels."""
    frames = torch.zeros(2, 3, 64, 64, dtype=torch.uint8, device=device)
    torch.nn.functional.interpolate(frames.float(), (32, 32), mode="bilinear", antialias=True).bfloat16()
    synchronise(device)


def sources_of(case: Case, options: argparse.Namespace) -> list[Path]:
    made = make(options.media, list(case.kinds), sources=options.sources, seconds=options.seconds)
    return [path for group in zip(*made.values(), strict=True) for path in group]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_seconds() -> float:
    """Processor time of this process and its children so far."""
    process = psutil.Process()
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    ended = process.cpu_times()
    return total + ended.children_user + ended.children_system


def measure(
    case: Case, maker: Maker, draws: list[Draw], device: torch.device, budget: float, *, verify: bool, again: bool = False
) -> dict[str, float]:
    """Clips a second and the other metrics of one run, with ``again`` those of a second pass too.

    A pass stops after ``budget`` seconds if enough clips are done.

    Raises:
        RuntimeError: when no batch comes, or with ``verify`` the first one is not what was asked for.
    """
    first: torch.Tensor | None = None
    clips = 0
    values: dict[str, float] = {}
    synchronise(device)
    cpu, begin = cpu_seconds(), time.perf_counter()
    session = maker(case, draws, device)
    try:
        for batch in batches_within(session, len(draws), begin, budget):
            if first is None:
                first = batch
                synchronise(device)
                values["first_batch_ms"] = 1000 * (time.perf_counter() - begin)
            clips += len(batch)
        synchronise(device)
        values[METRIC] = clips / (time.perf_counter() - begin)
        values["cpu_ms_per_clip"] = 1000 * (cpu_seconds() - cpu) / max(1, clips)
        values |= own_counters(session, clips)
        if first is not None and isinstance(session, Gpupipe):
            values["second_iter_ms"] = second_iteration(session, device)
        if first is not None and again:
            values[WARM_METRIC] = warm_rate(session, len(draws), device, budget)
    finally:
        session.close()
    if first is None:
        raise RuntimeError("no batch came")
    fault = check(first, draws, case) if verify else None
    if fault:
        raise RuntimeError(f"wrong output: {fault}")
    return values


def batches_within(session: Session, visits: int, begin: float, budget: float) -> Iterator[torch.Tensor]:
    """The batches of a pass, up to the one at which ``budget`` seconds are over since ``begin`` and enough clips are done."""
    clips = 0
    for batch in session.batches():
        yield batch
        clips += len(batch)
        if time.perf_counter() - begin > budget and clips >= min(FEWEST_CLIPS, visits):
            return


def own_counters(session: Session, clips: int) -> dict[str, float]:
    """What gpupipe counts: packets decoded for each frame of a clip, NVDEC sessions opened for a hundred clips."""
    counted = session.stats()
    if not counted.get("frames_used"):
        return {}
    return {
        "packets_per_frame_used": counted["packets_decoded"] / counted["frames_used"],
        "decoders_per_100_clips": 100 * counted.get("decoders_created", 0.0) / max(1, clips),
    }


def second_iteration(session: Gpupipe, device: torch.device) -> float:
    """Milliseconds to the first batch of another ``iter()`` of the same loader."""
    begin = time.perf_counter()
    next(session.batches())
    synchronise(device)
    return 1000 * (time.perf_counter() - begin)


def warm_rate(session: Session, visits: int, device: torch.device, budget: float) -> float:
    """Clips a second of one more pass."""
    begin = time.perf_counter()
    clips = sum(len(batch) for batch in batches_within(session, visits, begin, budget))
    synchronise(device)
    return clips / (time.perf_counter() - begin)


def measure_subject(maker: Maker, options: argparse.Namespace) -> None:
    """Runs in a process of its own: prints one line of JSON for each case."""
    device = torch.device(options.device)
    warm_up(device)
    for name in options.cases:
        case = case_of(name)
        sources = sources_of(case, options)
        values: defaultdict[str, list[float]] = defaultdict(list)
        error = None
        for run in range(options.runs):
            folder = options.media / f"visits-{os.getpid()}-{name}-{run}"
            try:
                visits = draw(case, sources, folder, run)
                again = options.warm > run
                found = measure(case, maker, visits, device, options.budget, verify=run == 0, again=again)
                for metric, value in found.items():
                    values[metric].append(value)
            except Exception as fault:  # whatever a peer raises is its result, told in its row
                traceback.print_exc()
                cause = f" ({fault.__cause__})" if fault.__cause__ else ""
                error = f"{type(fault).__name__}: {fault}{cause}"
                break
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        print("ROW " + json.dumps({"case": name, "values": values, "error": error}), flush=True)


def rows_of(subject: str, options: argparse.Namespace) -> list[Row]:
    """Measures a subject in a process of its own, so that a crash is a row with an error and nothing it holds stays behind."""
    command = [sys.executable, sys.argv[0], "--one-subject", subject, "--device", options.device, "--media", str(options.media)]
    command += ["--cases", *options.cases, "--runs", str(options.runs), "--budget", str(options.budget)]
    command += ["--warm", str(options.warm), "--sources", str(options.sources), "--seconds", str(options.seconds)]
    rows = []
    limit = len(options.cases) * options.runs * (options.budget * 4 + 30) + 120
    with tempfile.TemporaryDirectory() as cache:
        lines, ending = answers(command, "ROW ", limit, {**os.environ, "GPUPIPE_CACHE": cache})
    found = {line["case"]: line for line in lines}
    for name in options.cases:
        line = found.get(name)
        if line is None or line["error"]:
            rows.append(failed(name, subject, METRIC, line["error"] if line else ending))
            continue
        values = line["values"]
        rows += [summarise(name, subject, metric, values[metric]) for metric in (METRIC, WARM_METRIC) if metric in values]
        rows += [summarise(name, subject, metric, values[metric], "lower") for metric in OTHERS if metric in values]
    for row in rows:
        shown = f"{row.value:8.1f}  ({row.low:.1f} to {row.high:.1f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:26} {row.subject:28} {row.metric:22} {shown}", file=sys.stderr)
    return rows


def limit_rows(options: argparse.Namespace) -> list[Row]:
    """What the engines could do at most if every packet from the keyframe on is decoded and all else is free."""
    rows = []
    reached: dict[str, list[float]] = {}
    """Of each kind of video, in frames a second."""
    for name in options.cases:
        case = case_of(name)
        if len(case.kinds) > 1 or case.kinds[0].startswith("av1"):  # no one rate, or none of this engine
            continue
        sources = sources_of(case, options)
        folder = options.media / f"visits-{os.getpid()}-limit"
        try:
            needed = packets_needed(case, draw(case, sources, folder, 0), sources)
            gpu = torch.device(options.device).index or 0
            if case.kinds[0] not in reached:
                reached[case.kinds[0]] = [engine_rate([str(path) for path in sources], gpu) for _ in range(options.runs)]
            rows.append(summarise(name, "limit", METRIC, [rate / needed for rate in reached[case.kinds[0]]]))
        except Exception as fault:  # without the engine's rate the other rows still count
            rows.append(failed(name, "limit", METRIC, f"{type(fault).__name__}: {fault}"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def parser(description: str, cases: list[str], subjects: Subjects, default_subjects: list[str]) -> argparse.ArgumentParser:
    """The command line that both benchmarks have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--cases", nargs="+", type=named_by(case_of), default=cases, help="CODEC-SIZE-gN-sN[-frame][-cold], mixed-sN"
    )
    made.add_argument("--subjects", nargs="+", choices=list(subjects), default=default_subjects)
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--runs", type=int, default=3)
    made.add_argument("--warm", type=int, default=1, help="runs of which a second pass is measured too")
    made.add_argument("--budget", type=float, default=10.0, help="seconds after which a run of a slow subject stops early")
    made.add_argument("--sources", type=int, default=4, help="videos of each kind that the visits share")
    made.add_argument("--seconds", type=float, default=22.0, help="length of each of those videos")
    made.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench", help="where they lie")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    made.add_argument("--append", action="store_true", help="keep other cases of the result file, if of this machine")
    made.add_argument("--quick", action="store_true", help="a tiny case on the CPU, to see that everything runs")
    made.add_argument("--one-subject", help=argparse.SUPPRESS)
    return made


def be_quick(options: argparse.Namespace, subjects: list[str]) -> None:
    """Settings of ``--quick``."""
    options.cases, options.subjects, options.device = ["h264-tiny-s1"], subjects, "cpu"
    options.runs, options.sources, options.seconds = 2, 2, 2.0


def run(benchmark: str, options: argparse.Namespace, subjects: Subjects) -> None:
    """Measures every subject in every case, or in a subject's own process that one, and writes the result file."""
    if options.one_subject:
        measure_subject(subjects[options.one_subject], options)
        return
    from gpupipe.observe.measure import machine_facts

    kinds = sorted({kind for name in options.cases for kind in case_of(name).kinds})
    make(options.media, kinds, sources=options.sources, seconds=options.seconds)
    facts = machine_facts()
    rows = limit_rows(options) if options.device.startswith("cuda") else []
    for subject in options.subjects:  # written after each, for a run may be ended before its time
        rows += rows_of(subject, options)
        rows.sort(key=lambda row: options.cases.index(row.case))
        written = write_results(benchmark, rows, facts, options.out, keep_other_cases=options.append)
    print(written)
