"""``gpupipe bench``: how fast batches come out of the user's own videos on this machine, and what that takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from gpupipe.cli.console import Progress, check_writable, emit_json, existing, say, say_facts, size_text, to_json
from gpupipe.config import ClipConfig, LoaderConfig, SourceConfig, StageConfig
from gpupipe.errors import ConfigError, GpupipeError

_FEW_BATCHES = 10
"""Fewer say little of a rate."""
_PASS_BATCHES = 64
"""Batches in a pass, at least,"""
_PASS_CLIPS = 65536
"""but no more clips than this, where one batch has fewer: a list of them must be made first."""


class BenchConfig(StageConfig):
    """What is measured, and for how long. Without ``clips`` and ``seconds``: for ten seconds.

    Fields of the loader that are None are those of ``config``, or the loader's defaults.
    """

    videos: tuple[str, ...]
    config: Path | None = None
    """A loader's YAML file."""
    clips: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """Taken before the clock starts; 0 counts opening files and making decoders, as a user pays for them."""
    frames: Annotated[int, Field(ge=1)] | None = None
    stride: Annotated[int, Field(ge=1)] | None = None
    transform: str | None = None
    """The name of a preset."""
    size: Annotated[int, Field(ge=1)] | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    device: str | None = None
    decoder: Literal["auto", "nvdec", "dali", "cpu"] | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    cpu_workers: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    sampling: Literal["random", "regular", "uniform", "stratified", "keyframe"] | None = None
    cache: Literal["off", "device", "pinned"] | None = None
    """Where decoded clips are kept; it pays where frames are asked for again, as with ``sampling="uniform"``."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    plot: Path | None = None
    """A PNG to draw the run's timeline in."""
    report: Path | None = None
    """A file for the JSON report."""
    live: bool = False
    """Show on stderr what each stage is doing, see :func:`gpupipe.observe.monitor`, in the place of the progress."""
    headspace: Annotated[float, Field(gt=0, le=60_000)] | None = None
    """Milliseconds that a stand-in for the training step sleeps between two batches; the same loop is then run over batches
    that are there already. None: batches are taken as fast as they come."""


def _loader_config(config: BenchConfig) -> LoaderConfig:
    """What is measured: the file's settings, or the defaults, and over them what was named."""
    given: dict[str, dict[str, Any]] = {
        "clip": {"frames": config.frames, "stride": config.stride, "sampling": config.sampling},
        "transform": {"preset": config.transform, "size": config.size},
        "batch": {"size": config.batch},
        "decode": {"decoder": config.decoder, "threads": config.threads, "cpu_workers": config.cpu_workers},
        "cache": {"clips": config.cache, "clips_gib": config.cache_gib},
    }
    named = {stage: {name: value for name, value in fields.items() if value is not None} for stage, fields in given.items()}
    single = {name: value for name, value in (("device", config.device), ("seed", config.seed)) if value is not None}
    loader = LoaderConfig.parse(config.config).override({stage: fields for stage, fields in named.items() if fields} | single)
    return loader.override({"batch": {"last": "partial"}})


def _long_enough(videos: tuple[str, ...], loader: LoaderConfig, batches: int = 0) -> list[dict[str, Any]]:
    """The videos, over and over until a pass is long, ``batches`` at least: between two passes a loader starts anew."""
    from gpupipe.data.source import collect

    rows = [
        {**entry.columns, "path": entry.held or entry.path}
        for entry in collect(existing(videos), loader.source, loader.columns)
    ]
    size = loader.batch.size
    return rows * -(-min(max(_PASS_BATCHES, batches) * size, max(size, _PASS_CLIPS)) // len(rows))


def _kept(source: SourceConfig) -> SourceConfig:
    """What still counts of the source's settings once its videos are listed as rows."""
    return SourceConfig(npy_columns=source.npy_columns, filter=source.filter)


def bench(config: BenchConfig) -> dict[str, Any]:
    """Measures a loader over ``config.videos``.

    Returns:
        The report: the settings, the measurement (see :class:`gpupipe.observe.measure.Measurement`), with ``headspace`` what
        data costs (see :class:`gpupipe.observe.headspace.Headspace`), else None, and the machine.

    Raises:
        GpupipeError: when videos or device are not there, a setting is wrong, or a file cannot be written.
    """
    from gpupipe import VideoLoader
    from gpupipe.observe import monitor
    from gpupipe.observe.headspace import Headspace, headspace, sleeper
    from gpupipe.observe.measure import machine_facts, measure

    for option, file in (("--plot", config.plot), ("--report", config.report)):  # now, not after the measurement
        if file is not None and not file.parent.is_dir():
            raise GpupipeError(f"the folder {file.parent} for {file.name} does not exist", fix="make it or name another file")
        if file is not None:
            check_writable(option, file)
    if config.transform is not None and config.transform.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"--transform {config.transform} is a file, not a preset", fix=f"--config {config.transform} takes it"
        )
    if config.plot is not None and config.plot.suffix.lower() != ".png":
        raise GpupipeError(f"--plot {config.plot.name} is not a PNG", fix="name a file that ends in .png")
    settings = _loader_config(config)
    seconds = config.seconds if config.seconds or config.clips else 10.0
    stand_in = config.headspace / 1000 if config.headspace is not None else None
    most = int((seconds or 0) / stand_in) + config.warmup_batches + 2 if stand_in is not None else 0
    rows = _long_enough(config.videos, settings, most)
    free: Headspace | None = None
    with VideoLoader(rows, config=settings.model_copy(update={"source": _kept(settings.source)})) as loader:
        videos = len(set(loader.dataset.paths))
        with ExitStack() as shown:
            progress: Callable[[int, float], None] | None = None
            if config.live:
                shown.enter_context(monitor(loader))
            else:
                bar = shown.enter_context(Progress(f"measuring {videos} videos", config.clips))
                progress = lambda done, passed: bar.update(done, f"{done / max(passed, 1e-9):.1f} clips/s, {passed:.0f} s")  # noqa: E731
            result = measure(
                loader, seconds=seconds, clips=config.clips, warmup_batches=config.warmup_batches, progress=progress,
                step=sleeper(stand_in) if stand_in is not None else None,
            )  # fmt: skip
        if stand_in is not None:
            with Progress("replaying batches", len(result.batch_ends)) as bar:
                free = headspace(loader, result, stand_in, progress=lambda done, passed: bar.update(done, f"{passed:.0f} s"))
        device = str(loader.device)
    report = {
        "command": "bench",
        "videos": videos,
        "loader": settings.model_dump(mode="json"),
        "device": device,
        "measured": result.to_dict(),
        "headspace": free.to_dict() if free is not None else None,
        "machine": machine_facts(),
    }
    if config.plot is not None:
        from gpupipe.observe.plots import bench_timeline

        height, width = settings.transform.size
        title = f"{settings.clip.frames} frames of {width}x{height}, batches of {settings.batch.size}, on {device}"
        bench_timeline(result, config.plot, title=title)
    if config.report is not None:
        config.report.write_text(to_json(report), encoding="utf-8")
    return report


def command(
    paths: Annotated[list[str], typer.Argument(help="Videos: files, folders, globs or tables.")],
    clips: Annotated[int | None, typer.Option(help="Stop after so many clips.", show_default="no bound")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so many seconds.", show_default="10 without --clips")
    ] = None,
    batches: Annotated[int | None, typer.Option(hidden=True, show_default="none")] = None,  # to name --clips
    warmup_batches: Annotated[int, typer.Option("--warmup", help="Batches before the clock starts.")] = 0,
    loader: Annotated[
        Path | None, typer.Option("--config", help="A loader's YAML file; the options below win.", show_default="none")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames in a clip.", show_default="16")] = None,
    stride: Annotated[int | None, typer.Option(help="Distance between frames of a clip.", show_default="1")] = None,
    transform: Annotated[
        str | None, typer.Option(help="kinetics_train, kinetics_eval, videomae or diffusion.", show_default="the loader's")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Side of the output in pixels.", show_default="the transform's")] = None,
    batch: Annotated[int | None, typer.Option(help="Clips in a batch.", show_default="8")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto")] = None,
    decoder: Annotated[
        Literal["auto", "nvdec", "dali", "cpu"] | None, typer.Option(help="auto, nvdec, dali or cpu.", show_default="auto")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Decode threads.", show_default="by engines or cores")] = None,
    cpu_workers: Annotated[
        str | None, typer.Option(help="Processes that decode in software: a number, or auto.", show_default="0")
    ] = None,
    sampling: Annotated[
        Literal["random", "regular", "uniform", "stratified", "keyframe"] | None,
        typer.Option(help="Which frames make a clip.", show_default="random"),
    ] = None,
    cache: Annotated[
        Literal["off", "device", "pinned"] | None, typer.Option(help="Where decoded clips are kept.", show_default="off")
    ] = None,
    cache_gib: Annotated[float | None, typer.Option(help="Bound on the kept clips' memory in GiB.", show_default="4")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes order, frames and augmentations.", show_default="0")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.", show_default="none")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run's timeline in this PNG.", show_default="none")] = None,
    live: Annotated[bool, typer.Option("--live", help="Show what each stage is doing, and which one limits.")] = False,
    headspace: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Sleep so long in place of a training step, and compare with data that is there already.",
            show_default="off",
        ),
    ] = None,
) -> None:
    """Measure how fast batches come out of your videos.

    Shows clips/s, frames/s, waits, packets decoded per frame, and the use of engines, CPU and memory.
    """
    if batches is not None:
        raise typer.BadParameter("the length is said in clips, --clips, or in --seconds", param_hint="--batches")
    config = BenchConfig(
        videos=tuple(paths), clips=clips, seconds=seconds, warmup_batches=warmup_batches, config=loader, frames=frames,
        stride=stride, transform=transform, size=size, batch=batch, device=device, decoder=decoder, threads=threads,
        cpu_workers=_number_or_name(cpu_workers),
        sampling=sampling, cache=cache, cache_gib=cache_gib, seed=seed, plot=plot, report=report,
        live=live, headspace=headspace,
    )  # fmt: skip
    result = bench(config)
    if as_json:
        emit_json(result)
    else:
        _say_report(result)


def _number_or_name(text: str | None) -> Any:
    """A number, or what the configuration is to make of it."""
    return int(text) if text is not None and text.isdecimal() else text


def _headspace_facts(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    loader, cached, stand_in = (1000 * found[f"{name}_seconds"] for name in ("loader_step", "cached_step", "stand_in"))
    return [
        ("step with the loader", f"{loader:.1f} ms, mean of {found['steps']}"),
        ("step with data that is there", f"{cached:.1f} ms, {found['cached_batches']} batches replayed, "
         f"{size_text(found['cached_bytes'])}"),
        ("data costs", f"{found['cost_percent']:.1f} % of a step that sleeps {stand_in:g} ms in place of training"),
    ]  # fmt: skip


def _clip_text(loader: dict[str, Any]) -> str:
    """What a clip is, by the loader's settings."""
    clip, buckets = ClipConfig.parse(loader["clip"]), loader["batch"]["buckets"]
    height, width = loader["transform"]["size"]
    step = f"stride {clip.stride}" if clip.fps is None else f"{clip.fps:g} frames a second"
    if clip.spans_video:
        step = "over the whole video"
    return f"{clip.frames} frames, {step}, {width}x{height}{', or as batch.buckets say' if buckets else ''}"


def _say_report(report: dict[str, Any]) -> None:
    m = report["measured"]
    use = m["resources"]

    def percent(value: float | None) -> str | None:
        return None if value is None else f"{value:.0f} %"

    waits = f"p50 {1000 * m['wait_p50_seconds']:.1f} ms, p99 {1000 * m['wait_p99_seconds']:.1f} ms"
    packets = m["packets_per_frame"]
    say_facts([
        ("videos", f"{report['videos']}, {m['clips'] / report['videos']:.1f} clips of each on average"),
        ("clip", _clip_text(report["loader"])),
        ("batch", f"{report['loader']['batch']['size']} clips"),
        ("device", report["device"]),
        ("decoders", ", ".join(f"{name} {count} clips" for name, count in m["decoders"].items())),
        ("clips/s", f"{m['clips_per_s']:.1f}  ({m['clips']} clips in {m['seconds']:.2f} s)"),
        ("frames/s", f"{m['frames_per_s']:.0f}"),
        ("first batch", f"{m['first_batch_seconds']:.2f} s"),
        ("wait per batch", waits),
        ("packets decoded per frame used", None if packets is None else f"{packets:.2f}"),
        ("clips from the cache", None if report["loader"]["cache"]["clips"] == "off"
         else f"{m['cache_hits']} of {m['cache_hits'] + m['cache_misses']}, {size_text(m['cache_bytes'])} held"),
        ("NVDEC use, mean and peak", None if use["nvdec_percent_mean"] is None
         else f"{percent(use['nvdec_percent_mean'])}, {percent(use['nvdec_percent_max'])}"),
        ("GPU use, mean", percent(use["gpu_percent_mean"])),
        ("CPU use", f"{use['cpu_cores_mean']:.1f} of {report['machine']['cpu_cores']} cores"),
        ("peak host memory", size_text(use["peak_host_bytes"])),
        ("peak device memory", size_text(use["peak_device_bytes"])),
        ("  of it torch's", size_text(use["peak_torch_bytes"])),
        ("substituted", m["substituted"]),
        ("limit", m["limit"]),
        *_headspace_facts(report["headspace"]),
    ])  # fmt: skip
    if m["batches"] < _FEW_BATCHES:
        start = "" if m["warmup_batches"] else ", and the start, which --warmup leaves out, is among them"
        say(f"note  only {m['batches']} batches were measured{start}: measure longer (--seconds, --clips) for a rate to go by")
    for path, why in m["bad_files"].items():
        say(f"bad file  {path}: {why.splitlines()[0]}")
