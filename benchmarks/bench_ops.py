"""Fused model kernels, each alone, beside torch's own ops, the compiler and other libraries.

    python benchmarks/bench_ops.py                # on the GPU; writes results/ops--<gpu>.json, and a picture a family
    python benchmarks/bench_ops.py --cases modulate_norm rms_norm --subjects gpupipe compile
    python benchmarks/bench_ops.py --quick --out /tmp/results          # seconds, on the CPU: shows that it works

Every subject gets the same inputs and owes the same outputs and gradients, which are compared with eager's.
Forward (``-fwd``) and backward (``-bwd``) are timed apart.

``gpu_time_us`` is device time of a call, from a CUDA graph that goes through as many sets of inputs as the L2 cache cannot
hold; ``call_time_us`` is the time of a call in a row of calls without a graph, launches included. ``saved_mb`` is what a
forward call leaves allocated for its backward, beyond its inputs and outputs. ``limit`` is the bytes that must move over the
rate of a device copy in the same run; ``bare`` the vendor library's product or convolution alone; ``compile-nomix`` the
compiler without mixed-order reductions.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, failed, gpu_slug, summarise, write_results
from op_case import OpCase
from op_cases import all_cases, named, tiny_cases
from op_plots import draw
from op_timing import Timing, copies_for, copy_bytes_a_us

NEAR = 0.02
"""Mean difference from eager, as a share of eager's mean size, up to which results count as the same: bf16 has 1/256."""


def subject_of(case: OpCase, name: str) -> Callable[..., Any]:
    if name == "gpupipe":
        return case.gpupipe
    if name == "eager":
        return case.eager
    if name == "bare":
        assert case.bare is not None
        return case.bare
    if name.startswith("compile"):
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # a backward is called many times over here
        options: dict[str, Any] = {"triton.mix_order_reduction": name == "compile"}
        return torch.compile(case.eager, fullgraph=True, options=options)
    return case.peers[name]()


def rows_of(case: OpCase, subjects: list[str] | None, device: torch.device, runs: int, rates: list[float]) -> list[Row]:
    """All rows of a case; a subject that fails says why in its row."""
    inputs = case.inputs(device)
    sets = copies_for(inputs) if device.type == "cuda" else 1
    metrics = ["gpu_time_us", "call_time_us"] if device.type == "cuda" else ["call_time_us"]
    expected = [value.float() for value in Timing(case.eager, inputs, 1).results()]
    rows: list[Row] = []
    own = ["gpupipe", "eager", *(["bare"] if case.bare else []), *case.compiled, *case.peers]
    for name in own if subjects is None else [name for name in own if name in subjects]:
        try:
            timing = Timing(subject_of(case, name), inputs, sets)
            if case.repeatable and name != "bare":
                compare(timing.results(), expected)
            for side, make in (("fwd", timing.forward), ("bwd", timing.backward)):
                for metric in metrics:
                    measure = timing.graph_us if metric == "gpu_time_us" else timing.call_us
                    rows.append(summarise(f"{case.name}-{side}", name, metric, measure(make, runs), "lower"))
            if device.type == "cuda":
                rows.append(summarise(f"{case.name}-fwd", name, "saved_mb", [timing.saved_mb()], "lower"))
        except Exception as fault:  # whatever a peer raises is its result, told in its row
            rows.append(failed(f"{case.name}-fwd", name, metrics[0], f"{type(fault).__name__}: {fault}", "lower"))
        gc.collect()
    for side, moved in (("fwd", case.forward_bytes), ("bwd", case.backward_bytes)):
        if rates:
            rows.append(summarise(f"{case.name}-{side}", "limit", "gpu_time_us", [moved / rate for rate in rates], "lower"))
    for row in rows:
        shown = f"{row.value:10.2f}  ({row.low:.2f} to {row.high:.2f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:52} {row.subject:14} {row.metric:13} {shown}", flush=True)
    return rows


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raises RuntimeError where a subject does other work than eager."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        off = float((one.float() - other).abs().mean() / other.abs().mean().clamp_min(1e-12))
        if not off <= NEAR:
            raise RuntimeError(f"result {number} is {off:.1%} off eager's in the mean")


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--cases", nargs="+", help="ops or whole case names; all by default")
    command.add_argument("--subjects", nargs="+")
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=10)
    command.add_argument("--minutes", type=float, default=8.0, help="no further case is begun after so long")
    command.add_argument("--append", action="store_true", help="keep other cases of the file, if of this machine")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny cases on the CPU, to see that everything runs")
    options = command.parse_args()
    if options.quick:
        options.device, options.runs, options.subjects = "cpu", 1, ["gpupipe", "eager", "bare"]
    from gpupipe.observe.measure import machine_facts

    device = torch.device(options.device)
    cases = named(tiny_cases() if options.quick else all_cases(), options.cases)
    rates = copy_bytes_a_us(device) if device.type == "cuda" else []
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    begun = time.monotonic()
    rows: list[Row] = []
    for case in cases:  # written after each, for a run may be ended before its time
        if time.monotonic() - begun > options.minutes * 60:
            print(f"left out, for {options.minutes:g} minutes are over: {case.name}")
            continue
        rows += rows_of(case, options.subjects, device, options.runs, rates)
        written = write_results("ops", rows, facts, options.out, keep_other_cases=options.append)
    print(written)
    for file in draw(rows, {case.name: case.family for case in cases}, options.out, gpu_slug(facts["gpu"])):
        print(file)


if __name__ == "__main__":
    main()
