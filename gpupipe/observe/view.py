"""What the model sees, beside where it was taken from: a contact sheet, or an animation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from gpupipe.errors import ConfigError
from gpupipe.observe.plots import fit, font, pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from gpupipe.config import TransformConfig
    from gpupipe.data.transform import TransformParams
    from gpupipe.types import Batch, ClipRecord

Suffix = Literal[".png", ".gif", ".mp4"]

_GAP, _CAPTION = 6, 18
_OUTLINE = "#ff3b30"
_BITS_PER_SECOND = 8_000_000
_SLOWEST, _FASTEST = 1, 60
"""Frames a second of an animation, at least and at most."""


def show(
    batch: Batch,
    transform: TransformConfig,
    out: str | os.PathLike[str] | None = None,
    *,
    clips: int = 8,
    frames: int = 8,
    tile: int = 160,
) -> Image:
    """Draws clips of a batch beside the frames of their videos, on which the part that was taken is outlined.

    In a notebook the picture that is returned shows itself. The videos are read again, from the paths in ``batch.clips``.

    Args:
        batch: as the loader gave it.
        transform: what the loader made it with, ``loader.config.transform``: to undo the normalisation.
        out: a file to write: ``.png`` a contact sheet, each clip two lines, source above result; ``.gif`` or ``.mp4`` an
            animation of all frames, source left of result, at the clip's own speed.
        clips: at most so many clips, from the first on.
        frames: at most so many frames of each in the sheet, equally far apart.
        tile: height of a picture in pixels.

    Returns:
        The contact sheet.

    Raises:
        ConfigError: for a file name with another ending, or a batch without records of its clips.
        OpenError: when a video is no longer there.
    """
    suffix = suffix_of(out) if out is not None else ".png"
    if not batch.clips:
        raise ConfigError("this batch does not say where its clips come from", fix="show one as the loader gave it")
    count = min(clips, len(batch.clips))
    results = pictures(batch, transform)[:count]
    sources = [_sources(record) for record in batch.clips[:count]]
    size = (int(results.shape[2]), int(results.shape[3]))
    pairs = [
        [
            (_outlined(sources[row][t], _of_frame(batch.clips[row].params, t), size, tile), _scaled(results[row, t], tile))
            for t in range(results.shape[1])
        ]
        for row in range(count)
    ]
    sheet = _sheet(batch, pairs, frames)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".png":
            sheet.save(out)
        else:
            (_write_gif if suffix == ".gif" else _write_mp4)(Path(out), _animation(pairs), _rate(batch))
    return sheet


def suffix_of(out: str | os.PathLike[str]) -> Suffix:
    """How a file's name ends.

    Raises:
        ConfigError: for an ending that :func:`show` cannot write.
    """
    found = Path(out).suffix.lower()
    for known in get_args(Suffix):
        if found == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"a view is written as .png, .gif or .mp4, not as {out}", fix="give the file one of these endings")


def _sources(record: ClipRecord) -> list[np.ndarray]:
    from gpupipe.data.reader import VideoReader

    with VideoReader(record.path, device="cpu") as reader:
        return list(reader.frames(record.pick.indices).permute(0, 2, 3, 1).numpy())


def _of_frame(params: TransformParams, frame: int) -> TransformParams:
    return params.frames[frame] if params.frames else params


def _scaled(frame: np.ndarray, tile: int) -> Image:
    from PIL import Image

    height, width = frame.shape[:2]
    return Image.fromarray(frame).resize((max(1, round(tile * width / height)), tile), Image.Resampling.BICUBIC)


def _outlined(frame: np.ndarray, params: TransformParams, size: tuple[int, int], tile: int) -> Image:
    """The source with the outline of what the output shows; a dot marks the output's top left corner."""
    from PIL import ImageDraw

    picture = _scaled(frame, tile)
    rows, columns = size
    corners = params.matrix(size) @ np.array([[0, columns, columns, 0], [0, 0, rows, rows], [1, 1, 1, 1]])
    height, width = params.frame or frame.shape[:2]  # another size than the source's where before= changed it
    places = [(x * picture.width / width, y * tile / height) for x, y, _ in corners.T]
    draw = ImageDraw.Draw(picture)
    draw.line([*places, places[0]], fill=_OUTLINE, width=2)
    x, y = places[0]
    draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=_OUTLINE)
    return picture


def _sheet(batch: Batch, pairs: list[list[tuple[Image, Image]]], frames: int) -> Image:
    from PIL import Image, ImageDraw

    length = len(pairs[0])
    steps = range(0, length, -(-length // frames))
    tile = pairs[0][0][0].height
    columns = [max(picture.width for pair in row for picture in pair) for row in pairs]
    width = max(_GAP + len(steps) * (wide + _GAP) for wide in columns)
    sheet = Image.new("RGB", (max(width, 400), len(pairs) * (_CAPTION + 2 * (tile + _GAP)) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (clip, wide) in enumerate(zip(pairs, columns, strict=True)):
        top = _GAP + row * (_CAPTION + 2 * (tile + _GAP))
        record = batch.clips[row]
        shown = "frames" if len(steps) == length else f"{len(steps)} of {length} frames,"
        note = f"  {shown} {record.pick.indices[0]}–{record.pick.indices[-1]}  {_words(record.params)}"
        letters = font(12)
        room = sheet.width - 2 * _GAP - letters.getlength(note)
        draw.text((_GAP, top), fit(record.path, letters, max(room, 80), keep_end=True) + note, font=letters, fill="black")
        for column, step in enumerate(steps):
            for line, picture in enumerate(clip[step]):
                sheet.paste(picture, (_GAP + column * (wide + _GAP), top + _CAPTION + line * (tile + _GAP)))
    return sheet


def _words(params: TransformParams) -> str:
    parts = [name for name, on in (("hflip", params.hflip), ("vflip", params.vflip), ("affine", params.affine)) if on]
    parts += [f"{op.name} {op.value:.2f}" if op.value else op.name for op in params.color]
    parts += [f"blur {params.blur:.2f}"] * (params.blur > 0) + ["erased"] * (params.erase is not None)
    return ", ".join(parts)


def _animation(pairs: list[list[tuple[Image, Image]]]) -> Iterator[Image]:
    """One picture a frame: a line for each clip, source left, result right; even sides, as video wants them."""
    from PIL import Image

    tile = pairs[0][0][0].height
    left = max(source.width for clip in pairs for source, _ in clip)
    width, height = left + pairs[0][0][1].width + 3 * _GAP, len(pairs) * (tile + _GAP) + _GAP
    for t in range(len(pairs[0])):
        page = Image.new("RGB", (width + width % 2, height + height % 2), "white")
        for row, clip in enumerate(pairs):
            source, result = clip[t]
            page.paste(source, (_GAP, _GAP + row * (tile + _GAP)))
            page.paste(result, (left + 2 * _GAP, _GAP + row * (tile + _GAP)))
        yield page


def _rate(batch: Batch) -> Fraction:
    """Frames a second of the first clip."""
    times = batch["pts_seconds"][0].cpu().numpy()
    steps = np.abs(np.diff(times))
    step = float(np.median(steps[steps > 0])) if bool((steps > 0).any()) else 0.1
    return Fraction(min(max(1 / step, _SLOWEST), _FASTEST)).limit_denominator(1001)


def _write_gif(out: Path, pages: Iterator[Image], rate: Fraction) -> None:
    first, *rest = pages
    first.save(out, save_all=True, append_images=rest, duration=max(20, round(1000 / rate)), loop=0)


def _write_mp4(out: Path, pages: Iterator[Image], rate: Fraction) -> None:
    import av

    first = next(pages)
    with av.open(str(out), "w") as container:
        stream: Any = container.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *first.size, "yuv420p", _BITS_PER_SECOND
        for page in chain([first], pages):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(page), format="rgb24")))
        container.mux(stream.encode())
