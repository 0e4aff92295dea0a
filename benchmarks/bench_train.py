"""Whole training steps of the reference video transformer: their time and memory, part by part, and whether it learns the same.

    python benchmarks/bench_train.py                                    # on the GPU; writes results/train--<gpu>.json
    python benchmarks/bench_train.py --subjects eager fused --loss-steps 0 --append
    python benchmarks/bench_train.py --quick --out /tmp/results         # seconds, on the CPU: shows that it works

The model is samples/video_dit.py with factorised attention, on videos that are on the device already: ``eager`` in torch's own
ops, bf16 autocast over float32 parameters, gradients clipped, fused AdamW. Each other subject differs from it in one thing, but
for ``gpupipe``, which has all of ours.
A step is forward, backward, clipping and the optimizer.

``loss_final`` is the mean loss of the last 20 of ``--loss-steps`` steps of a narrow model on real clips. Eager is trained once
more on the data in another order; a subject's losses must be nearer to eager's than that. All go to ``train-loss--<gpu>.csv``,
and drawn to a PNG beside it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parent.parent / "samples"))

import torch
from bench_block import Curves, Results, compare, draw, generator, keep, shown, smooth
from common import RESULTS, Row, failed, gpu_slug, summarise, write_results
from plain_dit import PlainVideoDiT
from torch import nn
from train_loop import NO_KERNELS, PROFILED_STEPS, Loop, busy_us, launches
from video_dit import VideoDiT, VideoDiTConfig, flow_loss

from gpupipe import VideoLoader, ops
from gpupipe.cli.demo_data import make_clips
from gpupipe.train import AdaptiveGraph, Precision, Watch

Compiled = Literal["no", "default", "reduce-overhead"]
CLIP, RATE, STEPS = 1.0, 1e-4, 5
"""The gradients' norm at most, the optimizer's rate, and steps of a run."""
WARM_UPS = 3
"""Steps before the clock starts, at least: CUDA graphs are recorded in the second."""
LOSS_RATE, LOSS_BATCH = 1e-3, 8
ANOTHER = "eager-another-order"
METRICS = ("step_ms", "samples_per_s", "peak_gb", "launches", "gpu_idle_percent")


@dataclass(frozen=True)
class Part:
    """What a subject does in another way than ``eager``.

    Attributes:
        fused: the model over ``gpupipe.ops``.
        precision: fields of a PrecisionConfig; None: torch's autocast and clipping, as in anybody's loop.
        watch: whether losses and gradients are watched.
        graphs: forward and backward by CUDA graphs.
    """

    fused: bool = False
    precision: dict[str, Any] | None = field(default=None)
    watch: bool = False
    graphs: bool = False
    compiled: Compiled = "no"


SUBJECTS = {
    "eager": Part(),
    "bf16": Part(precision={"dtype": "bfloat16", "master_weights": True}),
    "bf16-watch": Part(precision={"dtype": "bfloat16", "master_weights": True}, watch=True),
    "fp16-scaler": Part(precision={"dtype": "float16"}),
    "fused": Part(fused=True),
    "graphs": Part(graphs=True),
    "gpupipe": Part(fused=True, graphs=True, precision={"dtype": "bfloat16", "master_weights": True}),
    "compile": Part(compiled="default"),
    "compile-reduce-overhead": Part(compiled="reduce-overhead"),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Video, noise and time."""


class Training:
    """One subject at work on a model of its own, which starts as all others do."""

    def __init__(self, part: Part, config: VideoDiTConfig, device: torch.device, rate: float = RATE) -> None:
        self.device, self.part = device, part
        self.net = model_of(part.fused, config, device)
        self.precision = Precision(part.precision, device) if part.precision is not None else None
        parameters = self.precision.prepare(self.net) if self.precision is not None else list(self.net.parameters())
        self.parameters: list[torch.Tensor] = list(parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        self.model: nn.Module = self.net
        self.graph: AdaptiveGraph | None = None
        if part.graphs:
            self.graph = AdaptiveGraph(self.net, warmup_steps=1, capture_frequency=1, device=device)
            self.graph.installed()
        if part.compiled != "no":
            torch._dynamo.reset()
            if isinstance(self.net, PlainVideoDiT):
                self.net.tables_on(device)  # made in the first step, they would be compiled for, and all anew for the second
            mode = None if part.compiled == "default" else part.compiled
            self.model = torch.compile(self.net, fullgraph=True, mode=mode)  # type: ignore[assignment]
        self.watch: Watch | None = None
        if part.watch:
            assert self.precision is not None
            self.watch = Watch(self.net, lambda model, batch: flow_loss(model, *batch), self.precision)
        self.steps = 0

    def backward(self, inputs: Inputs) -> torch.Tensor:
        """Leaves the gradients of a step; its loss."""
        with self.precision.autocast() if self.precision is not None else torch.autocast(self.device.type, torch.bfloat16):
            loss = flow_loss(self.model, *inputs)
        if self.precision is not None:
            self.precision.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, inputs: Inputs) -> torch.Tensor:
        """A whole step; its loss, on the device."""
        loss = self.backward(inputs)
        if self.precision is not None:
            norm = self.precision.step(self.optimizer, clip=CLIP)
            if self.watch is not None:
                self.watch.after(self.steps, [inputs], loss, norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss

    def __call__(self, video: torch.Tensor) -> torch.Tensor:
        """A step on a video, with noise and times of its own."""
        return self.step((video, torch.randn_like(video), torch.rand(len(video), device=self.device)))

    def results(self, inputs: Inputs) -> Results:
        """The loss and all gradients, float32 on the CPU, without a step; those of a replay, where there are graphs."""
        for _ in range(0 if self.graph is None else WARM_UPS):
            self.backward(inputs)
            self.optimizer.zero_grad()
        made = {"loss": self.backward(inputs).float().cpu()[None]}
        self.check_graphs()
        scale = float(self.precision.scale) if self.precision is not None else 1.0
        masters = self.precision.masters if self.precision is not None else {}
        for name, value in self.net.named_parameters():
            grad = masters.get(name, value).grad
            assert grad is not None, f"{name} has no gradient"
            made[name] = grad.float().cpu() / scale
        return made

    def check_graphs(self) -> None:
        """Raises RuntimeError where there should be graphs and there are none: it would be eager's time."""
        if self.graph is not None and self.device.type == "cuda" and not self.graph.report().hits:
            raise RuntimeError(f"nothing was captured: {self.graph.report()}")


def model_of(fused: bool, config: VideoDiTConfig, device: torch.device) -> VideoDiT:
    """The same weights for all. Those that are zero at the start are drawn here, for through them no gradient would go on."""
    torch.manual_seed(0)
    with torch.device(device):
        model = (VideoDiT if fused else PlainVideoDiT)(config)
        for value in model.parameters():
            if not value.any():
                nn.init.normal_(value, std=0.02)
    return model


def inputs_of(config: VideoDiTConfig, batch: int, device: torch.device) -> Inputs:
    shape = (batch, config.channels, config.frames, config.height, config.width)
    source = generator(1)
    video, noise = (torch.randn(shape, generator=source).to(device) for _ in range(2))
    return video, noise, torch.rand(batch, generator=source).to(device)


class Fixed:
    """Videos that are on the device already, over and over."""

    def __init__(self, config: VideoDiTConfig, batch: int, device: torch.device) -> None:
        self._videos = [inputs_of(config, batch, device)[0] + number for number in range(4)]

    def batches(self) -> Iterator[torch.Tensor]:
        return iter(self._videos)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def expected(config: VideoDiTConfig, device: torch.device) -> tuple[Inputs, Results, Results]:
    """(inputs, eager's results, those in float32) of one block of the model: the whole would not fit in float32."""
    inputs = inputs_of(config, 1, device)
    eager = Training(SUBJECTS["eager"], config, device).results(inputs)
    exact = Training(Part(precision={"dtype": "float32"}), config, device).results(inputs)
    return inputs, eager, exact


def step_rows(config: VideoDiTConfig, batch: int, subjects: list[str], device: torch.device, runs: int) -> list[Row]:
    """All rows of a case; a subject that fails says why."""
    case = f"dit-d{config.depth}-{tokens(config)}-b{batch}"
    one = VideoDiTConfig(**{**vars(config), "depth": 1})
    inputs, eager, exact = expected(one, device)
    rows: list[Row] = []
    for name in subjects:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            compare(Training(SUBJECTS[name], one, device).results(inputs), eager, exact)
            gc.collect()  # a model with graphs and they hold each other
            rows += shown(measured(case, name, Training(SUBJECTS[name], config, device), config, batch, runs))
        except Exception as fault:  # whatever a subject raises is its result, told in its row
            rows += shown([failed(case, name, "step_ms", f"{type(fault).__name__}: {fault}", "lower")])
    return rows


def measured(case: str, name: str, training: Training, config: VideoDiTConfig, batch: int, runs: int) -> list[Row]:
    """The rows of one subject."""
    device = training.device
    on = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if on is not None:
        torch.cuda.synchronize(device)  # the model was made on another stream
    with torch.cuda.stream(on) if on is not None else nullcontext():
        loop = Loop(training, Fixed(config, batch, device), device)
        few = 1 if device.type == "cpu" else STEPS
        loop.steps(0.0, max(few, WARM_UPS))
        times = []
        for _ in range(runs):
            first, last, waits = loop.steps(0.0, few)
            times.append(first.ms_until(last) / len(waits))
        rows = [summarise(case, name, "step_ms", times, "lower")]
        rows.append(summarise(case, name, "samples_per_s", [1000 * batch / each for each in times]))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            loop.steps(0.0, 2)
            torch.cuda.synchronize(device)
            segments: list[Any] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            peak = torch.cuda.max_memory_allocated(device) + unseen_bytes(segments)
            rows.append(summarise(case, name, "peak_gb", [peak / 1e9], "lower"))
            training.check_graphs()
            events = loop.traced()
            busy = busy_us(events) / 1000 / PROFILED_STEPS
            if busy:
                rows.append(summarise(case, name, "launches", [launches(events) / PROFILED_STEPS], "lower"))
                idle = [max(0.0, 100 * (1 - busy / each)) for each in times]
                rows.append(summarise(case, name, "gpu_idle_percent", idle, "lower"))
            else:
                rows += [failed(case, name, metric, NO_KERNELS, "lower") for metric in METRICS[3:]]
    return rows


def unseen_bytes(segments: Iterable[Mapping[str, Any]]) -> int:
    """Memory of CUDA graphs in which no tensor lies: replays write to it, and no peak of tensors shows it.

    Args:
        segments: as ``torch.cuda.memory_snapshot`` gives them.
    """
    own = [each for each in segments if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in own)


def tokens(config: VideoDiTConfig) -> str:
    t, h, w = config.grid
    return f"n{t * h * w}-h{config.hidden}"


def real_clips(config: VideoDiTConfig, clips: int) -> torch.Tensor:
    """What the narrow model learns: (clips, 3, T, H, W), float32 of -1 to 1, decoded from files."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_clips(Path(folder), train=-(-clips // 6), val=1)
        look = {"preset": "diffusion", "size": config.height, "dtype": "float32"}
        one = {"clip": {"frames": config.frames, "stride": 2}, "transform": look, "batch": 6, "shuffle": False, "device": "cpu"}
        with VideoLoader(made.train, config=one) as loader:
            return torch.cat([batch.video for batch in loader])


def train(
    part: Part, order: int, config: VideoDiTConfig, videos: torch.Tensor, steps: int, device: torch.device
) -> list[float]:
    """The loss of each step; ``order`` seeds which videos, times and noise come when."""
    training, source, losses = Training(part, config, device, LOSS_RATE), generator(order), []
    for _ in range(steps):
        clean = videos[torch.randint(len(videos), (LOSS_BATCH,), generator=source)]
        noise, time = torch.randn(clean.shape, generator=source), torch.rand(LOSS_BATCH, generator=source)
        losses.append(training.step((clean.to(device), noise.to(device), time.to(device))))
    return [float(loss) for loss in losses]


def loss_rows(
    config: VideoDiTConfig, subjects: list[str], videos: torch.Tensor, steps: int, device: torch.device
) -> tuple[list[Row], Curves]:
    """The loss that each subject comes to, and the curves; it counts if it is as near to eager's as another order of data."""
    case = f"loss-dit-d{config.depth}-{tokens(config)}"
    rows: list[Row] = []
    curves: Curves = {}
    for name in ["eager", ANOTHER, *(name for name in subjects if name != "eager")]:
        # The other order is a case of its own: beside the subjects it would pass for one that did the same.
        own, subject = (f"{case}-another-order", "eager") if name == ANOTHER else (case, name)
        try:
            curves[name] = train(SUBJECTS[subject], int(name == ANOTHER), config, videos, steps, device)
            rows.append(verdict(own, subject, name, curves))
        except Exception as fault:  # as above
            rows.append(failed(own, subject, "loss_final", f"{type(fault).__name__}: {fault}", "lower"))
    return rows, curves


def verdict(case: str, subject: str, name: str, curves: Curves) -> Row:
    """The row of a curve that was just trained."""
    if subject != "eager" and "eager" in curves and ANOTHER in curves:
        gaps = [float((smooth(curves[each]) - smooth(curves["eager"])).abs().mean()) for each in (name, ANOTHER)]
        if not gaps[0] <= gaps[1]:
            told = f"{gaps[0]:.5f} off eager's losses in the mean, another order of data {gaps[1]:.5f}"
            return failed(case, subject, "loss_final", told, "lower")
    return summarise(case, subject, "loss_final", [float(smooth(curves[name])[-1])], "lower")


def config_of(size: list[int], depth: int, patch: tuple[int, int, int], channels: int) -> VideoDiTConfig:
    """From columns, heads and the token grid."""
    hidden, heads, t, h, w = size
    return VideoDiTConfig(t * patch[0], h * patch[1], w * patch[2], patch, hidden, depth, heads, channels)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    sizes: dict[str, Any] = {"nargs": 5, "type": int, "metavar": ("HIDDEN", "HEADS", "T", "H", "W")}
    command.add_argument("--size", default=[3072, 24, 32, 32, 32], **sizes)
    command.add_argument("--depth", type=int, default=4)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--loss-size", default=[256, 4, 8, 8, 8], help="of the narrow model", **sizes)
    command.add_argument("--loss-steps", type=int, default=500, help="0: trains nothing")
    command.add_argument("--loss-clips", type=int, default=60)
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--append", action="store_true", help="keep other cases of the file, if of this commit and machine")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, to see that everything runs")
    options = command.parse_args()
    if options.quick:
        options.device, options.runs, options.depth, options.loss_steps, options.loss_clips = "cpu", 1, 1, 40, 6
        options.size, options.loss_size = [64, 2, 2, 4, 4], [32, 2, 2, 4, 4]
        options.subjects = [name for name, part in SUBJECTS.items() if part.compiled == "no"]
        torch.set_num_threads(1)  # at these sizes more would only wait for each other
        ops.use("reference")  # where kernels are interpreted, the training would take minutes
    from gpupipe.observe.measure import machine_facts

    device = torch.device(options.device)
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    # The patches are those of a video autoencoder's latents, of 16 channels; the narrow model learns pixels.
    rows = step_rows(
        config_of(options.size, options.depth, (1, 2, 2), 16), options.batch, options.subjects, device, options.runs
    )
    write_results("train", rows, facts, options.out, keep_other_cases=options.append)  # the rest may not come to its end
    if options.loss_steps:
        narrow = config_of(options.loss_size, 2, (1, 4, 4), 3)
        videos = real_clips(narrow, options.loss_clips)
        found, curves = loss_rows(narrow, options.subjects, videos, options.loss_steps, device)
        rows += shown(found)
        file = options.out / f"train-loss--{gpu_slug(facts['gpu'])}.csv"
        keep(curves, file)
        draw(curves, file.with_suffix(".png"), found[0].case)
    print(write_results("train", rows, facts, options.out, keep_other_cases=options.append))


if __name__ == "__main__":
    main()
