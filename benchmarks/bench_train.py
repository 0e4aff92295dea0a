"""Whole training steps of video models: their time and memory, part by part, fed by a loader, and whether they learn the same.

    python benchmarks/bench_train.py                                    # on the GPU; writes results/train--<gpu>.json
    python benchmarks/bench_train.py --models dit --subjects eager fused --feeds --loss-steps 0 --append
    python benchmarks/bench_train.py --quick --out /tmp/results         # seconds, on the CPU: shows that it works

Models are samples/video_dit.py with factorised attention, and two of diffusers' as they are published, on latents that are on
the device already: ``eager`` in torch's own ops, bf16 autocast over float32 parameters, gradients clipped, fused AdamW. Each
other subject differs from it in one thing, but for ``gpupipe``, which has all of ours. A step is forward, backward, clipping
and the optimizer. With ``--feeds`` the reference model also learns clips as a loader makes them; see train_feed.py.

``loss_final`` is the mean loss of the last 20 of ``--loss-steps`` steps of a narrow model on real clips. Eager is trained once
more on the data in another order; a subject's losses must be nearer to eager's than that. All go to ``train-loss--<gpu>.csv``,
of other models than the reference to ``train-loss-<model>--<gpu>.csv``, and drawn to a PNG beside it.

The result file is written after each subject. Those that are not begun within ``--minutes`` are rows that say so.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "samples"))

import torch
import train_feed
from bench_block import draw, keep, shown
from common import NOT_BEGUN, RESULTS, Row, commit, failed, gpu_slug, summarise, write_results
from train_curves import loss_rows, real_clips
from train_loop import NO_KERNELS, Loop, busy_us, launches
from train_models import Model, Published, Reference, inputs_of
from train_parts import SUBJECTS, WARM_UPS, Training, expected
from video_dit import VideoDiTConfig

from gpupipe import ops

STEPS, PROFILED = 5, 3
"""Steps of a run, and those that the profiler sees."""
RUN_MS = 2500.0
"""A run of slow steps is of fewer, at least two."""
PUBLISHED_SUBJECTS = ("eager", "fused", "gpupipe", "compile")
"""Of diffusers' models."""
PUBLISHED = {
    # Wan 2.1 14B and HunyuanVideo, as wide as they are published, with as many layers as 140 GB have room for in eager's step:
    # it keeps 0.46 MB a token and layer in wan, 0.35 MB in two layers of hunyuan, one of each kind, and 18 bytes a parameter.
    "wan": Published("wan", 40, 128, (5,), (21, 30, 52), 512, feed=13824),
    "hunyuan": Published("hunyuan", 24, 128, (4, 7), (16, 34, 60), 256),
}
NARROW = {
    "wan": Published("wan", 4, 64, (2,), (8, 8, 8), 16, (64, 32), 1024, channels=3, patch=4),
    "hunyuan": Published("hunyuan", 4, 64, (1, 1), (8, 8, 8), 16, (64, 32), channels=3, patch=4),
}
"""They learn clips of the same shape as the narrow reference model."""
QUICK = {
    "wan": Published("wan", 2, 16, (1,), (2, 4, 4), 5, (16, 8), 48, channels=3, patch=4),
    "hunyuan": Published("hunyuan", 2, 16, (1, 1), (2, 4, 4), 5, (16, 8), channels=3, patch=4),
}
Told = Callable[[list[Row]], object]
"""Called with the rows of each subject as soon as they are there."""


class Fixed:
    """Videos that are on the device already, over and over."""

    def __init__(self, model: Model, batch: int, device: torch.device) -> None:
        self._videos = [inputs_of(model, batch, device)[0] + number for number in range(2)]

    def batches(self) -> Iterator[torch.Tensor]:
        return iter(self._videos)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def step_rows(
    model: Model, batch: int, subjects: Sequence[str], device: torch.device, runs: int, told: Told, begin: Callable[[], bool]
) -> list[Row]:
    """All rows of a case; a subject that fails, or is not begun in time, says why."""
    case, rows, one = f"{model.case}-b{batch}", list[Row](), model.one_block()
    truth = None
    for name in subjects:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            if not begin():
                raise TimeoutError(NOT_BEGUN)
            truth = truth or expected(one, device)
            truth.check(Training(SUBJECTS[name], one, device).results(truth.inputs))
            gc.collect()  # a model with graphs and they hold each other
            found = measured(case, name, Training(SUBJECTS[name], model, device), batch, runs)
        except Exception as fault:  # whatever a subject raises is its result, told in its row
            found = [failed(case, name, "step_ms", f"{type(fault).__name__}: {fault}", "lower")]
        told(found)
        rows += found
    return rows


def measured(case: str, name: str, training: Training, batch: int, runs: int) -> list[Row]:
    """The rows of one subject."""
    device = training.device
    on = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if on is not None:
        torch.cuda.synchronize(device)  # the model was made on another stream
    with torch.cuda.stream(on) if on is not None else nullcontext():
        loop = Loop(training, Fixed(training.kind, batch, device), device)
        loop.steps(0.0, WARM_UPS - 1)
        first, last, _ = loop.steps(0.0, 1)
        few = 1 if device.type == "cpu" else max(2, min(STEPS, round(RUN_MS / first.ms_until(last))))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(runs):
            first, last, waits = loop.steps(0.0, few)
            times.append(first.ms_until(last) / len(waits))
        rows = [summarise(case, name, "step_ms", times, "lower")]
        rows.append(summarise(case, name, "samples_per_s", [1000 * batch / each for each in times]))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            segments: list[Any] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            peak = torch.cuda.max_memory_allocated(device) + unseen_bytes(segments)
            rows.append(summarise(case, name, "peak_gb", [peak / 1e9], "lower"))
            training.check_graphs()
        saved = training.saved_gb(inputs_of(training.kind, batch, device))
        if saved is not None:
            rows.append(summarise(case, name, "saved_gb", [saved], "lower"))
        if device.type == "cuda":
            events = loop.traced(PROFILED)
            busy = busy_us(events) / 1000 / PROFILED
            if busy:
                rows.append(summarise(case, name, "launches", [launches(events) / PROFILED], "lower"))
                idle = [max(0.0, 100 * (1 - busy / each)) for each in times]
                rows.append(summarise(case, name, "gpu_idle_percent", idle, "lower"))
            else:
                rows += [failed(case, name, metric, NO_KERNELS, "lower") for metric in ("launches", "gpu_idle_percent")]
    return rows


def unseen_bytes(segments: Iterable[Mapping[str, Any]]) -> int:
    """Memory of CUDA graphs in which no tensor lies: replays write to it, and no peak of tensors shows it.

    Args:
        segments: as ``torch.cuda.memory_snapshot`` gives them.
    """
    own = [each for each in segments if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in own)


def config_of(size: list[int], depth: int, patch: tuple[int, int, int], channels: int) -> VideoDiTConfig:
    """From columns, heads and the token grid."""
    hidden, heads, t, h, w = size
    return VideoDiTConfig(t * patch[0], h * patch[1], w * patch[2], patch, hidden, depth, heads, channels)


def parse() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--models", nargs="*", choices=["dit", *PUBLISHED], default=["dit", *PUBLISHED], help="none: left out")
    command.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    sizes: dict[str, Any] = {"nargs": 5, "type": int, "metavar": ("HIDDEN", "HEADS", "T", "H", "W")}
    command.add_argument("--size", default=[3072, 24, 32, 32, 32], help="of the reference model", **sizes)
    command.add_argument("--depth", type=int, default=4, help="of the reference model")
    command.add_argument("--layers", type=int, nargs="+", help="of the other models: fewer where memory is less")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--loss-size", default=[256, 4, 8, 8, 8], help="of the narrow reference model", **sizes)
    command.add_argument("--loss-steps", type=int, default=500, help="0: trains nothing")
    command.add_argument("--loss-clips", type=int, default=60)
    command.add_argument("--device", default="cuda:0")
    command.add_argument("--runs", type=int, default=5)
    command.add_argument("--minutes", type=float, default=60.0, help="no further subject is begun after so long")
    command.add_argument("--append", action="store_true", help="keep other cases of the file, if of this machine")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, to see that everything runs")
    train_feed.add_options(command)
    return command.parse_args()


def be_quick(options: argparse.Namespace) -> None:
    """Settings of ``--quick``."""
    options.device, options.runs, options.depth, options.loss_steps, options.loss_clips = "cpu", 1, 1, 40, 6
    options.size, options.loss_size = [64, 2, 2, 4, 4], [32, 2, 2, 4, 4]
    options.subjects = [name for name in options.subjects if SUBJECTS[name].compiled == "no"]
    options.feeds, options.loaders = [f"{name}-tiny" for name in options.feeds], ["headspace", "eager", "pipeline", "gpupipe"]
    options.warmup, options.windows, options.seconds = 0.2, 2, 0.3


def main() -> None:
    options = parse()
    if options.quick:
        be_quick(options)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # at these sizes more would only wait for each other
        ops.use("reference")  # where kernels are interpreted, the training would take minutes
    if options.one_fed:
        train_feed.one(options)
        return
    from gpupipe.observe.measure import machine_facts

    os.environ["GPUPIPE_COMMIT"] = commit()  # asked once: the file that is written may be one that git knows
    facts = machine_facts()
    if device.type == "cpu":
        facts["gpu"] = None
    until: float = time.monotonic() + 60 * options.minutes
    rows: list[Row] = []

    def begin() -> bool:
        return time.monotonic() < until

    def told(found: list[Row]) -> Path:  # a run may be ended before its time
        rows.extend(shown(found))
        return write_results("train", rows, facts, options.out, keep_other_cases=options.append)

    # The patches are those of a video autoencoder's latents, of 16 channels; the narrow models learn pixels.
    models: dict[str, Model] = {"dit": Reference(config_of(options.size, options.depth, (1, 2, 2), 16))}
    narrow: dict[str, Model] = {"dit": Reference(config_of(options.loss_size, 2, (1, 4, 4), 3))}
    models |= QUICK if options.quick else {name: few_layers(model, options.layers) for name, model in PUBLISHED.items()}
    narrow |= QUICK if options.quick else NARROW
    for name in options.models:
        subjects = [each for each in options.subjects if name == "dit" or each in PUBLISHED_SUBJECTS]
        step_rows(models[name], options.batch, subjects, device, options.runs, told, begin)
    train_feed.rows(options, told, begin)
    if options.loss_steps and options.models:
        videos = real_clips(narrow["dit"], options.loss_clips)
        for name in options.models:
            subjects = [each for each in options.subjects if name == "dit" or each in PUBLISHED_SUBJECTS]
            found, curves = loss_rows(narrow[name], subjects, videos, options.loss_steps, device, begin)
            told(found)
            if curves:
                file = options.out / f"train-loss{'' if name == 'dit' else f'-{name}'}--{gpu_slug(facts['gpu'])}.csv"
                keep(curves, file)
                draw(curves, file.with_suffix(".png"), found[0].case)
    print(told([]))


def few_layers(model: Published, layers: list[int] | None) -> Published:
    """A model with other numbers of layers: one for each kind of block, or one for all."""
    if not layers:
        return model
    return Published(**{**vars(model), "layers": tuple((layers * len(model.layers))[: len(model.layers)])})


if __name__ == "__main__":
    main()
