"""``gpupipe demo``: trains a small model on clips that it makes, or loads the user's own videos and shows what comes out."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from gpupipe.cli.console import Progress, emit_json, existing, say, say_facts, tell, to_json
from gpupipe.config import StageConfig
from gpupipe.errors import GpupipeError

if TYPE_CHECKING:
    from gpupipe.types import Batch

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
"""There in a checkout; an installed package has none."""


class DemoConfig(StageConfig):
    """What the demo does. Without ``videos`` it makes clips and trains; with ``videos`` it only loads them."""

    videos: tuple[str, ...] = ()
    out: Path = Path("demo_out")
    """Folder for the clips, the pictures and the report."""
    device: str = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    train_clips: Annotated[int, Field(ge=1)] = 60
    """Made in each of the six classes."""
    val_clips: Annotated[int, Field(ge=1)] = 20
    epochs: Annotated[int, Field(ge=1)] = 16
    batch: Annotated[int, Field(ge=1)] = 16
    size: Annotated[int, Field(ge=16)] = 56
    """Side of the clips that the model sees, in pixels."""
    frames: Annotated[int, Field(ge=2)] = 8
    stride: Annotated[int, Field(ge=1)] = 2
    target: Annotated[float, Field(ge=0, le=1)] = 0.90
    """Validation accuracy that the last epoch must reach, for the demo to count as done."""
    stop_at: Annotated[float, Field(ge=0)] = 0.97
    """Training ends after the first epoch with this accuracy, whatever the target is."""
    load_clips: Annotated[int, Field(ge=1)] = 256
    """Clips loaded of the user's own videos; at most one epoch."""

    @classmethod
    def quick(cls, **fields: Any) -> DemoConfig:
        """A run of a few seconds that goes through every part; it is too short to learn, so no accuracy is asked for."""
        return cls(**{"train_clips": 8, "val_clips": 2, "epochs": 2, "target": 0.0, **fields})


def demo(config: DemoConfig) -> dict[str, Any]:
    """Runs the demo and leaves its pictures and ``report.json`` in ``config.out``.

    Of the user's own videos it leaves ``videos_contact_sheet.png`` and ``videos_report.json``, so that what an earlier training
    left in the same folder stays.

    Returns:
        The report. ``ok`` is True when the target was reached, or when clips came out of the user's videos.

    Raises:
        GpupipeError: when videos or device are not there, or the folder cannot be written.
    """
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpupipeError(f"cannot make the folder {config.out}: {error}", fix="give another one with --out") from error
    report = _load(config) if config.videos else _train(config)
    file = config.out / ("videos_report.json" if config.videos else "report.json")
    report["files"]["report"] = str(file)
    file.write_text(to_json(report) + "\n", encoding="utf-8")
    return report


def _train(config: DemoConfig) -> dict[str, Any]:
    import torch

    from gpupipe import VideoLoader
    from gpupipe.cli.demo_data import make_clips
    from gpupipe.cli.demo_model import TinyVideoNet
    from gpupipe.cli.demo_train import TrainLog, train
    from gpupipe.device.inventory import cpu_quota, resolve_device
    from gpupipe.observe.measure import machine_facts, quantile
    from gpupipe.observe.plots import contact_sheet, training_curve

    began = time.perf_counter()
    device = resolve_device(config.device)  # before any work: a device that is not there should cost no time
    with Progress("making clips", None) as bar:
        clips = make_clips(config.out / "clips", seed=config.seed, train=config.train_clips, val=config.val_clips,
                           threads=cpu_quota(), progress=_of(bar))  # fmt: skip
    made = time.perf_counter()
    torch.set_num_threads(cpu_quota())
    torch.manual_seed(config.seed)
    torch.backends.cudnn.deterministic = True
    model = TinyVideoNet(len(clips.classes)).to(device)
    shared: dict[str, Any] = {
        "clip": {"frames": config.frames, "stride": config.stride},
        "device": str(device),
        "seed": config.seed,
    }
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    # No horizontal flip: it turns "left" into "right" and "clockwise" into "anticlockwise", but leaves the label as it was.
    transform = {"size": config.size, "scale": (0.6, 1.0), "hflip": 0.0, "dtype": dtype}
    with (
        VideoLoader(clips.train, transform=transform, batch=config.batch, **shared) as loader,
        VideoLoader(
            clips.val,
            transform={**transform, "crop": "none"},
            batch={"size": 2 * config.batch, "last": "partial"},
            shuffle=False,
            **shared,
        ) as held_out,
        Progress("train", config.epochs * len(loader)) as bar,
    ):

        def show(log: TrainLog) -> None:
            recent = log.losses[-log.steps_per_epoch :]
            wait = sum(log.waits[-log.steps_per_epoch :]) / len(recent)
            text = f"loss {sum(recent) / len(recent):.2f} acc {100 * log.accuracy:.1f} %"  # all fits a row of 80 characters
            bar.update(len(log.losses), f"{text} {log.clips_per_s:.0f} clips/s wait {1000 * wait:.0f} ms/step")

        log = train(model, loader, held_out, epochs=config.epochs, stop_at=config.stop_at, on_step=show)
        bar.update(len(log.losses), "good enough" if len(log.accuracies) < config.epochs else "done", total=len(log.losses))
        bad_files = {**loader.bad_files, **held_out.bad_files}
        transform_config = loader.config.transform
    trained = time.perf_counter()
    assert log.first_batch is not None  # the loader refuses a list that makes no batch
    title = f"gpupipe demo on {device}: {100 * log.accuracy:.1f} % on clips not trained on"
    files = {
        "contact_sheet": contact_sheet(log.first_batch, config.out / "contact_sheet.png", transform_config,
                                       title="one training batch: the class is the motion", labels=clips.classes),
        "training_curve": training_curve(config.out / "training_curve.png", losses=log.losses, waits=log.waits,
                                         accuracies=log.accuracies, steps_per_epoch=log.steps_per_epoch,
                                         target=config.target or None, title=title),
        "train_table": clips.train,
        "val_table": clips.val,
    }  # fmt: skip
    return {
        "command": "demo",
        "ok": log.accuracy >= config.target,
        "accuracy": log.accuracy,
        "target": config.target,
        "epochs": len(log.accuracies),
        "accuracies": log.accuracies,
        "steps": len(log.losses),
        "final_loss": log.losses[-1],
        "seconds": time.perf_counter() - began,
        "clip_making_seconds": made - began,
        "training_seconds": trained - made,
        "clips_made": {"cached": clips.cached, "encoder": clips.codec, "classes": list(clips.classes)},
        "clips_per_s": log.clips_per_s,
        "wait_p50_seconds": quantile(log.waits, 0.5),
        "wait_p99_seconds": quantile(log.waits, 0.99),
        "wait_share": sum(log.waits) / log.train_seconds,
        "device": str(device),
        "decoders": dict(log.decoders),
        "bad_files": bad_files,
        "seed": config.seed,
        "machine": machine_facts(),
        "files": {name: str(file) for name, file in files.items()},
    }


def _load(config: DemoConfig) -> dict[str, Any]:
    from gpupipe import VideoLoader
    from gpupipe.observe.measure import machine_facts, measure
    from gpupipe.observe.plots import contact_sheet

    kept: list[Batch] = []
    with VideoLoader(
        existing(config.videos),
        clip={"frames": 16},
        batch={"size": 8, "last": "partial"},
        device=config.device,
        seed=config.seed,
    ) as loader:
        videos = len(loader.dataset)
        clips = min(config.load_clips, videos)
        with Progress(f"loading {videos} videos", clips) as bar:
            result = measure(
                loader,
                clips=clips,
                progress=lambda done, seconds: bar.update(done, f"{done / max(seconds, 1e-9):.1f} clips/s"),
                step=lambda batch: None if kept else kept.append(batch),
            )
        sheet = contact_sheet(kept[0], config.out / "videos_contact_sheet.png", loader.config.transform,
                              title=f"the first clips of {videos} videos, augmented")  # fmt: skip
        device = str(loader.device)
    measured = result.to_dict()
    for series in ("batch_ends", "batch_clips", "waits"):
        del measured[series]
    del measured["resources"]["samples"]
    return {"command": "demo", "ok": True, "videos": videos, "device": device, **measured, "seed": config.seed,
            "machine": machine_facts(), "files": {"contact_sheet": str(sheet)}}  # fmt: skip


def _of(bar: Progress) -> Callable[[int, int], None]:
    return lambda done, total: bar.update(done, total=total)


def command(
    videos: Annotated[list[str] | None, typer.Argument(help="Own videos: files, folders, globs or tables.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for clips, pictures and report.")] = Path("demo_out"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Fixes the clips, the order, the augmentations and the model.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Most epochs of the training.", show_default="16, with --quick 2")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy that the last epoch must reach.", show_default="0.9, with --quick 0"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, too short to learn: shows that all works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train a small model on clips it makes, or load VIDEOS.

    Leaves a contact sheet, a training curve and a JSON report. With VIDEOS nothing is trained: they are loaded and shown, in
    videos_contact_sheet.png and videos_report.json.
    """
    fields: dict[str, Any] = {"videos": tuple(videos or ()), "out": out, "device": device, "seed": seed}
    fields |= {name: value for name, value in (("epochs", epochs), ("target", target)) if value is not None}
    config = DemoConfig.quick(**fields) if quick else DemoConfig(**fields)
    if not config.videos:
        tell(f"the demo makes a set of small clips in {config.out} and trains a model on it")
    report = demo(config)
    if as_json:
        emit_json(report)
    else:
        _say_report(report)
    if not report["ok"]:
        tell(f"accuracy {100 * report['accuracy']:.1f} % is below the target of {100 * report['target']:.0f} %; "
             "see training_curve.png")  # fmt: skip
        raise typer.Exit(1)


def _say_report(report: dict[str, Any]) -> None:
    decoders = ", ".join(f"{name} {count} clips" for name, count in report["decoders"].items())
    waits = f"p50 {1000 * report['wait_p50_seconds']:.1f} ms, p99 {1000 * report['wait_p99_seconds']:.1f} ms"
    facts: list[tuple[str, object]] = [("device", report["device"]), ("decoders", decoders)]
    if "accuracy" in report:
        target = f" (target {100 * report['target']:.0f} %)" if report["target"] else ""
        facts += [
            ("accuracy", f"{100 * report['accuracy']:.1f} % on clips not trained on{target}"),
            ("time", f"{report['seconds']:.1f} s: clips {report['clip_making_seconds']:.1f} s, "
                     f"training {report['training_seconds']:.1f} s ({report['epochs']} epochs)"),
        ]  # fmt: skip
    else:
        facts += [("videos", report["videos"]), ("time", f"{report['seconds']:.1f} s for {report['clips']} clips")]
    facts += [("clips/s", f"{report['clips_per_s']:.1f}"), ("wait per step", waits)]
    facts += [(name.replace("_", " "), file) for name, file in report["files"].items()]
    say_facts(facts)
    if "accuracy" in report:
        say(f"\n{_next_steps(Path(report['files']['train_table']))}")
    else:
        say("\nnext: `gpupipe view VIDEO` shows what a model sees, `gpupipe bench VIDEOS…` measures; samples/ has loops")
    if report["bad_files"]:
        say(f"\n{len(report['bad_files'])} bad files:")
        for path, why in report["bad_files"].items():
            say(f"  {path}: {why.splitlines()[0]}")


def _next_steps(table: Path) -> str:
    """What to do with the clips of a table, in lines that can be pasted as they stand: no indent, paths from this folder."""
    lines = []
    sample = SAMPLES / "02_train_loop.py"
    if sample.is_file():
        python = "python" if shutil.which("python") == sys.executable else _from_here(Path(sys.executable))
        lines += ["next: a training loop on these clips, to make yours of:",
                  shlex.join([python, _from_here(sample), str(table.parent)]), ""]  # fmt: skip
    path = json.dumps(str(table), ensure_ascii=False)  # its escapes are Python's, its quotes those of the line around
    lines += [
        "a batch of them, in Python:",
        "from gpupipe import VideoLoader",
        f'loader = VideoLoader({path}, clip={{"frames": 8}}, transform={{"size": 56}}, batch=8)',
        "print(next(iter(loader)))",
        "",
        "`gpupipe demo VIDEOS…` loads and shows your own videos; it trains nothing, and leaves the files above as they are",
    ]
    return "\n".join(lines)


def _from_here(file: Path) -> str:
    """The path as one would type it; a link stays one, since an environment's interpreter is known by its place."""
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
