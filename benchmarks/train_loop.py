"""A training loop with a clock: time of a step, waits for batches, and the GPU's idle time."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loader_cases import Case, Draw, check
from loader_subjects import Maker, Session
from torch.profiler import ProfilerActivity, profile
from train_steps import Step

os.environ.setdefault("TEARDOWN_CUPTI", "0")  # set up twice, it may crash beside CUDA graphs (torch.profiler says so, too)

WARM_STEPS = 10
PROFILED_STEPS = 8
START_SECONDS = 45.0
"""For a loader to be made and to give its first batch."""
SPARE_SECONDS = 20.0
"""For what takes a second or two, where a machine is slow."""
NO_KERNELS = "the profiler saw no kernel: is CUPTI there?"


@dataclass(frozen=True)
class Plan:
    """How long a subject is measured: ``warmup`` seconds of steps, then so many ``windows`` of ``seconds`` each."""

    warmup: float
    windows: int
    seconds: float


@dataclass
class Measured:
    """What one process found out. ``errors`` says of a metric why it is not among ``values``."""

    values: dict[str, list[float]]
    errors: dict[str, str] = field(default_factory=dict)


Begins = Callable[[str, float, Measured], None]
"""Told what comes next, the seconds that it may take, and what has been measured so far."""


class Mark:
    """The moment at which the device has done all that is on the current stream; on the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        self._seconds = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def ms_until(self, later: Mark) -> float:
        if self._event is None or later._event is None:
            return 1000 * (later._seconds - self._seconds)
        later.wait()
        return float(self._event.elapsed_time(later._event))


class Loop:
    """Takes batches and does steps with them. As a loop that logs the loss it lets the GPU lag by one step, and no more."""

    def __init__(self, step: Step, session: Session, device: torch.device) -> None:
        self._step, self._session, self._device = step, session, device
        self._batches: Iterator[torch.Tensor] = session.batches()
        self._last = Mark(device)

    def one(self) -> float:
        """A step. Returns the milliseconds for which the loop waited for its batch."""
        begin = time.perf_counter()
        video = self.take()
        waited = 1000 * (time.perf_counter() - begin)
        self._step(video)
        before, self._last = self._last, Mark(self._device)
        before.wait()
        return waited

    def take(self) -> torch.Tensor:
        """The next batch; a loader that has come to its end begins anew."""
        video = next(self._batches, None)
        if video is None:
            self._batches = self._session.batches()
            video = next(self._batches, None)
        if video is None:
            raise RuntimeError("no batch came")
        return video

    def steps(self, seconds: float, fewest: int) -> tuple[Mark, Mark, list[float]]:
        """Steps for so many seconds: where they begin and end on the device, and the wait of each. Nothing is synchronised."""
        first, begin = self._last, time.perf_counter()
        waits: list[float] = []
        while len(waits) < fewest or time.perf_counter() - begin < seconds:
            waits.append(self.one())
        return first, self._last, waits

    def busy_ms(self) -> float | None:
        """Milliseconds a step in which the GPU works for the training stream; None where the profiler sees no kernels."""
        total = busy_us(self.traced())
        return total / 1000 / PROFILED_STEPS if total else None

    def traced(self, steps: int = PROFILED_STEPS) -> list[dict[str, Any]]:
        """What the profiler sees in so many steps: the events of a Chrome trace.

        The profiler slows the host, so these are steps of their own. It leaves the kernels as long as they are.
        """
        for count in (1, steps):  # the first time is for CUPTI, which is then set up
            torch.cuda.synchronize(self._device)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(count):
                    self.one()
                torch.cuda.synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(path))
            text = path.read_text(encoding="utf-8", errors="replace")
        events: list[dict[str, Any]] = json.loads(text, strict=False)["traceEvents"]
        return events


def busy_us(events: Iterable[Mapping[str, Any]], *, all_streams: bool = False) -> float:
    """Microseconds in which the stream that works most, which is the training's, has a kernel, copy or fill running.

    Args:
        events: of a Chrome trace.
        all_streams: in which any stream has one.
    """
    spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans[0 if all_streams else event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
    return max((_union(each) for each in spans.values()), default=0.0)


def launches(events: Iterable[Mapping[str, Any]]) -> int:
    """How often the host sent work to the GPU: kernels, copies and fills; a whole CUDA graph counts once.

    Args:
        events: of a Chrome trace.
    """
    sent = ("Launch", "MemcpyAsync", "MemsetAsync", "Memcpy2DAsync", "Memcpy3DAsync")
    calls = [event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return sum(any(word in name for word in sent) for name in calls)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these (begin, end) lasts."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """The least of ``values`` that ``share`` of them do not exceed (the nearest-rank percentile)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def measure(
    case: Case,
    maker: Maker,
    draws: list[Draw],
    new_step: Callable[[], Step],
    device: torch.device,
    plan: Plan,
    begins: Begins = lambda *_: None,
) -> Measured:
    """Trains with one subject, first for warm-up, then for the clock.

    Raises:
        RuntimeError: when no batch comes or the first one is not what was asked for.
    """
    on = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(on):  # not the default stream, on which libraries put their own work
        step = new_step()
        for _ in range(3):  # what belongs to the process and to no loader: handles, workspaces, the allocator's memory
            step(torch.randn(case.batch, 3, case.frames, case.size, case.size, device=device, dtype=torch.bfloat16))
        made = Measured({})
        begins("its first batch", START_SECONDS, made)
        start = time.perf_counter()
        session = maker(case, draws, device)
        try:
            loop = Loop(step, session, device)
            first_batch = loop.take()
            print(f"{case.name}: the first batch came after {time.perf_counter() - start:.1f} s", file=sys.stderr)
            begins("its steps", plan.warmup + plan.windows * plan.seconds + SPARE_SECONDS, made)
            fault = check(first_batch, draws, case)
            if fault:
                raise RuntimeError(f"wrong output: {fault}")
            loop.steps(plan.warmup, WARM_STEPS)
            windows = [loop.steps(plan.seconds, 3) for _ in range(plan.windows)]
            times = [first.ms_until(last) / len(waits) for first, last, waits in windows]
            waits = [wait for window in windows for wait in window[2]]
            made.values |= {"step_ms": times, "wait_ms_p99": [percentile(waits, 0.99)]}
            if device.type == "cuda":
                begins("its steps under the profiler", SPARE_SECONDS, made)
                busy = loop.busy_ms()
                if busy is None:
                    made.errors["gpu_idle_percent"] = NO_KERNELS
                else:
                    made.values["gpu_idle_percent"] = [max(0.0, 100 * (1 - busy / each)) for each in times]
        finally:
            begins("the end of its loader", SPARE_SECONDS, made)
            session.close()
    return made
