"""How well does the tuner's model rank the ways to launch a kernel?

    python benchmarks/ranking.py                        # on the GPU; writes results/ranking--<gpu>.json
    python benchmarks/ranking.py --cases rms_norm mlp

Every candidate of every kernel of the ops' benchmark is timed, with inputs out of L2. ``place_of_best`` is where the model
ranks the fastest, counted from 1; ``loss`` is the time of the fastest that the tuner would try, over that of the fastest of
all. The process exits with 1 where a loss is above ``--allow``: then the model needs another look.

Kernels are compiled beforehand by several processes, into Triton's own cache.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from common import RESULTS, Row, summarise, write_results
from op_cases import all_cases, named
from op_timing import Timing

from gpupipe.device.autotune import TIMED, Choice, noting


def choices_of(name: str, most: int, timed: bool) -> list[Choice]:
    """What was tried for each kernel of a case, forward and backward."""
    case = next(case for case in all_cases() if case.name == name)
    with noting(most, timed=timed) as choices:
        Timing(case.gpupipe, case.inputs(torch.device("cuda:0")), 1).results()
    return list(choices)


def loss(choice: Choice) -> float:
    """How much slower the fastest is that the tuner would try, than the fastest of all; 1 for equal."""
    return choice.us[choice.best(TIMED)] / choice.us[choice.best()]


def rows_of(name: str, choice: Choice) -> list[Row]:
    case = f"{name}-{choice.op}"
    tried = sum(math.isfinite(us) for us in choice.us)
    print(
        f"{case:64} best {choice.us[choice.best()]:8.1f} us, place {choice.best() + 1:2} of {tried}, loss {loss(choice):.3f}: "
        f"{dict(choice.candidates[choice.best()])}",
        flush=True,
    )
    return [
        summarise(case, "gpupipe", "place_of_best", [choice.best() + 1.0], "lower"),
        summarise(case, "gpupipe", "loss", [loss(choice)], "lower"),
        summarise(case, "gpupipe", "gpu_time_us", [choice.us[choice.best()]], "lower"),
    ]


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--cases", nargs="+", help="ops or whole case names; all by default")
    command.add_argument("--most", type=int, default=64, help="candidates of a kernel, of those that the model ranks highest")
    command.add_argument("--workers", type=int, default=8, help="processes that compile")
    command.add_argument("--allow", type=float, default=1.05)
    command.add_argument("--out", type=Path, default=RESULTS)
    options = command.parse_args()
    from gpupipe.observe.measure import machine_facts

    names = [case.name for case in named(all_cases(), options.cases)]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(choices_of, names, [options.most] * len(names), [False] * len(names)):
            pass
    rows: list[Row] = []
    worst = 1.0
    facts = machine_facts()
    for name in names:  # written after each, for a run may be ended before its time
        for choice in choices_of(name, options.most, True):
            rows += rows_of(name, choice)
            worst = max(worst, loss(choice))
        torch.cuda.empty_cache()
        written = write_results("ranking", rows, facts, options.out)
    print(written)
    print(f"worst loss {worst:.3f}", file=sys.stderr)
    return int(worst > options.allow)


if __name__ == "__main__":
    sys.exit(main())
