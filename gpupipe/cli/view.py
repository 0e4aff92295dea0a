"""``gpupipe view``: what a model sees of a video, beside what the video shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from gpupipe.cli.console import check_writable, emit_json, say_facts
from gpupipe.config import StageConfig


class ViewConfig(StageConfig):
    """Which video, through which transform, into which file."""

    video: str
    transform: str = "kinetics_train"
    """The name of a preset, or a YAML file of a loader whose ``transform`` and ``clip`` are taken."""
    out: Path = Path("view.png")
    """``.png``: a contact sheet; ``.gif`` or ``.mp4``: an animation."""
    clips: Annotated[int, Field(ge=1, le=64)] = 4
    """Draws shown, each of a clip of its own."""
    frames: Annotated[int, Field(ge=1, le=256)] | None = None
    """Frames in a clip; None: the file's, or 16 with a preset."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Distance between them; None: the file's, or 2 with a preset."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Side of the output in pixels; None: the transform's."""
    device: str = "auto"
    seed: Annotated[int, Field(ge=0)] = 0


def view(config: ViewConfig) -> dict[str, Any]:
    """Makes clips of ``config.video`` and draws them.

    Returns:
        What was drawn, with the parameters of each clip; JSON types only.

    Raises:
        ConfigError: for an unknown transform or file type.
        GpupipeError: when ``config.out`` cannot be written.
        OpenError: when the file cannot be opened as a video.
    """
    import json

    from gpupipe import VideoLoader
    from gpupipe.config import ClipConfig, LoaderConfig, TransformConfig
    from gpupipe.observe.view import show, suffix_of

    suffix_of(config.out)
    check_writable("--out", config.out)
    if config.transform.endswith((".yaml", ".yml")):
        file = LoaderConfig.from_yaml(config.transform)
        transform, clip = file.transform, file.clip
    else:
        transform, clip = TransformConfig.parse(config.transform), ClipConfig(frames=16, stride=2)
    changes: dict[str, Any] = {} if config.size is None else {"size": config.size}
    given = {name: getattr(transform, name) for name in transform.model_fields_set} | changes
    clips = config.clips + -config.clips % transform.crops
    visits = clips // transform.crops if clip.sampling == "uniform" else 1  # of which a visit has one clip
    named = {name: value for name, value in (("frames", config.frames), ("stride", config.stride)) if value is not None}
    alone = LoaderConfig(clip=clip.model_copy(update={"clips_per_video": 1}))  # whatever batches the file's clips are for
    with VideoLoader(
        [config.video] * visits,
        config=alone,
        clip=named | {"clips_per_video": clips // visits},
        transform=TransformConfig(**given | {"mix": None}),
        batch=clips,
        device=config.device,
        seed=config.seed,
        on_bad_file="raise",
    ) as loader:
        batch = next(iter(loader))
        show(batch, loader.config.transform, config.out, clips=clips)
    return {
        "command": "view",
        "video": config.video,
        "transform": config.transform,
        "out": str(config.out),
        "clips": [
            {"frames": list(record.pick.indices), "params": json.loads(record.params.to_json())} for record in batch.clips
        ],
    }


def command(
    video: Annotated[str, typer.Argument(help="The video.")],
    transform: Annotated[
        str, typer.Option(help="kinetics_train, kinetics_eval, videomae, diffusion, or a loader's YAML file, its clip too.")
    ] = "kinetics_train",
    out: Annotated[Path, typer.Option(help="A .png for a contact sheet, a .gif or .mp4 for an animation.")] = Path("view.png"),
    clips: Annotated[int, typer.Option(help="Clips shown, each with a draw of its own.")] = 4,
    frames: Annotated[int | None, typer.Option(help="Frames in a clip.", show_default="the file's, or 16")] = None,
    stride: Annotated[
        int | None, typer.Option(help="Distance between frames of a clip.", show_default="the file's, or 2")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Side of the output in pixels.", show_default="the transform's")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Fixes frames and draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was drawn as JSON.")] = False,
) -> None:
    """Show what a model sees of a video, beside what the video shows."""
    report = view(
        ViewConfig(
            video=video, transform=transform, out=out, clips=clips, frames=frames, stride=stride, size=size, device=device,
            seed=seed,
        )
    )  # fmt: skip
    if as_json:
        emit_json(report)
        return
    say_facts([("video", video), ("transform", transform), ("clips", len(report["clips"])), ("written", report["out"])])
