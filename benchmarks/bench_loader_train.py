"""Training loops: does the GPU wait for data, and does making data slow the loop down?

    python benchmarks/bench_loader_train.py                              # on the GPU; writes results/loader_train--<gpu>.json
    python benchmarks/bench_loader_train.py --cases train-vit-b-256p --append
    python benchmarks/bench_loader_train.py --quick --out /tmp/results   # tiny cases on the CPU: shows that it runs

Each subject trains the same model, step for step, in a process of its own; subjects take turns, in one order and then in the
other, until the budget of time is used. README.md has the cases, the subjects, and how idle time is measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import train_lengths
from clip_rates import warm_up
from common import NOT_BEGUN, RESULTS, Better, Row, answers, commit, failed, summarise, write_results
from loader_cases import Case, draw
from make_media import make
from train_loop import START_SECONDS, Begins, Measured, Plan, measure
from train_steps import VIT_B, VIT_TINY, Step, many_small, vit
from train_subjects import SUBJECTS

from gpupipe.device import inventory
from gpupipe.observe.measure import machine_facts

MARK = "MEASURED "
SOURCES, SOURCE_SECONDS = 4, 22.0
CLIPS_PER_S = 300
"""As many visits are prepared as a loop would use up at this rate."""
METRICS = ("step_ms", "gpu_idle_percent", "wait_ms_p99")
STEPS: dict[str, tuple[Case, Callable[[Case, torch.device], Step]]] = {
    "train-vit-b-256p": (
        Case("train-vit-b-256p", ("h264-256p",), stride=2, frames=32),
        lambda case, device: vit(VIT_B, case.frames, case.size, device),
    ),
    "train-vit-b-256p-16f": (
        Case("train-vit-b-256p-16f", ("h264-256p",), stride=4, frames=16),
        lambda case, device: vit(VIT_B, case.frames, case.size, device),
    ),
    "train-launch-bound": (
        Case("train-launch-bound", ("h264-256p",), stride=1, batch=4),
        lambda case, device: many_small(6, 256, device),
    ),
    "train-vit-tiny": (
        Case("train-vit-tiny", ("h264-tiny",), stride=1, frames=8, size=64, batch=4),
        lambda case, device: vit(VIT_TINY, case.frames, case.size, device),
    ),
    "train-launch-bound-tiny": (
        Case("train-launch-bound-tiny", ("h264-tiny",), stride=1, frames=8, size=64, batch=4),
        lambda case, device: many_small(2, 32, device),
    ),
}
DEFAULT_CASES = ["train-vit-b-256p", "train-launch-bound", "train-mixed-lengths"]
DEFAULT_SUBJECTS = [
    "headspace", "gpupipe", "torchcodec-dataloader", "torchcodec-dataloader-cuda", "pynvvideocodec-dataloader", "gpupipe-pack",
    "fixed-longest", "fixed-batch-longest",
]  # fmt: skip
QUICK_CASES = ["train-vit-tiny", "train-launch-bound-tiny", "train-mixed-lengths-tiny"]


@dataclass
class Job:
    """A subject in the cases that are measured in one process; ``seconds`` is how long its last turn took."""

    subject: str
    cases: list[str]
    seconds: float = 0.0
    found: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    errors: dict[tuple[str, str], str] = field(default_factory=dict)

    def turn(self, options: argparse.Namespace, left: float) -> None:
        """Measures in a process of its own, so that a crash is an error and nothing that it holds stays behind.

        Args:
            left: seconds that it may take at most.
        """
        command = [sys.executable, __file__, "--one-subject", self.subject, "--cases", *self.cases]
        for name in ("device", "media", "warmup", "windows", "seconds"):
            command += [f"--{name}", str(getattr(options, name))]
        begin = time.perf_counter()
        lines, ending = answers(command, MARK, min(left, limit_seconds(self.cases, options)))
        self.seconds = time.perf_counter() - begin
        told = {line["case"]: line for line in lines}  # the last one of each
        for case in self.cases:
            line = told.get(case, {"values": {}, "errors": {}, "stage": "before it began"})
            if "stage" in line:
                missing = [metric for metric in metrics_of(case, options.device) if metric not in line["values"]]
                line["errors"] = dict.fromkeys(missing, f"{ending} {line['stage']}") | line["errors"]
            for metric, values in line["values"].items():
                self.found[case][metric] += values
            for metric, error in line["errors"].items():
                self.errors[case, metric] = error
            print(f"{case} {self.subject} ({self.seconds:.0f} s) {line['values']} {line['errors'] or ''}", file=sys.stderr)

    def rows(self, device: str) -> list[Row]:
        made = []
        for case in self.cases:
            for metric in metrics_of(case, device):
                better: Better = "higher" if metric == "samples_per_s" else "lower"
                values = self.found[case][metric]
                error = self.errors.get((case, metric), "not measured")
                made.append(
                    summarise(case, self.subject, metric, values, better)
                    if values
                    else failed(case, self.subject, metric, error, better)
                )
        return made


def limit_seconds(cases: list[str], options: argparse.Namespace) -> float:
    """How long the process of a subject may take."""
    return float(40 + (options.warmup + options.windows * options.seconds + 30) * len(cases))


def metrics_of(case: str, device: str) -> list[str]:
    """What a case has on a device: there is no idle GPU, and no peak of its memory, where there is none."""
    known = train_lengths.METRICS if case in train_lengths.CASES else METRICS
    return [metric for metric in known if device.startswith("cuda") or metric not in ("gpu_idle_percent", "peak_mib")]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Each subject with the loops that it takes part in, then each with the case of mixed lengths."""
    jobs = []
    for known, cases in ((SUBJECTS, STEPS), (train_lengths.SUBJECTS, train_lengths.CASES)):
        asked = [name for name in options.cases if name in cases]
        jobs += [Job(subject, asked) for subject in options.subjects if asked and subject in known]
    return jobs


def take_turns(jobs: list[Job], options: argparse.Namespace, told: Callable[[], object]) -> None:
    """All jobs, then in another order, as far as the budget goes; ``told`` is called after each.

    A job without one figure does not come again. One that was never begun says so in its rows.
    """
    begin = time.perf_counter()
    for turn in range(options.turns):
        for job in jobs if turn % 2 == 0 else _reverse(jobs):
            left = options.budget - (time.perf_counter() - begin)
            if turn == 0 and left <= 0:
                missing = [(case, metric) for case in job.cases for metric in metrics_of(case, options.device)]
                job.errors = dict.fromkeys(missing, f"TimeoutError: {NOT_BEGUN}")
            elif turn == 0 or (job.found and job.seconds < left):
                job.turn(options, left)
            else:
                continue
            told()


def _reverse(jobs: list[Job]) -> list[Job]:
    """In pairs from the front, each pair turned round: what is compared most stays together, and comes while there is time."""
    return [job for at in range(0, len(jobs), 2) for job in reversed(jobs[at : at + 2])]


def measure_subject(subject: str, options: argparse.Namespace) -> None:
    """Runs in a process of its own: prints lines of JSON for each case, the last of which counts."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # those that wait for work would take the cores from the decoders
    warm_up(device)
    for name in options.cases:
        folder = options.media / f"visits-{os.getpid()}-{name}"
        try:
            made = _measure(name, subject, folder, device, options, partial(begins, name))
        except Exception as fault:  # whatever a peer raises is its result, told in its row
            traceback.print_exc()
            cause = f" ({fault.__cause__})" if fault.__cause__ else ""
            error = f"{type(fault).__name__}: {fault}{cause}"
            made = Measured({}, dict.fromkeys(metrics_of(name, options.device), error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        faulthandler.cancel_dump_traceback_later()
        print(MARK + json.dumps({"case": name, "values": made.values, "errors": made.errors}), flush=True)


def begins(case: str, stage: str, seconds: float, made: Measured) -> None:
    """Tells what comes next, and ends the process, with the stacks of its threads on stderr, where that takes too long.

    A peer may hang in its library, where no exception reaches it; what was measured before counts all the same.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    told = {"case": case, "values": made.values, "errors": made.errors, "stage": f"at {stage}, which may take {seconds:.0f} s"}
    print(MARK + json.dumps(told), flush=True)


def _measure(
    name: str, subject: str, folder: Path, device: torch.device, options: argparse.Namespace, told: Begins
) -> Measured:
    if name in train_lengths.CASES:
        told("its epoch", options.warmup + options.windows * options.seconds + 2 * START_SECONDS, Measured({}))
        return train_lengths.measure(train_lengths.CASES[name], subject, options.media, folder, device)
    case, new_step = STEPS[name]
    plan = Plan(options.warmup, options.windows, options.seconds)
    batches = max(16, round(CLIPS_PER_S * (plan.warmup + plan.windows * plan.seconds + 5) / case.batch))
    case = replace(case, clips=case.batch * batches)
    made = make(options.media, list(case.kinds), sources=SOURCES, seconds=SOURCE_SECONDS)
    draws = draw(case, [path for paths in made.values() for path in paths], folder, 0)
    return measure(case, SUBJECTS[subject], draws, lambda: new_step(case, device), device, plan, told)


def prepare(options: argparse.Namespace) -> None:
    """Makes all media, outside of every clock."""
    for name in options.cases:
        if name in STEPS:
            make(options.media, list(STEPS[name][0].kinds), sources=SOURCES, seconds=SOURCE_SECONDS)
        else:
            folder = options.media / f"visits-{os.getpid()}"
            try:
                train_lengths.videos(train_lengths.CASES[name], options.media, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def show(rows: list[Row]) -> None:
    """All rows as a table on stderr, one line for each."""
    for row in rows:
        shown = f"{row.value:10.2f}  ({row.low:.2f} to {row.high:.2f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:24} {row.metric:17} {row.subject:27} {shown}", file=sys.stderr)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--cases", nargs="+", choices=[*STEPS, *train_lengths.CASES], default=DEFAULT_CASES)
    known = list(dict.fromkeys([*SUBJECTS, *train_lengths.SUBJECTS]))
    command.add_argument("--subjects", nargs="+", choices=known, default=DEFAULT_SUBJECTS)
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--budget", type=float, default=430.0, help="seconds in which all turns must end")
    command.add_argument("--turns", type=int, default=3, help="processes of each subject, at most")
    command.add_argument("--warmup", type=float, default=3.0, help="seconds of steps before the clock starts")
    command.add_argument("--windows", type=int, default=3, help="measurements in each process")
    command.add_argument("--seconds", type=float, default=2.5, help="length of each")
    command.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench", help="where videos lie")
    command.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    command.add_argument("--append", action="store_true", help="keep other cases of the result file, if of this commit")
    command.add_argument("--quick", action="store_true", help="tiny cases on the CPU, to see that everything runs")
    command.add_argument("--one-subject", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.one_subject:
        measure_subject(options.one_subject, options)
        return
    if options.quick:
        options.cases, options.device, options.turns = QUICK_CASES, "cpu", 1
        options.subjects = ["headspace", "gpupipe", "pyav-dataloader", "gpupipe-pack", "fixed-batch-longest"]
        options.subjects += ["torchcodec-dataloader"] if inventory.package("torchcodec").present else []
        options.warmup, options.windows, options.seconds = 0.2, 2, 0.3
    os.environ["GPUPIPE_COMMIT"] = commit()  # asked once: the file that is written may be one that git knows
    facts = machine_facts()
    if not options.device.startswith("cuda"):
        facts["gpu"] = None
    jobs = jobs_of(options)
    if not jobs:
        command.error("none of these subjects takes part in any of these cases")

    def rows() -> list[Row]:
        made = [row for job in jobs if job.seconds or job.errors for row in job.rows(options.device)]
        return sorted(made, key=lambda row: (options.cases.index(row.case), row.metric))

    def write() -> Path:  # after each job: what was measured is not lost when a later one takes too long
        return write_results("loader_train", rows(), facts, options.out, keep_other_cases=options.append)

    with (
        tempfile.TemporaryDirectory() as cache
    ):  # one for all, so that kernels are compiled once; files have names of their own
        os.environ["GPUPIPE_CACHE"] = cache
        prepare(options)
        take_turns(jobs, options, write)
    show(rows())
    print(write())


if __name__ == "__main__":
    main()
