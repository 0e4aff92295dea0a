"""Which files does a reader read right? Length, frames in random order, orientation, on streams of every structure.

    python benchmarks/conformance.py                       # with a GPU; writes results/conformance--<gpu>.json
    python benchmarks/conformance.py --device cpu          # software decoding alone
    python benchmarks/figures.py                           # makes the table of docs/conformance.md from it

The files are those that tests/streams.py makes, and those of a folder of sample media where there is one (``--shared``). Truth
is a software decode from the first packet to the last. gpupipe owes its planes bit for bit; a peer, which converts to RGB in
its own way, owes pictures that are near the right ones and nearer to them than to their neighbours. Each subject runs in a
process of its own, which starts anew after a file that ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import av
import numpy as np
import torch
from common import RESULTS, Row, answers, failed, summarise, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
METRIC = "read_right"
BY_NVDEC = "by_nvdec"
WANTED = 15
"""Frames of each file that are asked for, in random order."""
NEAR = 8.0
"""Mean difference in brightness, of 255, that another colour conversion stays within."""
MARGIN = 0.25
"""By so much a neighbour must be nearer: of pictures that hardly change, the conversion says more than the frame."""
SECONDS = 90.0
"""What a subject may take for a file."""
NOT_TO_BE_READ = {"t13_empty.mp4", "t15_audio_only.mp4", "t13_bitflip.mp4"}
"""Sample files of which no sequence of right frames exists."""


class Truth:
    """What a file shows: how many frames, and the planes and the RGB of those wanted and of their neighbours."""

    def __init__(self, path: str) -> None:
        from gpupipe.data.decode.cpu import frame_planes

        with av.open(path) as container:
            stream = container.streams.best("video")
            assert isinstance(stream, av.VideoStream)
            stream.codec_context.thread_count = 1
            self.frames = sum(1 for _ in _frames(container, stream))
        draw = random.Random(Path(path).name)
        self.wanted = [draw.randrange(self.frames) for _ in range(WANTED)]
        kept = {near for k in self.wanted for near in (k - 1, k, k + 1)}
        self.planes: dict[int, list[np.ndarray]] = {}
        self.rgb: dict[int, np.ndarray] = {}
        with av.open(path) as container:
            stream = container.streams.best("video")
            assert isinstance(stream, av.VideoStream)
            stream.codec_context.thread_count = 1
            for number, frame in enumerate(_frames(container, stream)):
                if number in kept:
                    self.planes[number] = [plane.copy() for plane in frame_planes(frame)[1]]
                    self.rgb[number] = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def _frames(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.FFmpegError:
            continue


def gpupipe(path: str, truth: Truth, device: str) -> tuple[str | None, str]:
    """(what is wrong or None, the decoder)."""
    from gpupipe import VideoReader
    from gpupipe.data import index as indices
    from gpupipe.data.decode import choose

    decoder = choose(indices.load(path).info, torch.device(device)).decoder
    with VideoReader(path, device=device) as reader:
        if len(reader) != truth.frames:
            return f"{len(reader)} frames for {truth.frames}", decoder
        for number, planes in zip(truth.wanted, reader.planes(truth.wanted), strict=True):
            for name, expected in zip("yuv", truth.planes[number], strict=True):
                if not np.array_equal(getattr(planes, name).cpu().numpy(), expected):
                    return f"plane {name} of frame {number} differs", decoder
        return wrong_rgb(reader.frames(truth.wanted).permute(0, 2, 3, 1).cpu().numpy(), truth), decoder


def wrong_rgb(pictures: np.ndarray, truth: Truth) -> str | None:
    """What is wrong with RGB pictures (N, H, W, 3) of the frames wanted; None when nothing is."""
    for number, picture in zip(truth.wanted, pictures, strict=True):
        expected = truth.rgb[number]
        if picture.shape != expected.shape:
            return f"pictures of {picture.shape[1]}x{picture.shape[0]} for {expected.shape[1]}x{expected.shape[0]}"
        off = {near: _distance(picture, truth.rgb[near]) for near in (number - 1, number, number + 1) if near in truth.rgb}
        best = min(off, key=lambda near: off[near])
        if off[best] + MARGIN < off[number]:
            return f"frame {best} for {number}"
        if off[number] > NEAR:
            return f"frame {number} is {off[number]:.0f} off in the mean"
    return None


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean difference in brightness, into which the ways of scaling chroma up hardly enter."""
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    return float(np.abs(one @ weights - other @ weights).mean())


def torchcodec(path: str, truth: Truth, device: str) -> tuple[str | None, str]:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, device=device, dimension_order="NHWC")
    if len(decoder) != truth.frames:
        return f"{len(decoder)} frames for {truth.frames}", "cpu"
    return wrong_rgb(decoder.get_frames_at(truth.wanted).data.cpu().numpy(), truth), "cpu"


def decord2(path: str, truth: Truth, device: str) -> tuple[str | None, str]:
    import decord

    reader = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
    if len(reader) != truth.frames:
        return f"{len(reader)} frames for {truth.frames}", "cpu"
    return wrong_rgb(reader.get_batch(truth.wanted).asnumpy(), truth), "cpu"


Reader = Callable[[str, Truth, str], tuple[str | None, str]]
SUBJECTS: dict[str, tuple[Reader, str]] = {
    "gpupipe": (gpupipe, "cuda:0"),
    "gpupipe-cpu": (gpupipe, "cpu"),
    "torchcodec-cpu": (torchcodec, "cpu"),
    "torchcodec-cuda": (torchcodec, "cuda:0"),
    "decord2-cpu": (decord2, "cpu"),
}


def read_all(subject: str, files: Sequence[str]) -> None:
    """Runs in a process of its own: prints a line after each file."""
    reader, device = SUBJECTS[subject]
    for path in files:
        truth, by = Truth(path), "cpu"
        try:
            wrong, by = reader(path, truth, device)
        except Exception as error:  # whatever a reader raises is its answer
            wrong = f"{type(error).__name__}: {error}"
        print("DONE " + json.dumps({"wrong": wrong, "by": by}), flush=True)


def rows_of(subject: str, files: dict[str, str]) -> list[Row]:
    rows: list[Row] = []
    left = dict(files)
    while left:
        command = [sys.executable, __file__, "--one-subject", subject, *left.values()]
        done, ending = answers(command, "DONE ", SECONDS * len(left), quiet=True)
        for name, answer in zip(list(left), done, strict=False):
            path = left.pop(name)
            if answer["wrong"]:
                answer["wrong"] = answer["wrong"].replace(path, Path(path).name)  # the folder is this machine's
            rows += _rows(subject, name, answer)
        if left:  # the process ended amid a file: that one's answer is how
            name = next(iter(left))
            del left[name]
            rows.append(failed(name, subject, METRIC, ending))
    return rows


def _rows(subject: str, name: str, answer: dict[str, str | None]) -> list[Row]:
    if answer["wrong"]:
        return [failed(name, subject, METRIC, answer["wrong"])]
    rows = [summarise(name, subject, METRIC, [1.0])]
    if subject == "gpupipe":
        rows.append(summarise(name, subject, BY_NVDEC, [float(answer["by"] == "nvdec")]))
    return rows


def make_files(folder: Path, shared: Path | None) -> dict[str, str]:
    """Every file by its name."""
    from streams import STREAMS  # type: ignore[import-not-found]  # in tests/

    made = {name: stream for name, stream in STREAMS.items() if stream.codec in av.codecs_available}
    files = {name: str(stream.make(folder, name)) for name, stream in made.items()}
    if shared is not None and shared.is_dir():
        samples = [*sorted((shared / "tricky").glob("*.[mt][ps]*")), *sorted((shared / "media").glob("*.mp4"))]
        files |= {path.name: str(path) for path in samples if path.name not in NOT_TO_BE_READ}
    return files


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--device", default="cuda:0", help="cpu leaves out the subjects that need a GPU")
    command.add_argument("--subjects", nargs="+", choices=list(SUBJECTS))
    command.add_argument("--only", nargs="+", help="names of files")
    shared = Path(os.environ.get("GPUPIPE_SHARED", ROOT.parent / "shared"))
    command.add_argument("--shared", type=Path, default=shared, help="folder with the folders tricky and media")
    command.add_argument("--out", type=Path, default=RESULTS)
    command.add_argument("--one-subject", help=argparse.SUPPRESS)
    command.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.one_subject:
        read_all(options.one_subject, options.files)
        return
    from gpupipe.observe.measure import machine_facts

    fitting = [name for name, (_, device) in SUBJECTS.items() if options.device != "cpu" or device == "cpu"]
    subjects = options.subjects or fitting
    facts = machine_facts()
    if options.device == "cpu":
        facts["gpu"] = None  # it is not what was tried
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder), options.shared)
        files = {name: path for name, path in files.items() if not options.only or name in options.only}
        # Side by side, for nothing is timed here; written after each, for a run may be ended before its time.
        with ThreadPoolExecutor(len(subjects)) as pool:
            going = {pool.submit(rows_of, subject, files): subject for subject in subjects}
            for done in as_completed(going):
                found[going[done]] = done.result()
                show(going[done], found[going[done]], len(files))
                made = [row for subject in subjects for row in found.get(subject, [])]
                made += [total(subject, found[subject]) for subject in subjects if subject in found]
                written = write_results("conformance", made, facts, options.out)
    print(written)


def total(subject: str, rows: Sequence[Row]) -> Row:
    """How many files a subject read right."""
    right = sum(row.metric == METRIC and row.value is not None for row in rows)
    return summarise("all", subject, "files_right", [float(right)])


def show(subject: str, rows: Sequence[Row], files: int) -> None:
    """On stderr: how many were read right, and why the others were not."""
    print(f"{subject:16} {total(subject, rows).value:.0f} of {files}", file=sys.stderr)
    for row in rows:
        if row.error:
            print(f"  {row.case}: {row.error}", file=sys.stderr)


if __name__ == "__main__":
    main()
