"""A small labelled set of clips for the demo: moving shapes whose class is the motion, so that a model must use time.

Clip ``number`` of every class starts from the same picture (same shapes, places, colours and background), and places are
uniform on a frame whose edges are joined. So no single frame says anything about the class; only the order of frames does.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpupipe.errors import GpupipeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOTIONS = ("left", "right", "up", "down", "clockwise", "anticlockwise")
SHAPES = ("disc", "square", "diamond", "ring", "cross")
SPLITS = ("train", "val")
FPS = 25
KEYFRAME_DISTANCE = 12
MAKER_VERSION = 1
"""Raised when the same parameters would make other clips, so that cached ones are not mistaken for them."""


@dataclass(frozen=True)
class DemoClips:
    """A finished set of clips.

    Attributes:
        folder: holds ``<split>/<motion>/<number>.mp4``, ``train.csv`` and ``val.csv`` (columns path, label, motion).
        classes: names of the motions; the label is the position in this tuple.
        codec: what the clips are coded with, by FFmpeg's name of the encoder.
        cached: True when an earlier run's clips were found and taken.
    """

    folder: Path
    classes: tuple[str, ...]
    codec: str
    cached: bool

    @property
    def train(self) -> Path:
        return self.folder / "train.csv"

    @property
    def val(self) -> Path:
        return self.folder / "val.csv"


@dataclass(frozen=True)
class _Shape:
    """One moving shape; lengths in shares of the frame's side, angles in radians."""

    kind: str
    colour: tuple[float, float, float]
    radius: float
    x: float
    y: float
    speed: float
    """Distance along the path per frame, the same for every motion."""
    orbit: float
    """Radius of the circle for the two turning motions."""
    phase: float

    def place(self, motion: str, frame: int) -> tuple[float, float]:
        """Where the centre is in this frame; frame 0 is the same place for every motion. y grows downwards."""
        distance = self.speed * frame
        match motion:
            case "left":
                return self.x - distance, self.y
            case "right":
                return self.x + distance, self.y
            case "up":
                return self.x, self.y - distance
            case "down":
                return self.x, self.y + distance
            case "clockwise" | "anticlockwise":
                turn = distance / self.orbit * (1 if motion == "clockwise" else -1)
                dx = math.cos(self.phase + turn) - math.cos(self.phase)
                dy = math.sin(self.phase + turn) - math.sin(self.phase)
                return self.x + self.orbit * dx, self.y + self.orbit * dy
        raise ValueError(f"unknown motion {motion!r}; known: {', '.join(MOTIONS)}")


def render_clip(motion: str, *, number: int, split: Literal["train", "val"] = "train", seed: int = 0, size: int = 64,
                frames: int = 32) -> NDArray[np.uint8]:  # fmt: skip
    """Draws one clip.

    Args:
        motion: one of :data:`MOTIONS`.
        number: number of the clip in its class and split; all that is random depends on (seed, split, number) alone.
        size: side of the square frame in pixels.
        frames: number of frames.

    Returns:
        (frames, size, size, 3) uint8 RGB.
    """
    import numpy as np

    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    ground = _background(rng, size)
    shapes = [_draw_shape(rng, float(ground.mean())) for _ in range(2)]
    clip = np.repeat(ground[None].astype(np.float32), frames, axis=0)
    for shape in shapes:
        alpha = np.stack([_coverage(shape, *shape.place(motion, index), size) for index in range(frames)])[..., None]
        clip += alpha * (np.asarray(shape.colour, np.float32) - clip)
    return (clip.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _background(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """(size, size, 3) in [0, 1]: a gradient of two colours in a random direction under faint blocks. It stands still."""
    import numpy as np

    first, second = rng.uniform(0.05, 0.95, (2, 3))
    angle = rng.uniform(0, 2 * math.pi)
    grid = np.linspace(-0.5, 0.5, size)
    slope = np.clip(0.5 + grid[None, :] * math.cos(angle) + grid[:, None] * math.sin(angle), 0, 1)[..., None]
    blocks = np.kron(rng.normal(0, 0.05, (8, 8)), np.ones((-(-size // 8), -(-size // 8))))[:size, :size, None]
    ground: NDArray[np.float64] = np.clip(first * (1 - slope) + second * slope + blocks, 0, 1)
    return ground


def _draw_shape(rng: np.random.Generator, ground: float) -> _Shape:
    colour = rng.uniform(0, 1, 3)
    while abs(colour.mean() - ground) < 0.25:  # else some shapes could not be seen
        colour = rng.uniform(0, 1, 3)
    return _Shape(
        kind=SHAPES[rng.integers(len(SHAPES))],
        colour=(float(colour[0]), float(colour[1]), float(colour[2])),
        radius=rng.uniform(0.10, 0.16),
        x=rng.uniform(0, 1),
        y=rng.uniform(0, 1),
        speed=rng.uniform(0.02, 0.035),
        orbit=rng.uniform(0.14, 0.2),
        phase=rng.uniform(0, 2 * math.pi),
    )


def _coverage(shape: _Shape, x: float, y: float, size: int) -> NDArray[np.float32]:
    """(size, size) share of each pixel that the shape covers, from its signed distance; edges of the frame are joined."""
    import numpy as np

    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    dx = np.abs((centres[None, :] - x + 0.5) % 1 - 0.5)
    dy = np.abs((centres[:, None] - y + 0.5) % 1 - 0.5)
    match shape.kind:
        case "disc":
            outside = np.hypot(dx, dy) - shape.radius
        case "square":
            outside = np.maximum(dx, dy) - 0.85 * shape.radius
        case "diamond":
            outside = (dx + dy) / math.sqrt(2) - 0.85 * shape.radius
        case "ring":
            outside = np.abs(np.hypot(dx, dy) - 0.75 * shape.radius) - 0.3 * shape.radius
        case _:  # cross
            outside = np.maximum(np.minimum(dx, dy) - 0.35 * shape.radius, np.maximum(dx, dy) - shape.radius)
    covered: NDArray[np.float32] = np.clip(0.5 - outside * size, 0, 1)
    return covered


def encoder() -> str:
    """``libx264`` where this build of FFmpeg has it, else its own ``mpeg4``."""
    import av

    return "libx264" if "libx264" in av.codecs_available else "mpeg4"


def write_video(pictures: NDArray[np.uint8], file: Path, *, codec: str | None = None) -> None:
    """Codes (T, H, W, 3) uint8 RGB pictures as an MP4 at 25 frames per second with a keyframe every 12 frames.

    One thread and a fixed quantiser, so that the same pictures make the same bytes with the same FFmpeg: x264's rate control
    does not repeat itself.
    """
    import av

    codec = codec or encoder()
    options = {"preset": "veryfast", "qp": "22", "threads": "1"} if codec == "libx264" else {"qscale": "3", "threads": "1"}
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options)
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = KEYFRAME_DISTANCE
        stream.codec_context.time_base = Fraction(1, FPS)
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def make_clips(
    folder: Path,
    *,
    seed: int = 0,
    train: int = 60,
    val: int = 20,
    size: int = 64,
    frames: int = 32,
    motions: Sequence[str] = MOTIONS,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> DemoClips:
    """Makes the set, or takes the one that an earlier call with the same arguments left in ``folder``.

    Args:
        folder: made when absent. Clips of other arguments that this function left there are replaced; nothing else is.
        seed: all clips depend on it and on the arguments alone.
        train, val: clips in each class.
        size: side of the square frame in pixels, even.
        frames: frames in a clip.
        motions: the classes, out of :data:`MOTIONS`.
        threads: clips made at a time (drawing and coding release the interpreter for most of their time).
        progress: called with (clips made, clips in all).

    Raises:
        GpupipeError: when the folder cannot be written.
    """
    codec = encoder()
    facts = {"maker": MAKER_VERSION, "seed": seed, "train": train, "val": val, "size": size, "frames": frames,
             "motions": list(motions), "codec": codec}  # fmt: skip
    result = DemoClips(folder, tuple(motions), codec, cached=True)
    counts = {"train": train, "val": val}
    jobs = [(split, motion, n) for split in SPLITS for motion in motions for n in range(counts[split])]
    manifest = folder / "manifest.json"
    try:
        if _read(manifest) == facts and all((folder / _name(*job)).is_file() for job in jobs):
            return result
        manifest.unlink(missing_ok=True)  # first: a set that was not finished must not look like one
        for split in SPLITS:
            shutil.rmtree(folder / split, ignore_errors=True)
            for motion in motions:
                (folder / split / motion).mkdir(parents=True, exist_ok=True)

        def make(job: tuple[Any, str, int]) -> None:
            split, motion, number = job
            pictures = render_clip(motion, number=number, split=split, seed=seed, size=size, frames=frames)
            write_video(pictures, folder / _name(*job), codec=codec)

        with ThreadPoolExecutor(threads, thread_name_prefix="gpupipe-demo-maker") as pool:
            try:
                for done, _ in enumerate(pool.map(make, jobs), 1):
                    if progress:
                        progress(done, len(jobs))
            except BaseException:  # Ctrl-C as well: do not make the rest before leaving
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for split in SPLITS:
            _write_table(folder / f"{split}.csv", motions, (job for job in jobs if job[0] == split))
        manifest.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    except OSError as error:
        raise GpupipeError(f"cannot write the demo's clips to {folder}: {error}", fix="give another folder") from error
    return replace(result, cached=False)


def _name(split: str, motion: str, number: int) -> str:
    return f"{split}/{motion}/{number:04d}.mp4"


def _read(manifest: Path) -> Any:
    try:
        return json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_table(file: Path, motions: Sequence[str], jobs: Iterator[tuple[str, str, int]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as handle:
        table = csv.writer(handle)
        table.writerow(("path", "label", "motion"))
        table.writerows((_name(*job), motions.index(job[1]), job[1]) for job in jobs)
