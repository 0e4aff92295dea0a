"""The part of bench_train.py that is fed by loaders: the reference model learns clips as they are decoded.

Each subject is measured in a process of its own, as in bench_loader_train.py, whose loaders these are. ``pipeline`` differs
from ``eager`` in its data alone: one VideoLoader behind a PipelineExecutor, which draws noise and times on the data stream, and
in the feed ``latents`` has a frozen autoencoder encode the clips there. The others do that in the loop.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_loader_train import CLIPS_PER_S, MARK, SOURCE_SECONDS, SOURCES
from clip_rates import warm_up
from common import NOT_BEGUN, Row, answers, failed, summarise
from loader_cases import Case, Draw, check, draw
from loader_subjects import Gpupipe, Maker, gpupipe
from make_media import make
from train_loop import NO_KERNELS, WARM_STEPS, Loop, busy_us, launches, percentile
from train_models import Inputs, Reference
from train_parts import SUBJECTS, Training, noised
from train_subjects import Headspace, pyav_workers, torchcodec_workers
from video_dit import VideoDiTConfig
from video_latents import RANDOM, Latents

from gpupipe.train import PipelineExecutor

PROFILED = 4
"""Steps that the profiler sees."""
Encode = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Feed:
    """Clips, and what of them the model learns.

    Attributes:
        vae: configuration of the frozen autoencoder; None: the model learns pixels. Its own: that of Wan.
        model: hidden, depth, heads, patch.
    """

    clips: Case
    model: tuple[int, int, int, tuple[int, int, int]]
    vae: dict[str, Any] | None = None


_TINY_VAE = {
    "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, True],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "scale_factor_temporal": 4, "scale_factor_spatial": 4,
}  # fmt: skip
FEEDS = {
    "pixels": Feed(Case("pixels", ("h264-256p",), stride=2), (1536, 12, 12, (2, 16, 16))),
    "latents": Feed(Case("latents", ("h264-256p",), stride=2, frames=17), (1536, 12, 12, (1, 2, 2)), {"base_dim": 96}),
    "pixels-tiny": Feed(Case("pixels-tiny", ("h264-tiny",), stride=1, frames=4, size=32, batch=2), (32, 1, 2, (2, 8, 8))),
    "latents-tiny": Feed(
        Case("latents-tiny", ("h264-tiny",), stride=1, frames=5, size=32, batch=2), (32, 1, 2, (1, 4, 4)), _TINY_VAE
    ),
}


class Executed(Gpupipe):
    """A VideoLoader whose batches a PipelineExecutor prepares on the data stream: (what is learned, noise, time)."""

    def __init__(self, case: Case, draws: Sequence[Draw], device: torch.device, encode: Encode) -> None:
        super().__init__(case, draws, device, {})
        self.first: torch.Tensor | None = None

        def prepare(batch: Any) -> Inputs:
            self.first = batch.video if self.first is None else self.first
            return noised(encode(batch.video))

        self.executor = PipelineExecutor(self.loader, prepare=prepare, timeline=True)

    def batches(self) -> Iterator[Any]:
        return iter(self.executor)

    def stats(self) -> dict[str, float]:
        return {"unhidden_percent": 100 * (1 - self.executor.hidden())}

    def close(self) -> None:
        self.executor.close()
        super().close()


LOADERS: dict[str, tuple[Maker | None, str]] = {
    "headspace": (Headspace, "eager"),
    "eager": (pyav_workers, "eager"),
    "torchcodec-dataloader": (torchcodec_workers, "eager"),
    "gpupipe-loader": (gpupipe(), "eager"),
    "pipeline": (None, "eager"),
    "gpupipe": (None, "gpupipe"),
}
"""Of each subject the loader, None for :class:`Executed`, and the step, a subject of train_parts.py."""


def add_options(command: argparse.ArgumentParser) -> None:
    """The part of bench_train.py's command line that is for this."""
    names = [name for name in FEEDS if not name.endswith("-tiny")]
    command.add_argument(
        "--feeds", nargs="*", choices=[*FEEDS], default=["pixels"], help=f"of {', '.join(names)}; none: left out"
    )
    command.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=[*LOADERS], help="subjects of the feeds")
    command.add_argument("--warmup", type=float, default=3.0, help="seconds of steps of a feed before the clock starts")
    command.add_argument("--windows", type=int, default=3, help="measurements of a feed's subject")
    command.add_argument("--seconds", type=float, default=2.5, help="length of each")
    command.add_argument("--media", type=Path, default=Path(tempfile.gettempdir()) / "gpupipe-bench", help="where videos lie")
    command.add_argument("--one-fed", nargs=2, help=argparse.SUPPRESS)


def rows(options: argparse.Namespace, told: Callable[[list[Row]], object], begin: Callable[[], bool]) -> None:
    """Measures all subjects of all feeds, each in a process of its own: a crash is an error, and nothing stays behind."""
    for name in options.feeds:
        make(options.media, list(FEEDS[name].clips.kinds), sources=SOURCES, seconds=SOURCE_SECONDS)
        for subject in options.loaders:
            if not begin():
                told([failed(case_of(FEEDS[name]), subject, "step_ms", f"TimeoutError: {NOT_BEGUN}", "lower")])
                continue
            command = [sys.executable, str(Path(__file__).with_name("bench_train.py")), "--one-fed", name, subject]
            for option in ("device", "media", "warmup", "windows", "seconds"):
                command += [f"--{option}", str(getattr(options, option))]
            lines, ending = answers(command, MARK, 180 + options.warmup + options.windows * options.seconds)
            found = [Row(**line) for line in lines]
            told(found or [failed(case_of(FEEDS[name]), subject, "step_ms", ending, "lower")])


def case_of(feed: Feed) -> str:
    hidden, depth, _, patch = feed.model
    return f"fed-{feed.clips.name}-dit-d{depth}-h{hidden}-p{'x'.join(map(str, patch))}-b{feed.clips.batch}"


def one(options: argparse.Namespace) -> None:
    """Runs in a process of its own: prints the rows of a subject, each as a line of JSON."""
    (name, subject), device = options.one_fed, torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    warm_up(device)
    feed, folder = FEEDS[name], options.media / f"visits-{os.getpid()}-{name}"
    try:
        found = measured(feed, subject, folder, device, options)
    except (Exception, SystemExit) as fault:  # whatever a subject raises is its result, told in its row
        cause = f" ({fault.__cause__})" if fault.__cause__ else ""
        found = [failed(case_of(feed), subject, "step_ms", f"{type(fault).__name__}: {fault}{cause}", "lower")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for row in found:
        print(MARK + json.dumps(vars(row)), flush=True)


def measured(feed: Feed, subject: str, folder: Path, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """The rows of a subject.

    Raises:
        RuntimeError: when no batch comes, or the first one is not what was asked for.
    """
    maker, step = LOADERS[subject]
    seconds = options.warmup + options.windows * options.seconds + 5
    case = replace(feed.clips, clips=feed.clips.batch * max(16, round(CLIPS_PER_S * seconds / feed.clips.batch)))
    made = make(options.media, list(case.kinds), sources=SOURCES, seconds=SOURCE_SECONDS)
    draws = draw(case, [path for paths in made.values() for path in paths], folder, 0)
    on = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(on):  # not the default stream, on which libraries put their own work
        encode, shape = encoder(feed, device)
        hidden, depth, heads, patch = feed.model
        config = VideoDiTConfig(shape[1], shape[2], shape[3], patch, hidden, depth, heads, shape[0])
        training = Training(SUBJECTS[step], Reference(config), device)
        for _ in range(3):  # what belongs to the process and to no loader
            training(encode(torch.randn(case.batch, 3, case.frames, case.size, case.size, device=device, dtype=torch.bfloat16)))
        session = Executed(case, draws, device, encode) if maker is None else maker(case, draws, device)
        try:
            whole: Any = training.step if maker is None else lambda video: training(encode(video))
            loop = Loop(whole, session, device)
            first: Any = loop.take()
            fault = check(session.first if isinstance(session, Executed) else first, draws, case)  # type: ignore[arg-type]
            if fault:
                raise RuntimeError(f"wrong output: {fault}")
            loop.steps(options.warmup, WARM_STEPS)
            return figures(case_of(feed), subject, case.batch, loop, session, device, options)
        finally:
            session.close()


def figures(
    case: str, subject: str, batch: int, loop: Loop, session: Any, device: torch.device, options: argparse.Namespace
) -> list[Row]:
    """All metrics of a loop that is warm. The GPU is idle while nothing at all runs on it, for preparation is of the step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    windows = [loop.steps(options.seconds, 3) for _ in range(options.windows)]
    times = [first.ms_until(last) / len(waits) for first, last, waits in windows]
    found = [summarise(case, subject, "step_ms", times, "lower")]
    found.append(summarise(case, subject, "samples_per_s", [1000 * batch / each for each in times]))
    waits = [wait for window in windows for wait in window[2]]
    found.append(summarise(case, subject, "wait_ms_p99", [percentile(waits, 0.99)], "lower"))
    if isinstance(session, Executed):
        found.append(summarise(case, subject, "unhidden_percent", [session.stats()["unhidden_percent"]], "lower"))
    if device.type == "cuda":
        found.append(summarise(case, subject, "peak_gb", [torch.cuda.max_memory_allocated(device) / 1e9], "lower"))
        events = loop.traced(PROFILED)
        busy = busy_us(events, all_streams=True) / 1000 / PROFILED
        if not busy:
            return [*found, failed(case, subject, "launches", NO_KERNELS, "lower")]
        found.append(summarise(case, subject, "launches", [launches(events) / PROFILED], "lower"))
        idle = [max(0.0, 100 * (1 - busy / each)) for each in times]
        found.append(summarise(case, subject, "gpu_idle_percent", idle, "lower"))
    return found


def encoder(feed: Feed, device: torch.device) -> tuple[Encode, tuple[int, int, int, int]]:
    """What is learned of clips (B, 3, T, H, W), and its shape (C, T, H, W) a clip."""
    case = feed.clips
    if feed.vae is None:
        return lambda video: video, (3, case.frames, case.size, case.size)
    latents = Latents(RANDOM, device, case.batch, **feed.vae)
    return latents.encode, latents.shape(case.frames, case.size, case.size)
