"""Writes which kinds of modules `gpupipe.train.fuse` leaves alone by default: those that measured slower than torch's own.

    python benchmarks/fuse_defaults.py            # rewrites gpupipe/train/defaults.py from benchmarks/results
    python benchmarks/fuse_defaults.py --check    # exits with 1 when it is not what the results say

A kind's time is that of the ops that it goes through, `gpupipe` over `eager`: forward and backward together in
ops--<gpu>.json (`gpu_time_us`), the whole block in block--<gpu>.json (`step_ms`), and in train--<gpu>.json (`step_ms`) a model
in which only this kind is fused, the subject `fused-<kind>`, which outweighs the others. Over several cases it is the geometric
mean. A kind is off where that is more than 2 % above 1, or where gpupipe failed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import RESULTS

DEFAULTS = RESULTS.parent.parent / "gpupipe" / "train" / "defaults.py"
BEGIN, END = "# measured:begin\n", "# measured:end\n"
SLOWER_BY = 1.02
"""Times eager's time from which on a kind is off: less is the noise of a run."""
OPS = {
    "norm": ("layer_norm", "rms_norm"),
    "group_norm": ("group_norm_act",),
    "modulated_norm": ("modulate_norm",),
    "mlp": ("mlp",),
    "linear_act": ("linear_act",),
    "attention": ("qkv_linear", "qk_norm_rope_interleaved", "qk_norm_rope_half", "attention_spatial", "attention_full"),
    "block": ("gate_add_modulate_norm",),
    "conv_block": ("conv3d_act", "patch_embed3d"),
}
"""The ops of a kind, as cases of bench_ops.py name them."""
_LONGEST = 70
_SIDES = re.compile(r"-(fwd|bwd)$")


def slower(results: list[dict[str, Any]]) -> dict[str, str]:
    """The kinds that measured slower in the results of one GPU, each with what was measured."""
    found: dict[str, str] = {}
    for benchmark in ("ops", "block", "train"):  # what comes later has more round it, and says more
        for result in results:
            if result["benchmark"] == benchmark:
                for kind, (ratios, error) in _measured(benchmark, result["rows"]).items():
                    told = error or _told(benchmark, ratios)
                    found.pop(kind, None)
                    if told is not None:
                        found[kind] = told
    return dict(sorted(found.items()))


def _measured(benchmark: str, rows: list[dict[str, Any]]) -> dict[str, tuple[list[float], str | None]]:
    """Of each kind gpupipe's time over eager's, by case; and what went wrong."""
    metric = "gpu_time_us" if benchmark == "ops" else "step_ms"
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    kinds: dict[tuple[str, str], str] = {}
    errors: dict[str, str] = {}
    for row in rows:
        if row["metric"] != metric:
            continue
        case, subject = _SIDES.sub("", row["case"]), row["subject"]
        kind = _kind(benchmark, case, subject)
        if kind is not None and row["value"] is None:
            errors.setdefault(kind, f"failed in {benchmark}: {row['error'][:_LONGEST]}")
        elif row["value"] is not None:
            times[case, subject].append(row["value"])
            if kind is not None:
                kinds[case, subject] = kind
    ratios: dict[str, list[float]] = defaultdict(list)
    for (case, subject), kind in kinds.items():
        own, other = times[case, subject], times.get((case, "eager"), [])
        if len(own) == len(other):  # both sides of both, or there is nothing to compare
            ratios[kind].append(sum(own) / sum(other))
    return {kind: (ratios.get(kind, []), errors.get(kind)) for kind in {*ratios, *errors}}


def _kind(benchmark: str, case: str, subject: str) -> str | None:
    """The kind whose time a row tells; None if it is another's."""
    if benchmark == "train":
        kind = subject.removeprefix("fused-")
        return kind if subject.startswith("fused-") and kind in OPS else None
    if subject != "gpupipe":
        return None
    if benchmark == "block":
        return "block"
    op = case.partition("-")[0]
    return next((kind for kind, ops in OPS.items() if op in ops), None)


def _told(benchmark: str, ratios: list[float]) -> str | None:
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    if mean <= SLOWER_BY:
        return None
    return f"{mean:.2f} times eager's time in {benchmark} ({len(ratios)} case{'s' if len(ratios) > 1 else ''})"


def written(folder: Path) -> str:
    """The lines between the marks."""
    by_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for benchmark in ("ops", "block", "train"):
        for file in sorted(folder.glob(f"{benchmark}--*.json")):
            gpu = file.stem.partition("--")[2]
            if gpu != "cpu":
                by_gpu[gpu].append(json.loads(file.read_text(encoding="utf-8")))
    found = {gpu: kinds for gpu, results in sorted(by_gpu.items()) if (kinds := slower(results))}
    if not found:
        return "SLOWER: dict[str, dict[str, str]] = {}\n"
    lines = ["SLOWER: dict[str, dict[str, str]] = {"]
    for gpu, kinds in found.items():
        lines.append(f"    {json.dumps(gpu)}: {{")
        lines += [f"        {json.dumps(kind)}: {json.dumps(told)}," for kind, told in kinds.items()]
        lines.append("    },")
    return "\n".join([*lines, "}"]) + "\n"


def rewritten(text: str, lines: str) -> str:
    """A file with other lines between its marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + lines + END + rest.split(END)[1]


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the defaults are out of step")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    command.add_argument("--defaults", type=Path, default=DEFAULTS, help="file that is rewritten")
    options = command.parse_args()
    old = options.defaults.read_text(encoding="utf-8")
    new = rewritten(old, written(options.results))
    if new == old:
        return 0
    if options.check:
        print("the defaults of fuse are not what the results say: run python benchmarks/fuse_defaults.py", file=sys.stderr)
        return 1
    options.defaults.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
