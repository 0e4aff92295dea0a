"""The parts of bench_scaling.py about a model over several ranks: split or shared out against one; exchange beside work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common import Row, failed, summarise

if TYPE_CHECKING:
    from bench_scaling import Bench

COMPARED = 3
"""First steps whose losses and norms are held against those of one rank."""
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative errors allowed in them: sums in another order, which a few steps of AdamW take further; roundings of bf16 in the
activations that ranks add up."""
WAYS = {"gpupipe-tp": "tp", "gpupipe-sp": "sp"}
"""Subjects: heads and columns split between all ranks of the group, or frames."""
PROFILED = 2
"""Steps in a profile."""


def split_rows(bench: Bench, ranks: int) -> list[Row]:
    """The sample's model on one rank, split between all, and with its tokens shared out: the same losses and norms."""
    rows: list[Row] = []
    for dtype, bound in BOUNDS.items():
        given = {"trainer": bench.sizes.trainer, "batch": bench.sizes.batch, "dtype": dtype, "compared": COMPARED}
        given |= {"ways": ["alone", *WAYS.values()], "steps": bench.sizes.steps, "runs": bench.sizes.runs}
        found = bench.answers(ranks, "split", **given)
        rows += compared(f"split-video-dit-{dtype}", found, bound)
    return rows


def compared(case: str, found: Sequence[dict[str, Any]], bound: float) -> list[Row]:
    """The rows of one type, from what each rank found. A way whose losses or norms are not one rank's has no other row."""
    rows = timed(case, "gpupipe", [one["alone"] for one in found])
    for subject, way in WAYS.items():
        pairs = [
            (mine, whole)
            for one in found
            for step, other in zip(one[way]["figures"], one["alone"]["figures"], strict=True)
            for mine, whole in [tuple(zip(step, other, strict=True))]
        ]
        errors = {
            metric: [abs(pair[place][0] - pair[place][1]) / abs(pair[place][1]) for pair in pairs]
            for place, metric in enumerate(("loss_error", "norm_error"))
        }
        wrong = {metric: max(values) for metric, values in errors.items() if not all(value <= bound for value in values)}
        if wrong:
            said = ", ".join(f"{metric} is {value:.1e}" for metric, value in wrong.items())
            rows += [failed(case, subject, metric, f"{said}, where {bound:.0e} is allowed", "lower") for metric in wrong]
            continue
        rows += [summarise(case, subject, metric, values, "lower") for metric, values in errors.items()]
        rows += timed(case, subject, [one[way] for one in found])
    return rows


def timed(case: str, subject: str, ranks: Sequence[dict[str, Any]]) -> list[Row]:
    """Time and memory of one way. A step is as long as on the rank that takes longest."""
    times = [max(run) for run in zip(*(one["step_ms"] for one in ranks), strict=True)]
    rows = [summarise(case, subject, "step_ms", times, "lower")]
    if all(one["peak_bytes"] for one in ranks):
        rows.append(summarise(case, subject, "peak_gb", [one["peak_bytes"] / 1e9 for one in ranks], "lower"))
    return rows


def overlap_rows(bench: Bench, ranks: int) -> list[Row]:
    """Steps under DistributedDataParallel with several sizes of buckets, and under FSDP2: how much of exchange work hides."""
    given = {"trainer": bench.sizes.trainer, "batch": bench.sizes.batch, "buckets_mb": list(bench.sizes.buckets_mb)}
    given |= {"dtype": "bfloat16" if bench.device == "cuda" else "float32", "profiled": PROFILED}
    found = bench.answers(ranks, "overlap", **given, steps=bench.sizes.steps, runs=bench.sizes.runs)
    rows: list[Row] = []
    for name in found[0]:
        subject = "gpupipe-fsdp2" if name == "fsdp2" else f"gpupipe-ddp-{name}mb"
        seen = [balance for one in found for balance in one[name]["balance"]]
        rows += timed("overlap-video-dit", subject, [{**one[name], "peak_bytes": None} for one in found])
        for metric in ("work_ms", "exchange_ms", "exposed_ms"):
            rows.append(summarise("overlap-video-dit", subject, metric, [one[metric] for one in seen], "lower"))
        shares = [one["exchange_ms"] / one["work_ms"] for one in seen]
        rows.append(summarise("overlap-video-dit", subject, "exchange_over_work", shares, "lower"))
        print(f"{subject}, {PROFILED} steps on rank 0: {found[0][name]['balance'][0]['said']}", file=sys.stderr, flush=True)
    print(verdict(rows), file=sys.stderr, flush=True)
    return rows


def verdict(rows: Sequence[Row]) -> str:
    """Which subject is fastest, and what bounds it."""
    times = {row.subject: row.value for row in rows if row.metric == "step_ms" and row.value}
    best = min(times, key=lambda subject: times[subject])
    share, exposed = (
        next(row.value or 0.0 for row in rows if (row.subject, row.metric) == (best, metric))
        for metric in ("exchange_over_work", "exposed_ms")
    )
    bound = "communication" if share > 1 else "compute"
    return (
        f"fastest is {best}, {times[best]:.1f} ms a step: {bound}-bound, exchange takes {share:.2f} of the time of work, "
        f"{exposed:.1f} ms of it beside nothing"
    )
