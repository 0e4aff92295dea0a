"""Pictures of a run: a contact sheet of a batch, a training curve, a timeline of a measurement. All are PNG files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.ImageFont import FreeTypeFont

    from gpupipe.config import TransformConfig
    from gpupipe.observe.measure import Measurement
    from gpupipe.types import Batch

_BLUE, _ORANGE, _GREEN, _GREY = "#2563a8", "#d9702a", "#2f8f5b", "#8a8f98"


def pictures(batch: Batch, transform: TransformConfig) -> NDArray[np.uint8]:
    """The batch's clips as pictures for people: normalisation undone, (B, T, H, W, 3) uint8 RGB on the CPU."""
    import torch

    video = batch.video.detach()
    if transform.layout == "NCTHW":
        video = video.transpose(1, 2)
    video = video.permute(0, 1, 3, 4, 2).cpu()
    if video.dtype == torch.uint8:
        return video.numpy()
    rgb = video.float() * torch.tensor(transform.std) + torch.tensor(transform.mean)
    return (rgb.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def contact_sheet(
    batch: Batch,
    file: Path,
    transform: TransformConfig,
    *,
    title: str = "",
    labels: Sequence[str] | None = None,
    clips: int = 8,
    frames: int = 8,
    tile: int = 112,
) -> Path:
    """Draws a batch: one clip a row under its path, its frames from left to right, each with its time.

    Args:
        batch: as the loader gave it.
        file: the PNG to write.
        transform: what the loader made the clips with, to undo the normalisation.
        title: a line above all.
        labels: names of the classes; the batch's ``label`` picks one for each row.
        clips, frames: at most so many rows, and so many frames of a clip, from the first on, equally far apart.
        tile: height of a frame in the sheet, in pixels.
    """
    from PIL import Image, ImageDraw

    shown = pictures(batch, transform)
    count, length, height, width = shown.shape[:4]
    rows = min(clips, count)
    steps = range(0, length, -(-length // frames))
    wide = max(round(tile * width / height), 64)  # a caption of seven characters needs so much
    gap, caption, time_line, head = 6, 20, 15, 34 if title else 8
    size = (gap + max(len(steps) * (wide + gap), 560), head + rows * (caption + tile + time_line + gap))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    large, small, tiny = font(16), font(12), font(10)
    draw.text((gap, 8), fit(title, large, size[0] - 2 * gap), font=large, fill="black")
    for row in range(rows):
        top = head + row * (caption + tile + time_line + gap)
        name = ""
        if labels is not None and "label" in batch:
            label = batch["label"][row]
            name = f"{labels[int(label.argmax() if label.ndim else label)]}  ·  "  # of a mixed clip its largest share
        room = size[0] - 2 * gap - small.getlength(name)
        draw.text((gap, top + 2), name + fit(batch.clips[row].path, small, room, keep_end=True), font=small, fill="black")
        for column, step in enumerate(steps):
            left = gap + column * (wide + gap)
            picture = Image.fromarray(shown[row, step]).resize((wide, tile), Image.Resampling.BICUBIC)
            sheet.paste(picture, (left, top + caption))
            real = bool(batch["mask"][row, step])
            note = f"{float(batch['pts_seconds'][row, step]):.3f} s" if real else "padding"
            draw.text((left, top + caption + tile + 1), note, font=tiny, fill="#555555" if real else _ORANGE)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)
    return file


def font(size: int) -> FreeTypeFont:
    """Letters of ``size`` pixels."""
    import matplotlib
    from PIL import ImageFont

    # matplotlib carries this font, so no font of the system is needed.
    return ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def fit(text: str, font: FreeTypeFont, width: float, *, keep_end: bool = False) -> str:
    """The text, shortened by an ellipsis until it is no wider than ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text}…"


def training_curve(
    file: Path,
    *,
    losses: Sequence[float],
    accuracies: Sequence[float],
    steps_per_epoch: int,
    waits: Sequence[float],
    target: float | None = None,
    title: str = "",
) -> Path:
    """Draws loss by step, validation accuracy by epoch, and how long each step waited for its data.

    Args:
        file: the PNG to write.
        losses, waits: one value a step; waits in seconds.
        accuracies: one value an epoch, 0 to 1.
        steps_per_epoch: to put both on one axis.
        target: drawn as a line in the accuracy's plot.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (top, middle, bottom) = _figure(3, (8, 8.5), title)
    epochs = np.arange(1, len(losses) + 1) / steps_per_epoch
    top.plot(epochs, losses, color=_BLUE, alpha=0.3, linewidth=1, label="each step")
    ends = range(steps_per_epoch, len(losses) + 1, steps_per_epoch)
    means = [float(np.mean(losses[end - steps_per_epoch : end])) for end in ends]
    top.plot(range(1, len(means) + 1), means, color=_BLUE, marker="o", markersize=4, label="mean of the epoch")
    top.set_ylabel("training loss")
    top.set_ylim(bottom=0)
    top.legend(frameon=False)
    middle.plot(np.arange(1, len(accuracies) + 1), [100 * a for a in accuracies], color=_GREEN, marker="o", markersize=4)
    if target is not None:
        middle.axhline(100 * target, color=_GREY, linestyle="--", linewidth=1, label=f"target {100 * target:.0f} %")
        middle.legend(frameon=False, loc="lower right")
    middle.set_ylabel("validation accuracy, %")
    middle.set_ylim(0, 103)
    bottom.plot(epochs, [1000 * wait for wait in waits], color=_ORANGE, linewidth=1)
    bottom.set_ylabel("wait for the batch, ms")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("epoch")
    for axes in (top, middle, bottom):
        axes.set_xlim(0, max(1.0, len(losses) / steps_per_epoch) * 1.01)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _save(figure, file)


def bench_timeline(measurement: Measurement, file: Path, *, title: str = "") -> Path:
    """Draws a measurement over its time: delivered clips, the wait for each batch, and what machine and GPU were doing."""
    figure, (top, middle, bottom) = _figure(3, (8, 8.5), title)
    ends = np.asarray(measurement.batch_ends)
    clips = np.cumsum(measurement.batch_clips)
    top.plot(np.concatenate([[0.0], ends]), np.concatenate([[0.0], clips]), color=_BLUE)
    top.set_ylabel("clips delivered")
    top.set_ylim(bottom=0)
    note = f"{measurement.clips_per_s:.1f} clips/s, first batch after {measurement.first_batch_seconds:.2f} s"
    top.set_title(note, fontsize=10, loc="left")
    middle.vlines(ends, 0, 1000 * np.asarray(measurement.waits), color=_ORANGE, linewidth=1.2)
    middle.axhline(1000 * measurement.wait_p50_seconds, color=_GREY, linestyle="--", linewidth=1, label="median")
    middle.set_ylabel("wait for the batch, ms")
    middle.set_ylim(bottom=0)
    middle.legend(frameon=False, loc="upper right")
    _draw_use(bottom, measurement)
    bottom.set_xlabel("seconds since the start")
    for axes in (top, middle, bottom):
        axes.set_xlim(0, measurement.seconds * 1.01)
    return _save(figure, file)


def _draw_use(axes: Axes, measurement: Measurement) -> None:
    samples = measurement.resources.samples
    at = [sample.seconds for sample in samples]
    axes.plot(at, [sample.cpu_cores for sample in samples], color=_BLUE, label="CPU cores")
    axes.set_ylabel("CPU cores busy")
    axes.set_ylim(bottom=0)
    lines = [line for line in axes.get_lines() if line.get_label()]
    curves: tuple[tuple[str, str, list[Any]], ...] = (
        ("GPU", _GREEN, [sample.gpu_percent for sample in samples]),
        ("NVDEC", _ORANGE, [sample.nvdec_percent for sample in samples]),
    )
    if any(value is not None for _, _, values in curves for value in values):
        right = axes.twinx()
        right.set_ylim(0, 103)
        right.set_ylabel("GPU engines, %")
        for name, colour, values in curves:
            seen = [(x, value) for x, value in zip(at, values, strict=True) if value is not None]
            lines += right.plot([x for x, _ in seen], [value for _, value in seen], color=colour, label=f"{name} %")
    axes.legend(handles=lines, frameon=False, loc="lower right")


def _figure(rows: int, size: tuple[float, float], title: str) -> tuple[Figure, list[Axes]]:
    # The object, not pyplot: pyplot picks a window system and keeps every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure, axes


def _save(figure: Figure, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file
