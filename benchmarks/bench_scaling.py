"""Several ranks of one machine: throughput of the loader and of training, exact resume, a rank that is killed; one model over
several ranks, and how much of what goes between them is hidden.

    python benchmarks/bench_scaling.py --ranks 1 2 4 8             # on GPUs; writes results/scaling--<gpu>x<ranks>.json
    python benchmarks/bench_scaling.py --device cpu --ranks 1 2    # ranks of gloo
    python benchmarks/bench_scaling.py --quick --out /tmp/results  # tiny cases of 2 ranks on the CPU

Each number of ranks is a group that this starts by torchrun, with NCCL on GPUs. Scaling is weak: each rank has as much to do,
however many there are, and on the CPU as many threads. README.md says what the parts are and what their metrics mean.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, failed, summarise, write_results
from loader_cases import Case, case_of, draw
from make_media import make
from rank_groups import ROOT, Group, GroupError, answers_of
from scaling_parts import overlap_rows, split_rows

from gpupipe.device.inventory import cpu_quota
from gpupipe.train import load_checkpoint

SUBJECTS = {"gpupipe": "ddp", "gpupipe-fsdp2": "fsdp2"}
"""Of the part ``train``."""
DOUBLE = {"loader": "clips_per_s", "train": "samples_per_s"}
"""The rate of a part that is set against that of half the ranks."""
SCRIPTS = {"train": "scaling_train.py", "split": "scaling_split.py", "overlap": "scaling_split.py"}
"""What a rank runs for a part."""
ON_DOUBLE = "rate_of_double"
GRACE = 10.0
"""Seconds that processes have to be gone after the launcher."""
NEVER = 1_000_000
COMPARED, WITHIN = 3, 0.05
"""First steps whose losses and gradients' norms all subjects of ``train`` share, and the share by which they may differ in
bf16."""
Steps = list[list[list[Any]]]
"""Of one rank: of each step, of each of its clips, (epoch, sample, file, hash of the pixels)."""


@dataclass(frozen=True)
class Sizes:
    """How much each rank has to do.

    Attributes:
        case: of bench_loader.py: videos and clips.
        trainer: arguments of samples/train_video_dit.py.
        batch: clips of a step on each rank.
        steps: that are timed, in each of ``runs`` windows.
        resume: batches of each rank at each stage; even.
        save_every: steps between checkpoints, of the run that is killed.
        killed: arguments of that run that are others.
        buckets_mb: sizes of DistributedDataParallel's buckets that are tried.
    """

    case: Case
    trainer: dict[str, int]
    batch: int
    steps: int
    runs: int
    resume: int = 8
    save_every: int = 20
    killed: dict[str, int] = field(default_factory=dict)
    buckets_mb: tuple[float, ...] = (1, 5, 25, 100)
    sources: int = 4
    seconds: float = 22.0


@dataclass
class Bench:
    """What all parts share."""

    sizes: Sizes
    device: str
    ranks: list[int]
    folder: Path
    sources: list[Path]
    timeout: float
    threads: int
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def variables(self) -> dict[str, str]:
        """For ranks on the CPU: where Triton would interpret its kernels, a model would take minutes."""
        return {"GPUPIPE_OPS": "reference", "CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}

    def new_folder(self) -> Path:
        return self.folder / f"{next(self.numbers):03d}"

    def answers(self, ranks: int, part: str, **given: Any) -> list[dict[str, Any]]:
        """What the ranks of a new group found."""
        task = {"device": self.device, **given}
        script = SCRIPTS.get(part, "scaling_ranks.py")
        own, variables = self.new_folder(), self.variables
        return answers_of(ranks, script, part, task, own, self.timeout, threads=self.threads, variables=variables)

    def visits(self, clips: int) -> str:
        """A folder of so many files with names of their own."""
        folder = self.new_folder()
        draw(replace(self.sizes.case, clips=clips), self.sources, folder, 0)
        return str(folder)

    def loader(self, **fields: Any) -> dict[str, Any]:
        """The loader's settings."""
        case = self.sizes.case
        look = {"preset": "kinetics_train", "size": case.size}
        few = {"decode": {"threads": self.threads}} if self.device == "cpu" else {}
        return {"clip": {"frames": case.frames, "stride": case.stride}, "transform": look, "batch": case.batch, **few, **fields}

    def trainer(self, **fields: Any) -> list[str]:
        """Arguments of the sample, without its videos."""
        named = {**self.sizes.trainer, "batch": self.sizes.batch, "sample-every": NEVER, "sample-steps": 1, **fields}
        named["device"] = "cpu" if self.device == "cpu" else "auto"
        return [
            part
            for name, value in named.items()
            for part in (f"--{name}", *map(str, value if isinstance(value, tuple) else [value]))
        ]


def loader_rows(bench: Bench, ranks: int) -> list[Row]:
    """The loader alone: its rate in all and of each rank, what it takes of the host, and how busy each rank's engines are."""
    case = f"loader-{bench.sizes.case.name}"
    count = ranks * bench.sizes.case.clips
    epochs = [bench.visits(count) for _ in range(bench.sizes.runs)]
    found = bench.answers(ranks, "loader", videos=epochs, loader=bench.loader())
    runs = list(zip(*(one["runs"] for one in found), strict=True))
    if any(sum(one["clips"] for one in run) != count for run in runs):
        raise GroupError(f"not every video came once: {[[one['clips'] for one in run] for run in runs]}")
    each = [one for run in runs for one in run]
    rates = [count / (max(one["end"] for one in run) - min(one["begin"] for one in run)) for run in runs]
    rows = [
        summarise(case, "gpupipe", "clips_per_s", rates),
        summarise(case, "gpupipe", "clips_per_s_of_a_rank", [one["clips"] / (one["end"] - one["begin"]) for one in each]),
        summarise(case, "gpupipe", "cpu_ms_per_clip", [1000 * one["cpu_s"] / one["clips"] for one in each], "lower"),
        summarise(case, "gpupipe", "host_mib_of_a_rank", [one["host_bytes"] / 2**20 for one in each], "lower"),
    ]
    for rank, own in enumerate(found) if bench.device == "cuda" else ():
        busy = [run["nvdec_percent"] for run in own["runs"]]
        used = [run["device_bytes"] for run in own["runs"]]
        if None in busy or None in used:
            rows.append(failed(case, "gpupipe", f"nvdec_percent_of_rank_{rank}", "NVML does not tell"))
            continue
        if not min(busy):
            rows.append(failed(case, "gpupipe", f"nvdec_percent_of_rank_{rank}", f"its engines had nothing to do: {busy}"))
            continue
        rows.append(summarise(case, "gpupipe", f"nvdec_percent_of_rank_{rank}", busy))
        rows.append(summarise(case, "gpupipe", f"device_mib_of_rank_{rank}", [one / 2**20 for one in used], "lower"))
    return rows


def train_rows(bench: Bench, ranks: int) -> list[Row]:
    """Steps of the sample's trainer, with DistributedDataParallel and with FSDP2."""
    rows: list[Row] = []
    case, figures = "train-video-dit", list[tuple[float, float]]()
    for subject, kind in SUBJECTS.items():
        try:
            rows += steps_of(bench, ranks, case, subject, kind, figures)
        except Exception as fault:  # what a subject raises is its result, told in its row
            rows.append(failed(case, subject, DOUBLE["train"], f"{type(fault).__name__}: {fault}"))
    return rows


def steps_of(bench: Bench, ranks: int, case: str, subject: str, kind: str, figures: list[tuple[float, float]]) -> list[Row]:
    """The rows of one subject. A step is as long as on the rank that takes longest.

    Args:
        figures: loss and norm of the first subject's first steps, which are this one's too; the first one puts them there.
    """
    steps, runs, out = bench.sizes.steps, bench.sizes.runs, bench.new_folder()
    arguments = [bench.visits(4 * ranks * bench.sizes.batch), *bench.trainer(out=out, warmup=1, lr=1e-4)]
    found = bench.answers(ranks, "train", subject=kind, arguments=arguments, steps=steps, runs=runs)
    weights = [one["weights"] for one in found]
    if not math.isclose(min(weights), max(weights), rel_tol=1e-6):
        raise GroupError(f"the ranks do not have the same weights: their sums are {weights}")
    compare([(loss, norm) for loss, norm in found[0]["figures"][:COMPARED]], figures)
    times = [max(run) for run in zip(*(one["step_ms"] for one in found), strict=True)]
    rows = [
        summarise(case, subject, "samples_per_s", [1000 * ranks * bench.sizes.batch / each for each in times]),
        summarise(case, subject, "step_ms", times, "lower"),
    ]
    if bench.device == "cuda":
        rows.append(summarise(case, subject, "peak_gb", [one["peak_bytes"] / 1e9 for one in found], "lower"))
    return rows


def compare(own: list[tuple[float, float]], figures: list[tuple[float, float]]) -> None:
    """Keeps the losses and norms of the first subject, and compares those of the others.

    Raises:
        GroupError: when they are not alike.
    """
    figures[:] = figures or own
    for one, other in zip(own, figures, strict=True):
        if any(abs(mine - first) > WITHIN * first for mine, first in zip(one, other, strict=True)):
            raise GroupError(f"(loss, norm) of its first steps are {own}, of the first subject's {figures}")


def unlike(stages: Sequence[Sequence[Steps]], whole: Steps) -> int:
    """How many samples of an uninterrupted run did not come in their step, or with other pixels.

    Args:
        stages: of each stage, of each rank, what it received; all ranks of a stage take the same number of steps.
        whole: what one rank received, uninterrupted.
    """
    sequence = [tuple(clip) for step in whole for clip in step]
    odd = at = 0
    for ranks in stages:
        for step in zip(*ranks, strict=True):
            found = [tuple(clip) for part in step for clip in part]
            odd += len(set(sequence[at : at + len(found)]) - set(found))
            at += len(found)
    return odd + len(sequence) - at


def resume_rows(bench: Bench) -> list[Row]:
    """A run of the loader that goes on under more ranks each time, against one that one rank does without a break."""
    chain = sorted({1, *bench.ranks})
    case, steps, size = "resume-" + "-".join(map(str, chain)), bench.sizes.resume, bench.sizes.case.batch
    # The last stage has the end of an epoch in its middle.
    count = size * (steps * sum(chain[:-1]) + steps // 2 * chain[-1])
    given = {"videos": bench.visits(count), "loader": bench.loader(seed=7)}
    stages: list[list[Steps]] = []
    whole: Steps = []
    state: dict[str, Any] = {}
    for ranks in chain:
        runs = [{"state": state, "steps": steps}]
        if ranks == 1:  # this group makes the run without a break as well, by another loader
            runs.append({"state": {}, "steps": steps * sum(chain)})
        found = [one["runs"] for one in bench.answers(ranks, "resume", **given, runs=runs)]
        stages.append([first["steps"] for first, *_ in found])
        state = found[0][0]["state"]
        whole = found[0][1]["steps"] if ranks == 1 else whole
    total, odd = sum(map(len, whole)), unlike(stages, whole)
    if odd:
        return [failed(case, "gpupipe", "samples_alike", f"{odd} of {total} samples are not those of an uninterrupted run")]
    return [summarise(case, "gpupipe", "samples_alike", [total])]


def killed_rows(bench: Bench, ranks: int) -> list[Row]:
    """A rank is killed amid training: how soon the group has ended, what it leaves, and that it goes on from its checkpoint."""
    case, every, out = "killed", bench.sizes.save_every, bench.new_folder()
    script = [str(ROOT / "samples" / "train_video_dit.py"), bench.visits(4 * ranks * bench.sizes.batch)]
    script += bench.trainer(out=out, **bench.sizes.killed)
    script += ["--save-every", str(every), "--steps"]
    with Group(ranks, [*script, str(NEVER)], out / "killed.txt", threads=bench.threads, variables=bench.variables) as group:
        group.wait_for(f"checkpoint behind step {every}\n", bench.timeout)
        group.wait_for(f"step {every + 2}:", bench.timeout)  # amid steps, not in the checkpoint
        victim = group.rank(ranks - 1)
        victim.kill()
        begin = time.monotonic()
        status = group.wait(bench.timeout)
        seconds = time.monotonic() - begin
        left = group.left(GRACE)
        if status == 0 or not re.search(rf"SIGKILL.*\b{victim.pid}\b|\b{victim.pid}\b.*SIGKILL", group.text):
            raise GroupError(f"ended with status {status}, and no error that names the rank: {group.told()}")
        if left:
            raise GroupError(f"{left} processes live on {GRACE:.0f} s after the end: {group.told()}")
    stood, lost = load_checkpoint(out / "checkpoint.pt")["step"], last_step(out / "losses.csv")
    with Group(
        ranks, [*script, str(stood + every)], out / "resumed.txt", threads=bench.threads, variables=bench.variables
    ) as group:
        group.wait_for(f"goes on behind step {stood}\n", bench.timeout)
        group.wait_for(f"checkpoint behind step {stood + every}\n", bench.timeout)
        group.wait(bench.timeout)  # threads of gloo abort a process that has done all, now and then: the status may be any
    with (out / "losses.csv").open(newline="") as lines:
        numbers = [int(line["step"]) for line in csv.DictReader(lines)]
    if numbers != list(range(1, stood + every + 1)):
        raise GroupError(f"the losses are not of each step once: {numbers}")
    return [
        summarise(case, "gpupipe", "end_s", [seconds], "lower"),
        summarise(case, "gpupipe", "processes_left", [left], "lower"),
        summarise(case, "gpupipe", "steps_again", [max(0, lost - stood)], "lower"),
    ]


def last_step(losses: Path) -> int:
    """The last whole line's."""
    lines = losses.read_text(encoding="utf-8").splitlines()[1:]
    return max((int(line.split(",")[0]) for line in lines if line.count(",") == 3), default=0)


def on_double(rows: Sequence[Row], half: Sequence[Row]) -> list[Row]:
    """Rates over those of half the ranks in the same run: of the medians, and what the spreads allow."""
    before = {(row.case, row.subject, row.metric): row for row in half}
    made = []
    for row in rows:
        other = before.get((row.case, row.subject, row.metric))
        if row.metric not in DOUBLE.values() or other is None or not row.value or not other.value:
            continue
        assert row.low is not None
        assert row.high is not None
        assert other.low
        assert other.high
        ratio = (row.value / other.value, row.low / other.high, row.high / other.low)
        made.append(Row(row.case, row.subject, ON_DOUBLE, "higher", *ratio, min(row.runs, other.runs)))
    return made


def guarded(part: str, metric: str, better: Any, work: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part; where it fails as a whole, one that says why."""
    try:
        rows = work()
    except Exception as fault:  # the other parts still count
        rows = [failed(part, "gpupipe", metric, f"{type(fault).__name__}: {fault}", better)]
    return show(rows)


def show(rows: list[Row]) -> list[Row]:
    """Prints rows, and hands them back."""
    for row in rows:
        shown = f"{row.value:10.4g}  ({row.low:.4g} to {row.high:.4g})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:30} {row.subject:14} {row.metric:24} {shown}", file=sys.stderr, flush=True)
    return rows


def group_rows(bench: Bench, parts: Sequence[str], ranks: int) -> Iterator[list[Row]]:
    """The rows of each part of a group of so many ranks, but for those of ``resume``, which is of several."""
    there = torch.cuda.device_count() if bench.device == "cuda" else ranks
    if ranks > there:
        yield guarded("loader", DOUBLE["loader"], "higher", lambda: none_such(ranks, there))
        return
    if "loader" in parts:
        yield guarded("loader", DOUBLE["loader"], "higher", lambda: loader_rows(bench, ranks))
    if "train" in parts:
        yield guarded("train", DOUBLE["train"], "higher", lambda: train_rows(bench, ranks))
    if "split" in parts and ranks > 1:
        yield guarded("split", "loss_error", "lower", lambda: split_rows(bench, ranks))
    if "overlap" in parts and ranks > 1:
        yield guarded("overlap", "step_ms", "lower", lambda: overlap_rows(bench, ranks))
    if "killed" in parts and ranks > 1:
        yield guarded("killed", "end_s", "lower", lambda: killed_rows(bench, ranks))


def none_such(ranks: int, there: int) -> list[Row]:
    raise GroupError(f"{ranks} ranks need as many GPUs, and there are {there}")


PARTS = ("loader", "train", "split", "overlap", "resume", "killed")


def sizes_of(options: argparse.Namespace) -> Sizes:
    """By device: what fills it, and on the CPU what ends."""
    if options.quick:
        tiny = {"frames": 4, "size": 16, "hidden": 32, "depth": 1, "heads": 4, "stride": 1}
        case = replace(case_of("h264-tiny-s1"), frames=4, size=32, batch=2, clips=8)
        return Sizes(case, tiny, batch=2, steps=2, runs=1, resume=2, save_every=4, buckets_mb=(0.01, 1), sources=2, seconds=2.0)
    if options.device == "cpu":
        small = {"frames": 8, "size": 32, "hidden": 128, "depth": 4, "heads": 4}
        case = replace(case_of(options.case or "h264-256p-g250-s1"), size=112, clips=64)
        return Sizes(case, small, batch=4, steps=4, runs=options.runs)
    few = {"hidden": 256, "depth": 4, "heads": 4}  # so that a checkpoint takes no minutes
    large: dict[str, Any] = {"frames": 16, "size": 256, "hidden": 1024, "depth": 16, "heads": 16, "patch": (1, 16, 16)}
    case = replace(case_of(options.case or "h264-1080p-g250-s1"), clips=400)
    return Sizes(case, large, batch=4, steps=20, runs=options.runs, killed=few)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument(
        "--ranks", nargs="+", type=int, help="of each group; default: 1, 2, 4 … as GPUs are there, 1 2 on the CPU"
    )
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--case", help="videos and clips of the loader, as in bench_loader.py")
    command.add_argument("--runs", type=int, default=3)
    command.add_argument("--timeout", type=float, default=300.0, help="seconds that a group may take")
    command.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench", help="where videos lie")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny cases of 2 ranks on the CPU, to see that it runs")
    options = command.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ended from outside, it ends its ranks too
    if options.quick:
        options.device = "cpu"
    elif options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    most = torch.cuda.device_count() if options.device == "cuda" else 2
    ranks = sorted(
        set(options.ranks or [number for number in (1, 2, 4, 8) if number <= most and (number > 1 or not options.quick)])
    )
    if ranks[0] < 1:
        command.error("--ranks counts from 1")
    from gpupipe.observe.measure import machine_facts

    facts = machine_facts()
    if options.device == "cpu":
        facts["gpu"] = None
    sizes = sizes_of(options)
    made = make(options.media, list(sizes.case.kinds), sources=sizes.sources, seconds=sizes.seconds)
    sources = [path for group in zip(*made.values(), strict=True) for path in group]
    with tempfile.TemporaryDirectory(dir=options.media, prefix="ranks-") as folder:
        os.environ["GPUPIPE_CACHE"] = str(Path(folder) / "cache")  # of this run alone
        threads = max(1, cpu_quota() // ranks[-1])
        bench = Bench(sizes, options.device, ranks, Path(folder), sources, options.timeout, threads)
        found: dict[int, list[Row]] = {}
        for number in ranks:
            found[number] = []
            for rows in group_rows(bench, options.parts, number):  # written after each, for a run may be ended before its time
                found[number] += rows
                write_results("scaling", found[number], {**facts, "ranks": number}, options.out)
            half = found.get(number // 2, []) if number % 2 == 0 else []
            found[number] += show(on_double(found[number], half))
            if "resume" in options.parts and number == ranks[-1]:
                found[number] += guarded("resume", "samples_alike", "higher", lambda: resume_rows(bench))
            if found[number]:
                print(write_results("scaling", found[number], {**facts, "ranks": number}, options.out), flush=True)


if __name__ == "__main__":
    main()
