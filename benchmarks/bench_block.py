"""A whole block of a video diffusion transformer: time and memory of a training step, and whether it learns the same.

    python benchmarks/bench_block.py                                   # on the GPU; writes results/block--<gpu>.json
    python benchmarks/bench_block.py --attention factorised full --subjects gpupipe compile --loss-steps 0
    python benchmarks/bench_block.py --quick --out /tmp/results        # seconds, on the CPU: shows that it works

The block: modulated norm, packed QKV, QK-RMSNorm and rotary embedding, attention in space, then the same along time, then the
MLP, each with a gated residual; ``full`` has one attention over all tokens. Every subject has the same parameters and inputs
and owes the same output and gradients of inputs and parameters. They are compared with the block in float32.

``step_ms`` is a forward and a backward, ``peak_mb`` the most that is allocated within them (parameters, their gradients and
inputs among it), ``saved_mb`` what a forward leaves allocated for its backward, beyond inputs and output.

``loss_final`` is the mean loss of the last 20 of ``--loss-steps`` steps of a small stack of blocks, which learns to find moving
waves in noise: bf16 parameters with float32 copies that AdamW steps. Eager is trained once more on the data in another order;
gpupipe's losses must be nearer to eager's than that. All go to ``block-loss--<gpu>.csv``, and drawn to a PNG beside it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_ops import NEAR
from block_model import Axis, Block, Denoiser, Form, Size
from common import RESULTS, Row, failed, gpu_slug, summarise, write_results
from op_timing import Inputs, Timing, timer
from torch.nn import functional

from gpupipe import ops

Results = dict[str, torch.Tensor]
Curves = dict[str, list[float]]
SUBJECTS = ("gpupipe", "eager", "compile", "compile-nomix")
AXES: dict[str, tuple[Axis, ...]] = {"factorised": ("spatial", "temporal"), "full": ("full",)}
DTYPE = torch.bfloat16
STEPS = 5
"""Steps in a row that a run times, so that the host may run ahead as it does in training."""
LAST = 20
"""Steps whose mean loss counts: the loss of one depends much on the noise that was drawn for it."""
CHANNELS, VIDEOS, BATCH, RATE = 16, 64, 4, 1e-3
ANOTHER = "eager-another-order"
CURVES: dict[str, tuple[Form, int]] = {"gpupipe": ("gpupipe", 0), "eager": ("eager", 0), ANOTHER: ("eager", 1)}
"""What is trained: the form, and the seed of the order of data."""


def generator(seed: int) -> torch.Generator:
    """On the CPU, so that every device gets the same values."""
    return torch.Generator().manual_seed(seed)


def subject_of(block: Block, name: str) -> Callable[..., torch.Tensor]:
    block.form = "gpupipe" if name == "gpupipe" else "eager"
    if not name.startswith("compile"):
        return block
    torch._dynamo.reset()
    options: dict[str, Any] = {"triton.mix_order_reduction": name == "compile"}
    return torch.compile(block, fullgraph=True, options=options)


class Step:
    """A forward and a backward of one subject, with gradients made anew, as after ``zero_grad``."""

    def __init__(self, function: Callable[..., torch.Tensor], block: Block, inputs: Inputs) -> None:
        self._function, self._inputs = function, inputs
        self._leaves = {**inputs, **dict(block.named_parameters())}
        self._grad = torch.randn(inputs["x"].shape, generator=generator(2)).to(DTYPE).to(inputs["x"])
        self._device = inputs["x"].device

    def __call__(self) -> torch.Tensor:
        for leaf in self._leaves.values():
            leaf.grad = None
        out = self._function(**self._inputs)
        out.backward(self._grad)  # type: ignore[no-untyped-call]
        return out.detach()

    def results(self) -> Results:
        """The output and all gradients, on the CPU: elsewhere they would count as memory of the subject that comes next."""
        made = {"out": self().cpu()}
        for name, leaf in self._leaves.items():
            assert leaf.grad is not None, f"{name} has no gradient"
            made[name] = leaf.grad.cpu()
        return made

    def ms(self, runs: int) -> list[float]:
        """Milliseconds a step, a value a run."""
        if self._device.type != "cuda":
            times = [time.perf_counter()]
            for _ in range(runs):
                self()
                times.append(time.perf_counter())
            return [(end - begin) * 1e3 for begin, end in pairwise(times)]
        events = [timer() for _ in range(runs + 1)]
        for event in events:
            for _ in range(STEPS):  # those before the first event warm up
                self()
            event.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / STEPS for begin, end in pairwise(events)]

    def peak_mb(self) -> float:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) / 1e6


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean difference as a share of the exact values' mean size."""
    return float((found.float() - exact).abs().mean() / exact.abs().mean().clamp_min(1e-12))


def compare(found: Results, eager: Results, exact: Results) -> None:
    """Raises RuntimeError where a subject does other work than eager.

    Its error may be twice eager's own: through a block, bf16 can come to more than ``NEAR`` in gradients whose terms cancel,
    such as those of the norms' weights.
    """
    for name, value in exact.items():
        error, own = off(found[name], value), off(eager[name], value)
        if not error <= max(NEAR, 2 * own):
            raise RuntimeError(f"{name} is {error:.1%} off in the mean, eager's {own:.1%}")


def step_rows(kind: str, size: Size, subjects: list[str], device: torch.device, runs: int) -> list[Row]:
    """All rows of a case; a subject that fails says why in its row."""
    case = f"{kind}-{size}"
    torch.manual_seed(0)
    block = Block(size, AXES[kind], "eager", device).to(DTYPE)
    shapes = {"x": (1, size.tokens, size.hidden), "cond": (1, size.hidden)}
    drawn = {name: torch.randn(shape, generator=generator(1)).to(device, DTYPE) for name, shape in shapes.items()}
    inputs = {name: value.requires_grad_() for name, value in drawn.items()}
    eager = Step(block, block, inputs).results()
    wide = copy.deepcopy(block).float()
    exact = Step(wide, wide, {name: value.detach().float().requires_grad_() for name, value in inputs.items()}).results()
    del wide
    rows: list[Row] = []
    for name in subjects:
        gc.collect()
        try:
            function = subject_of(block, name)
            step = Step(function, block, inputs)
            compare(step.results(), eager, exact)
            rows.append(summarise(case, name, "step_ms", step.ms(runs), "lower"))
            if device.type == "cuda":
                rows.append(summarise(case, name, "peak_mb", [step.peak_mb()], "lower"))
                rows.append(summarise(case, name, "saved_mb", [Timing(function, inputs, 1).saved_mb()], "lower"))
        except Exception as fault:  # whatever a peer raises is its result, told in its row
            rows.append(failed(case, name, "step_ms", f"{type(fault).__name__}: {fault}", "lower"))
    return rows


def train(form: Form, order: int, blocks: int, size: Size, steps: int, device: torch.device) -> list[float]:
    """The loss of each step, from the same start; ``order`` seeds which videos, times and noise come when."""
    torch.manual_seed(0)
    model = Denoiser(CHANNELS, blocks, size, form, device).to(DTYPE)
    parameters: list[torch.Tensor] = list(model.parameters())
    copies = [value.detach().float() for value in parameters]  # steps are too small for bf16 to add up
    optimizer = torch.optim.AdamW(copies, lr=RATE)
    videos, source, losses = waves(size), generator(order), []
    for _ in range(steps):
        clean = videos[torch.randint(VIDEOS, (BATCH,), generator=source)]
        noise = torch.randn(clean.shape, generator=source)
        at = torch.rand(BATCH, generator=source)
        made = model(torch.lerp(clean, noise, at[:, None, None]).to(device, DTYPE), at.to(device))
        loss = functional.mse_loss(made.float(), (noise - clean).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        for value, master in zip(parameters, copies, strict=True):
            assert value.grad is not None
            master.grad, value.grad = value.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, copies)
    return [float(loss) for loss in losses]


def waves(size: Size) -> torch.Tensor:
    """What is learned: (VIDEOS, N, CHANNELS), float32 of variance 1, each a plane wave with a phase a channel."""
    source = generator(3)
    place = torch.cartesian_prod(*(torch.arange(length) / length for length in size.grid))
    speed = torch.randint(-2, 3, (VIDEOS, 1, 3), generator=source)
    phase = torch.rand(VIDEOS, 1, CHANNELS, generator=source)
    return math.sqrt(2) * torch.cos(2 * math.pi * ((place * speed).sum(-1, keepdim=True) + phase))


def smooth(losses: list[float]) -> torch.Tensor:
    """Means of ``LAST`` steps, one for each step that has as many before it."""
    return torch.tensor(losses).unfold(0, min(LAST, len(losses)), 1).mean(1)


def loss_rows(case: str, run: Callable[[Form, int], list[float]]) -> tuple[list[Row], Curves]:
    """The loss that each comes to, and the curves; gpupipe's counts if it is as near to eager's as another order of data."""
    rows: list[Row] = []
    curves: Curves = {}
    for name, (form, order) in CURVES.items():
        # The other order is a case of its own: beside gpupipe it would pass for a peer that did the same.
        own = f"{case}-another-order" if name == ANOTHER else case
        try:
            curves[name] = run(form, order)
            rows.append(summarise(own, form, "loss_final", [float(smooth(curves[name])[-1])], "lower"))
        except Exception as fault:  # as above
            rows.append(failed(own, form, "loss_final", f"{type(fault).__name__}: {fault}", "lower"))
    if len(curves) == len(CURVES):
        gaps = [float((smooth(curves[name]) - smooth(curves["eager"])).abs().mean()) for name in ("gpupipe", ANOTHER)]
        told = f"{gaps[0]:.5f} off eager's losses in the mean, another order of data {gaps[1]:.5f}"
        print(f"{case}: gpupipe is {told}")
        if not gaps[0] <= gaps[1]:
            rows[0] = failed(case, "gpupipe", "loss_final", told, "lower")
    return rows, curves


def keep(curves: Curves, file: Path) -> None:
    """Writes the curves as a table, a line a step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        table.writerow(["step", *curves])
        for step, losses in enumerate(zip(*curves.values(), strict=True), 1):
            table.writerow([step, *(f"{loss:.6f}" for loss in losses)])


def draw(curves: Curves, file: Path, title: str) -> None:
    """Writes a PNG of the curves over each other, and of how far each is from eager's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, (name, losses) in enumerate(curves.items()):
        means = smooth(losses)
        steps = range(len(losses) - len(means) + 1, len(losses) + 1)
        look: dict[str, Any] = {"color": f"C{number}", "linestyle": ("-", "--", ":")[number % 3]}
        top.plot(range(1, len(losses) + 1), losses, color=f"C{number}", alpha=0.2, linewidth=1)
        top.plot(steps, means, label=name, **look)
        if "eager" in curves:
            bottom.plot(steps, means - smooth(curves["eager"]), **look)
    top.set(ylabel=f"loss, and its mean over {LAST} steps", title=title)
    top.legend(frameon=False)
    bottom.set(ylabel="mean less eager's", xlabel="step")
    figure.savefig(file, dpi=110)


def shown(rows: list[Row]) -> list[Row]:
    """The same rows, printed."""
    for row in rows:
        text = f"{row.value:10.4f}  ({row.low:.4f} to {row.high:.4f})" if row.value is not None else f"failed: {row.error}"
        print(f"{row.case:42} {row.subject:14} {row.metric:10} {text}", flush=True)
    return rows


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--attention", nargs="+", choices=list(AXES), default=["factorised"])
    command.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    sizes: dict[str, Any] = {"nargs": 5, "type": int, "metavar": ("HIDDEN", "HEADS", "T", "H", "W")}
    command.add_argument("--size", default=[3072, 24, 32, 32, 32], **sizes)
    command.add_argument("--loss-size", default=[768, 6, 8, 16, 16], help="of the stack that is trained", **sizes)
    command.add_argument("--loss-blocks", type=int, default=2)
    command.add_argument("--loss-steps", type=int, default=200, help="0: trains nothing")
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=10)
    command.add_argument("--append", action="store_true", help="keep other cases of the file, if of this machine")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, to see that everything runs")
    options = command.parse_args()
    if options.quick:
        options.device, options.runs, options.subjects, options.attention = "cpu", 1, ["gpupipe", "eager"], list(AXES)
        options.size, options.loss_size, options.loss_steps = [64, 2, 3, 4, 5], [64, 2, 2, 4, 4], 60
        torch.set_num_threads(1)  # at these sizes more would only wait for each other
        ops.use("reference")  # where kernels are interpreted, the training would take minutes
    from gpupipe.observe.measure import machine_facts

    device = torch.device(options.device)
    size, small = (Size(given[0], given[1], tuple(given[2:])) for given in (options.size, options.loss_size))
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    rows: list[Row] = []
    for kind in options.attention:  # written after each, for a run may be ended before its time
        rows += shown(step_rows(kind, size, options.subjects, device, options.runs))
        write_results("block", rows, facts, options.out, keep_other_cases=options.append)
    if options.loss_steps:
        case = f"train-b{options.loss_blocks}-{small}"
        found, curves = loss_rows(
            case, lambda form, order: train(form, order, options.loss_blocks, small, options.loss_steps, device)
        )
        rows += shown(found)
        file = options.out / f"block-loss--{gpu_slug(facts['gpu'])}.csv"
        keep(curves, file)
        draw(curves, file.with_suffix(".png"), case)
    print(write_results("block", rows, facts, options.out, keep_other_cases=options.append))


if __name__ == "__main__":
    main()
