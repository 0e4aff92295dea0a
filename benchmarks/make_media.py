"""Makes the videos that the benchmarks read: moving textures, sprites, scene changes and sensor noise, encoded as people do.

    python benchmarks/make_media.py OUT [--kinds h264-1080p h264-256p hevc-1080p] [--sources 4] [--seconds 22] [--source VIDEO]

The pictures are made to behave in an encoder as camera footage does: textures whose spectrum falls a little faster than the 1/f
of natural pictures (Field, 1987), pans that give motion vectors work, cuts every 4 to 8 s that end a group of pictures early,
and noise that the encoder has to throw away. With ``--source`` the frames of a real video are scaled and looped instead. Frames
are 30 a second. Streams are tagged BT.709, limited range, so nobody has to guess. A kind is named ``CODEC-SIZE`` or
``CODEC-SIZE-gN``: a keyframe at least every N frames, 250 unless it says otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from common import named_by

Bytes = npt.NDArray[np.uint8]
FPS = 30
GOP = 250
BT709 = 1
LIMITED = 1


@dataclass(frozen=True)
class Kind:
    codec: str
    width: int
    height: int
    bits_per_second: int
    gop: int


SIZES = {
    "4k": (3840, 2160, 10_000_000),
    "1080p": (1920, 1080, 3_000_000),
    "720p": (1280, 720, 1_500_000),
    "256p": (456, 256, 400_000),
    "tiny": (128, 96, 80_000),
}
"""Width, height and the rate of an H.264 stream in bits a second."""
CODECS = {"h264": ("libx264", 1.0), "hevc": ("libx265", 2 / 3), "vp9": ("libvpx-vp9", 2 / 3), "av1": ("libsvtav1", 0.5)}
"""The encoder, and its rate as a share of H.264's."""
DEFAULT_KINDS = ["h264-1080p", "h264-256p"]
_NAME = re.compile(r"(\w+)-(\w+?)(?:-g(\d+))?")


def kind_of(name: str) -> Kind:
    """What a kind's name says.

    Raises:
        ValueError: when it is no kind's name.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in CODECS or match[2] not in SIZES or match[3] == "0":
        raise ValueError(f"{name!r} is not CODEC-SIZE[-gN] with one of {', '.join(CODECS)} and one of {', '.join(SIZES)}")
    encoder, share = CODECS[match[1]]
    width, height, rate = SIZES[match[2]]
    return Kind(encoder, width, height, round(rate * share), int(match[3] or GOP))


def texture(rng: np.random.Generator, height: int, width: int, low: int, high: int, slope: float = 1.4) -> Bytes:
    """(height, width): noise whose amplitude falls as 1 / f**slope, spread over [low, high]; it tiles without a seam."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    amplitude = 1.0 / np.maximum(np.hypot(fy, fx), 2.0 / max(height, width)) ** slope
    phase = rng.uniform(0, 2 * np.pi, amplitude.shape)
    field = np.fft.irfft2(amplitude * np.exp(1j * phase), s=(height, width))
    field = (field - field.mean()) / (field.std() * 5) + 0.5
    levels: Bytes = (low + (high - low) * field.clip(0, 1)).astype(np.uint8)
    return levels


class Scene:
    """A background that pans and a few sprites that cross it, with a noise of about two levels on the luma."""

    def __init__(self, rng: np.random.Generator, width: int, height: int) -> None:
        self.size = (height, width)
        tile = (height // 4 * 5 // 2 * 2, width // 4 * 5 // 2 * 2)
        self.background = [
            np.tile(texture(rng, rows, columns, low, high, slope), (2, 2))
            for rows, columns, low, high, slope in (
                (*tile, 30, 215, 1.4),
                (tile[0] // 2, tile[1] // 2, 100, 156, 1.8),
                (tile[0] // 2, tile[1] // 2, 100, 156, 1.8),
            )
        ]
        self.tile = tile
        self.velocity = rng.uniform(-3, 3, 2) * height / 540
        self.sprites = [self._sprite(rng) for _ in range(4)]
        self.noise = [(rng.normal(0, 2.0, (height, width))).astype(np.int8) for _ in range(4)]

    def _sprite(self, rng: np.random.Generator) -> tuple[Bytes, npt.NDArray[np.bool_], npt.NDArray[np.float64], int]:
        height, width = self.size
        h, w = int(height * rng.uniform(0.1, 0.35)), int(width * rng.uniform(0.1, 0.3))
        y, x = np.ogrid[-1 : 1 : h * 1j, -1 : 1 : w * 1j]
        path = np.array([rng.uniform(0, height), rng.uniform(0, width), *(rng.uniform(-6, 6, 2) * height / 540)])
        return texture(rng, h, w, 40, 235), (y * y + x * x) < 1, path, int(rng.integers(90, 166))

    def frame(self, number: int) -> list[Bytes]:
        """The planes (y, u, v) of one frame, 4:2:0."""
        height, width = self.size
        top, left = (int(v * number) % t // 2 * 2 for v, t in zip(self.velocity, self.tile, strict=True))
        planes = []
        for plane, step in zip(self.background, (1, 2, 2), strict=True):
            view = plane[top // step : top // step + height // step, left // step : left // step + width // step]
            planes.append(view.copy())
        for pixels, inside, path, tint in self.sprites:
            y = int(path[0] + path[2] * number) % (height - inside.shape[0]) // 2 * 2
            x = int(path[1] + path[3] * number) % (width - inside.shape[1]) // 2 * 2
            window = planes[0][y : y + inside.shape[0], x : x + inside.shape[1]]
            np.copyto(window, pixels, where=inside)
            small = inside[::2, ::2]
            for plane in planes[1:]:
                np.copyto(plane[y // 2 : y // 2 + small.shape[0], x // 2 : x // 2 + small.shape[1]], tint, where=small)
        noisy = planes[0].astype(np.int16) + self.noise[number % len(self.noise)]
        planes[0] = noisy.clip(16, 235).astype(np.uint8)
        return planes


def synthetic(kind: Kind, frames: int, seed: int) -> Iterator[av.VideoFrame]:
    rng = np.random.default_rng(seed)
    left = 0
    for number in range(frames):
        if left == 0:
            scene, left = Scene(rng, kind.width, kind.height), int(rng.integers(4 * FPS, 8 * FPS))
        left -= 1
        yield av.VideoFrame.from_ndarray(_stack(scene.frame(number)), format="yuv420p")


def _stack(planes: list[Bytes]) -> Bytes:
    """PyAV's form of a 4:2:0 picture: (height * 3 / 2, width), the chroma rows two by two in one."""
    y, u, v = planes
    return np.vstack([y, u.reshape(-1, y.shape[1]), v.reshape(-1, y.shape[1])])


def from_video(path: Path, kind: Kind, frames: int, skip: int) -> Iterator[av.VideoFrame]:
    """The frames of a video scaled to the kind's size, from frame ``skip`` on, over and over."""

    def once() -> Iterator[av.VideoFrame]:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield frame.reformat(kind.width, kind.height, "yuv420p")

    looped = itertools.chain.from_iterable(once() for _ in itertools.count())
    yield from itertools.islice(looped, skip, skip + frames)


def write(path: Path, kind: Kind, pictures: Iterator[av.VideoFrame], threads: int) -> Path:
    """Encodes at the kind's average rate with a fast preset; the file appears under its name when it is complete."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    settings = {
        "libx264": {"preset": "fast"},
        "libx265": {"preset": "fast", "x265-params": f"log-level=none:keyint={kind.gop}:pools={threads}"},
        "libvpx-vp9": {"deadline": "realtime", "cpu-used": "6", "row-mt": "1"},
        "libsvtav1": {"preset": "10", "svtav1-params": f"lp={threads}"},
    }[kind.codec]
    with av.open(str(unfinished), "w") as container:
        stream = container.add_stream(kind.codec, rate=FPS, options=settings)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = kind.width, kind.height, "yuv420p"
        stream.bit_rate = kind.bits_per_second
        stream.gop_size = kind.gop
        context = stream.codec_context
        context.thread_count = threads
        context.time_base = Fraction(1, FPS)
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        for number, picture in enumerate(pictures):
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            picture.pict_type = 0  # a decoded picture would carry its own type over
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    unfinished.rename(path)
    return path


def make_one(path: Path, kind: str, seconds: float, seed: int, source: Path | None, threads: int) -> Path:
    """Makes one video; ``seed`` fixes its pictures, or where in ``source`` it starts."""
    frames = round(seconds * FPS)
    pictures = from_video(source, kind_of(kind), frames, seed * 97) if source else synthetic(kind_of(kind), frames, seed)
    return write(path, kind_of(kind), pictures, threads)


def make(
    folder: Path, kinds: list[str], *, sources: int = 4, seconds: float = 22, source: Path | None = None
) -> dict[str, list[Path]]:
    """Makes what is missing of ``sources`` videos of each kind, in parallel processes, and returns the paths by kind.

    Raises:
        ValueError: when a kind is none, before anything is made.
    """
    for kind in kinds:
        kind_of(kind)
    folder.mkdir(parents=True, exist_ok=True)
    origin = f"-{source.stem}" if source else ""
    paths = {kind: [folder / f"{kind}-{seconds:g}s{origin}-{k}.mp4" for k in range(sources)] for kind in kinds}
    missing = [(path, kind, k) for kind, group in paths.items() for k, path in enumerate(group) if not path.exists()]
    missing.sort(key=lambda job: -kind_of(job[1]).width * (1 if kind_of(job[1]).codec == "libx264" else 2))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = max(1, min(cores, len(missing)))

    def run(job: tuple[Path, str, int]) -> None:
        path, kind, seed = job
        command = [sys.executable, __file__, str(folder), "--one", str(path), kind, str(seed), str(max(1, cores // at_once))]
        command += ["--seconds", str(seconds), *(["--source", str(source)] if source else [])]
        subprocess.run(command, check=True)

    # Plain processes: multiprocessing would import the caller's main module, with all that it imports, in each of them.
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, missing))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the videos that the benchmarks read.")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--kinds", nargs="+", type=named_by(kind_of), default=DEFAULT_KINDS, help=(
            f"CODEC-SIZE[-gN]: {', '.join(CODECS)}; {', '.join(SIZES)}; a keyframe at least every N frames, {GOP} without. "
            f"Default: {' '.join(DEFAULT_KINDS)}"
        ),
    )  # fmt: skip
    parser.add_argument("--sources", type=int, default=4, help="videos of each kind")
    parser.add_argument("--seconds", type=float, default=22)
    parser.add_argument("--source", type=Path, help="a real video to scale and loop instead of made-up pictures")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        path, kind, seed, threads = options.one
        make_one(Path(path), kind, options.seconds, int(seed), options.source, int(threads))
        return
    begin = time.perf_counter()
    made = make(options.out, options.kinds, sources=options.sources, seconds=options.seconds, source=options.source)
    for paths in made.values():
        for path in paths:
            print(f"{path}  {path.stat().st_size * 8 / options.seconds / 1e6:.2f} Mb/s")
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
