"""Is a training step slowed by the clip transforms that run beside it?

    python benchmarks/bench_beside.py                          # on the GPU; writes results/beside--<gpu>.json
    python benchmarks/bench_beside.py --quick --out /tmp/results

A step runs over and over, in turns alone (subject ``alone``) and while another thread makes clips on a stream of its own at the
rate at which a loader needs them (subject ``gpupipe``). Cases are ``STEP-TRANSFORM``: the step is a loop of bf16 matrix
products, which leaves the GPU no gap, or the demo's model with its optimizer, which is bound by the host; the transforms are
those of bench_transform.py, whole batches of 8 clips. The clips are made of planes in device memory: decoding is no part of
it. ``step_ms`` is wall time of a step with the GPU waited for once a round of steps.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_transform import wait
from common import RESULTS, Row, summarise, write_results
from transform_cases import case_of, make_clips
from transform_subjects import gpupipe

from gpupipe.cli.demo_model import TinyVideoNet

CLIPS_PER_S = {"nv12-1080p-224-train": 75.0, "nv12-256p-224-train": 400.0, "nv12-tiny-32-train": 20.0}
"""What seven engines can decode for it at most, one random clip of 16 frames a file."""
METRIC = "step_ms"


def gemm_step(device: torch.device, *, small: bool) -> Callable[[], None]:
    """Ten bf16 matrix products."""
    size = 256 if small else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    return step


def demo_step(device: torch.device, *, small: bool) -> Callable[[], None]:
    """A training step of the demo's model on a batch of 8 clips."""
    model = TinyVideoNet(4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    side = 32 if small else 224
    video = torch.randn(8, 3, 16, side, side, device=device)
    label = torch.zeros(8, dtype=torch.long, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(video), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


STEPS = {"gemm": gemm_step, "demo": demo_step}


class Beside:
    """A thread that makes batches of clips at a steady rate on its own stream while :meth:`run` lets it."""

    def __init__(self, transform: str, device: torch.device) -> None:
        case = case_of(transform)
        self._clips = make_clips(case, device)
        self._make = gpupipe(case)
        self._out = torch.empty((len(self._clips), 3, 16, *case.config.size), dtype=torch.bfloat16, device=device)
        self._seconds = len(self._clips) / CLIPS_PER_S[transform]
        self._device = device
        self._run, self._end = threading.Event(), False
        self.batches = 0
        self._thread = threading.Thread(target=self._work, name="bench-beside", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            due = time.perf_counter()
            while not self._end:
                self._run.wait()
                due = max(due + self._seconds, time.perf_counter() - self._seconds)
                self._make(self._clips, self._out)
                self.batches += 1
                time.sleep(max(0.0, due - time.perf_counter()))

    def turn(self, *, on: bool) -> None:
        if on:
            self._run.set()
        else:
            self._run.clear()

    def close(self) -> None:
        self._end = True
        self._run.set()
        self._thread.join()


def rows_of(name: str, device: torch.device, rounds: int, seconds: float, *, small: bool) -> list[Row]:
    kind, _, transform = name.partition("-")
    step = STEPS[kind](device, small=small)
    beside = Beside(transform, device)
    values: dict[str, list[float]] = {"alone": [], "gpupipe": []}
    try:
        beside.turn(on=True)
        measure(step, device, seconds)  # warms up both
        for number in range(2 * rounds):
            subject = ("alone", "gpupipe")[(number + number // 2) % 2]  # A B B A …: a drift touches both alike
            beside.turn(on=subject == "gpupipe")
            time.sleep(2 * beside._seconds)
            wait(device)
            values[subject].append(measure(step, device, seconds))
    finally:
        beside.close()
    rows = [summarise(name, subject, METRIC, some, "lower") for subject, some in values.items()]
    alone, together = (statistics.median(values[subject]) for subject in ("alone", "gpupipe"))
    print(f"{name}: {alone:.4f} ms alone, {together:.4f} beside transforms: {100 * (together / alone - 1):+.2f} %", flush=True)
    return rows


def measure(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Milliseconds a step."""
    count = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(5):
            step()
        count += 5
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return 1000 * (time.perf_counter() - begin) / count


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument(
        "--cases",
        nargs="+",
        default=[f"{step}-{transform}" for step in STEPS for transform in list(CLIPS_PER_S)[:2]],
        choices=[f"{step}-{transform}" for step in STEPS for transform in CLIPS_PER_S],
    )
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--rounds", type=int, default=6)
    command.add_argument("--seconds", type=float, default=0.5, help="length of a round")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny steps on the CPU, to see that it runs")
    options = command.parse_args()
    if options.quick:
        options.cases, options.device = ["gemm-nv12-tiny-32-train", "demo-nv12-tiny-32-train"], "cpu"
        options.rounds, options.seconds = 2, 0.1
    from gpupipe.observe.measure import machine_facts

    device = torch.device(options.device)
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    rows: list[Row] = []
    for name in options.cases:  # written after each, for a run may be ended before its time
        rows += rows_of(name, device, options.rounds, options.seconds, small=options.quick)
        written = write_results("beside", rows, facts, options.out)
    print(written)


if __name__ == "__main__":
    main()
