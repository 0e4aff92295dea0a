"""NVIDIA DALI as a decoder: its video reader, given a plan's packets as small files, on one thread's own CUDA stream.

DALI decodes with NVDEC, but gives pictures and no planes: chroma is interpolated to the size of luma. Of its operators one,
``fn.readers.video`` with ``dtype=FLOAT`` and ``image_type=YCbCr``, does not round what it has interpolated. From that the
codec's own chroma follows exactly, so that planes are those of the other decoders, bit for bit; and a picture from which it
would not follow shows itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupipe.data.decode.feed import PacketFeed, Scratch
from gpupipe.data.decode.nvdec import Unsupported
from gpupipe.data.decode.remux import PICTURE_SECONDS, clip_file, memory_file
from gpupipe.data.decode.surface import FrameStore
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, Plan
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.device.inventory import load, package
from gpupipe.device.stream import fault, is_cuda_fault
from gpupipe.errors import DeviceMemoryError
from gpupipe.types import PlaneFormat, Planes, VideoInfo

if TYPE_CHECKING:
    import torch

_PACKAGE = "nvidia.dali"
_CODECS = ("h264", "hevc")
_FEWEST = 24
"""Packets of a file: DALI gives up on one that ends before its decoder has shown a first picture."""
_BYTES_A_READ = 512 << 20
"""Bound on the pictures of one read, of which DALI holds several copies."""
_BYTES_A_PIXEL = 12
_WHOLE = 1 / 64
"""How far from a whole number a recovered sample may be. Rounding in single precision makes 2e-4 at most."""


def refusal(info: VideoInfo, device: torch.device) -> str | None:
    """Why DALI may not decode a video on ``device``; None where it may."""
    if device.type != "cuda":
        return "the device is the CPU, where DALI has neither H.264 nor HEVC"
    found = package(_PACKAGE)
    if not found.present:
        return f"nvidia.dali cannot be used: {found.reason}"
    if info.interlaced:
        return "interlaced video: DALI takes none"
    if not info.whole_start:
        return "its first frames refer to pictures that it has not got"
    if not info.uniform:
        return "its size or format changes in mid-stream"
    if info.codec in ("vp8", "vp9"):
        return f"{info.codec}: the one reader of DALI that keeps chroma exact takes pictures of VP9 for others"
    if info.codec not in _CODECS:
        return f"{info.codec}: hardware and software need not agree to the bit"
    if info.pix_fmt not in ("yuv420p", "yuvj420p"):
        return f"{info.pix_fmt}: DALI reads every picture as 4:2:0 of 8 bits"
    if info.width % 2 or info.height % 2:
        return f"odd size {info.width}x{info.height}: DALI leaves out the last chroma samples"
    return None


def chroma_of(interpolated: torch.Tensor) -> torch.Tensor:
    """The chroma samples from which DALI has interpolated: to twice the size each way, bilinearly, edges repeated.

    Along an axis DALI gives (c[i-1] + 3 c[i]) / 4 at 2 i and (3 c[i-1] + c[i]) / 4 at 2 i - 1, so c[i] is half of three times
    the first less the second; at 0 it gives c[0].

    Args:
        interpolated: (…, 2 H, 2 W) float, not rounded.

    Returns:
        (…, H, W) float: whole numbers but for the rounding of single precision.
    """
    return _halved(_halved(interpolated, -1), -2)


def _halved(samples: torch.Tensor, axis: int) -> torch.Tensor:
    import torch

    pairs = samples.unflatten(axis, (-1, 2))  # type: ignore[no-untyped-call]
    even, odd = pairs.select(axis, 0), pairs.select(axis, 1)
    count = even.shape[axis]
    inner = (3 * even.narrow(axis, 1, count - 1) - odd.narrow(axis, 0, count - 1)) / 2
    return torch.cat([even.narrow(axis, 0, 1), inner], axis)


def planes_of(pictures: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """The planes of DALI's pictures.

    Args:
        pictures: (N, H, W, 3) float32 Y, Cb and Cr in 0 … 255, of even size.

    Returns:
        Y (N, H, W), U and V (N, H / 2, W / 2) uint8; and how far a sample was from a whole number at most.
    """
    import torch

    luma, *chroma = pictures.unbind(-1)
    samples = [luma, *map(chroma_of, chroma)]
    whole = [plane.round() for plane in samples]
    off = torch.stack([(plane - near).abs().amax() for plane, near in zip(samples, whole, strict=True)]).amax()
    return [plane.clamp(0, 255).to(torch.uint8) for plane in whole], float(off)


@dataclass(frozen=True)
class _Read:
    """Every ``stride``-th picture of a file from ``first`` on, ``count`` of them; and where those wanted go."""

    first: int
    stride: int
    count: int
    slots: tuple[tuple[int, int], ...]
    """(number among the pictures read, slot)."""

    @property
    def pictures(self) -> range:
        """Their numbers in the file."""
        return range(self.first, self.first + (self.count - 1) * self.stride + 1, self.stride)


class DaliDecoder:
    """Decodes plans on one CUDA stream. Each run of a plan is a DALI pipeline of its own: DALI's readers have fixed files.

    Not for use by two threads at once.

    Raises:
        DeviceError: when DALI cannot be imported.
    """

    def __init__(self, stream: torch.cuda.Stream, store: FrameStore) -> None:
        self._dali: Any = load(_PACKAGE)
        self._stream = stream
        self._store = store
        self._scratch = Scratch()

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never, files: OpenFiles = UNKEPT) -> Planes:
        """Decodes a plan's frames, out of a file that ``files`` lends.

        Returns:
            Planes in the frame store, valid until its next use, complete once the stream has passed.

        Raises:
            Unsupported: when DALI cannot decode the stream, or gave other pictures than those wanted.
            OpenError: when the file can no longer be read.
            DeviceMemoryError, SyncError: when CUDA fails.
            Stopped: when ``stop()`` turned true.
        """
        info = index.info
        if index.set_changes:
            raise Unsupported("its parameter sets change in mid-stream: DALI keeps to those of the file's header")
        layout = PlaneFormat(info.width, info.height, info.width // 2, info.height // 2)
        self._store.reserve(len(plan.frames), layout)
        planes = self._store.planes(len(plan.frames), layout)
        with PacketFeed(index, files, self._scratch) as feed:
            for run in plan.passes:
                self._decode(index, feed, run, plan.slots, planes, stop)
        return planes

    def _decode(
        self, index: VideoIndex, feed: PacketFeed, run: Pass, slots: dict[int, int], planes: Planes, stop: Stop
    ) -> None:
        run = _long_enough(index, run)
        shown = index.in_show_order(run.packets)
        if shown[0] != run.first:
            raise Unsupported("an open group of pictures: DALI may leave out what is shown before its keyframe")
        wanted = [(rank, slots[packet]) for rank, packet in enumerate(shown) if packet in slots]
        most = max(1, _BYTES_A_READ // (_BYTES_A_PIXEL * index.info.width * index.info.height))
        with clip_file(index, feed.packets(run), shown) as path:
            for read in _reads(wanted, most):
                if stop():
                    raise Stopped
                self._read(path, index.info, read, planes)

    def _read(self, path: str, info: VideoInfo, read: _Read, planes: Planes) -> None:
        """Lets DALI decode pictures of a file, and copies the planes of those wanted into their slots."""
        import torch
        from torch.utils.dlpack import from_dlpack

        with memory_file("gpupipe-list") as listing, torch.cuda.stream(self._stream):
            pipeline, (video, _, times) = self._run(path, listing, info, read)
            pictures, got = from_dlpack(video[0]), from_dlpack(times[0]).tolist()
            expected = [number * PICTURE_SECONDS for number in read.pictures]
            if tuple(pictures.shape) != (read.count, info.height, info.width, 3):
                raise Unsupported(f"DALI gave pictures of shape {tuple(pictures.shape)} for {info.width}x{info.height}")
            if any(abs(time - want) > PICTURE_SECONDS / 4 for time, want in zip(got, expected, strict=True)):
                raise Unsupported(f"DALI gave pictures of the times {got} for {expected}")
            for number, slot in read.slots:  # one by one: several at once would need their memory many times over
                parts, off = planes_of(pictures[number : number + 1])
                if off > _WHOLE:
                    raise Unsupported(f"DALI's chroma is not as gpupipe knows it: samples lie {off:.3f} off whole numbers")
                for plane, part in zip((planes.y, planes.u, planes.v), parts, strict=True):
                    plane[slot].copy_(part[0])
            self._stream.synchronize()  # the pictures are the pipeline's own memory
            del pictures, video, times, pipeline

    def _run(self, path: str, listing: str, info: VideoInfo, read: _Read) -> tuple[Any, tuple[Any, ...]]:
        """The pipeline, which its outputs need, and those: (pictures, labels, their times), complete."""
        with open(listing, "w") as file:
            file.write(f"{path} 0 {read.pictures[0]} {read.pictures[-1] + 1}\n")
        dali = self._dali
        try:
            pipeline = dali.Pipeline(
                batch_size=1, num_threads=1, device_id=self._stream.device_index, prefetch_queue_depth=1,
                exec_pipelined=False, exec_async=False,
            )  # fmt: skip
            with pipeline:
                outputs = dali.fn.readers.video(
                    device="gpu", file_list=listing, file_list_frame_num=True, file_list_include_preceding_frame=True,
                    sequence_length=read.count, stride=read.stride, step=read.count * read.stride,
                    dtype=dali.types.FLOAT, image_type=dali.types.YCbCr, enable_timestamps=True,
                )  # fmt: skip
                pipeline.set_outputs(*outputs)
            pipeline.build()
            return pipeline, tuple(pipeline.run())
        except RuntimeError as error:
            raise _explained(error, info.path) from error


def _long_enough(index: VideoIndex, run: Pass) -> Pass:
    """A run with packets that nobody wants after it, or before it from an earlier start, so that it has ``_FEWEST`` or so."""
    total, pts = len(index.pts), index.pts
    after = range(run.last + 1, min(total, run.last + 1 + max(0, _FEWEST - len(run.packets))))
    if len(run.packets) + len(after) >= _FEWEST or run.first == 0:
        return Pass((*run.packets, *(packet for packet in after if pts[packet] >= pts[run.first])))
    starts = [0, *index.start.nonzero()[0].tolist()]
    first = min(run.first, max(start for start in starts if start <= max(0, total - _FEWEST)))
    if index.info.codec == "hevc":  # no picture shown after its start point refers to one before it: see plan.py
        return Pass(tuple(packet for packet in range(first, total) if pts[packet] >= pts[first]))
    return Pass(tuple(range(first, total)))


def _reads(wanted: list[tuple[int, int]], most: int) -> Iterator[_Read]:
    """Reads of at most ``most`` pictures that give all wanted ones, (rank, slot) ascending."""
    part: list[tuple[int, int]] = []
    for one in wanted:
        if part and _covering([*part, one]).count > most:
            yield _covering(part)
            part = []
        part.append(one)
    yield _covering(part)


def _covering(wanted: list[tuple[int, int]]) -> _Read:
    first = wanted[0][0]
    stride = math.gcd(*(rank - first for rank, _ in wanted)) or 1
    slots = tuple(((rank - first) // stride, slot) for rank, slot in wanted)
    return _Read(first, stride, slots[-1][0] + 1, slots)


def _explained(error: RuntimeError, path: str) -> Exception:
    """What a failure of DALI means, in a line of its report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Critical error", "Error in", "C++ context", "Current pipeline"))]
    said = next((line for line in telling if "failed:" in line or "rror" in line), telling[-1] if telling else "no message")
    if "out of memory" in str(error).lower() or "OUT_OF_MEMORY" in str(error):
        return DeviceMemoryError(
            f"DALI found no memory to decode {path}: {said}",
            fix="free memory on this GPU, or use fewer decode threads (decode={'threads': …})",
            path=path,
        )
    lost = is_cuda_fault(error) and any(name in str(error) for name in ("ILLEGAL", "LAUNCH", "ASSERT", "(7"))
    return fault("decode", said, path) if lost else Unsupported(said)
