"""How NVDEC is fed, told apart and left unmapped, against a decoder that keeps PyNvVideoCodec's rules and runs on the CPU.

Its rules, as seen on the hardware: it reads the packet's memory during the call alone; a call takes any run of bytes of H.264
and HEVC, of which just the first picture has the call's time; frames before the seek time are counted but keep whatever
their surface held; surfaces are used again by the next call; after the end-of-stream flag the next packet starts afresh.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import write_changing_sets
from streams import STREAMS

from gpupipe.data import index as indices
from gpupipe.data.decode import cpu, nvdec
from gpupipe.data.decode.nvdec import NvdecDecoder, Unsupported
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import make_plan
from gpupipe.errors import DeviceMemoryError, SyncError
from gpupipe.types import PlaneFormat, Planes

END = 1


class Fault(Exception):
    """What PyNvVideoCodec raises."""


class Packet:
    bsl_data = 0
    bsl = 0
    pts = 0
    dts = 0
    decode_flag = 0


class Frame:
    def __init__(self, time: int, surface: np.ndarray, kind: str) -> None:
        self._time, self._surface, self.format = time, surface, f"Pixel_Format.{kind}"

    def getPTS(self) -> int:
        return self._time

    def GetPtrToPlane(self, plane: int) -> int:
        assert plane == 0
        return int(self._surface.ctypes.data)

    def framesize(self) -> int:
        return self._surface.nbytes


class Decoder:
    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._seek = 0
        self._surfaces: list[np.ndarray] = []
        self._restart()
        self.calls = 0
        self.mapped = 0

    def _restart(self) -> None:
        self._context: Any = av.CodecContext.create(self._codec, "r")
        self._context.thread_count = 1
        self._context.options = {"strict": "1"} if self._codec == "h264" else {}
        self._times: deque[int] = deque()

    def SetSeekPTS(self, time: int) -> None:
        self._seek = time

    def setReconfigParams(self, width: int, height: int) -> None:
        self._seek = 0

    def Decode(self, packet: Packet) -> list[Frame]:
        self.calls += 1
        pieces: list[Any] = []
        if packet.bsl:
            data = ctypes.string_at(packet.bsl_data, packet.bsl)
            self._times.append(packet.pts)
            pieces += self._context.parse(data) if self._codec in ("h264", "hevc") else [av.Packet(data)]
        if packet.decode_flag == END:
            pieces += [*self._context.parse(b""), None]
        for piece in pieces:
            if piece is not None:
                piece.pts = piece.dts = self._times.popleft() if self._times else 0
        shown = [frame for piece in pieces for frame in self._context.decode(piece)]
        frames = [self._frame(number, frame) for number, frame in enumerate(shown)]
        if packet.decode_flag == END:
            self._restart()
        return frames

    def _frame(self, number: int, frame: Any) -> Frame:
        time = int(frame.pts)
        layout, (y, u, v) = cpu.frame_planes(frame)
        width = layout.width + layout.width % 2
        deep = layout.bits > 8
        rows = np.zeros((layout.height + layout.chroma_height, width), np.uint16 if deep else np.uint8)
        rows[: layout.height, : layout.width] = y
        rows[layout.height :, : 2 * layout.chroma_width : 2], rows[layout.height :, 1 : 2 * layout.chroma_width : 2] = u, v
        if deep:
            rows <<= 16 - layout.bits
        if number >= len(self._surfaces) or self._surfaces[number].shape != rows.shape:
            self._surfaces[number:] = [np.full_like(rows, 0xEE)]
        if self._seek == 0 or time >= self._seek:
            self._surfaces[number][:] = rows
            self.mapped += 1
        return Frame(time, self._surfaces[number], "P016" if deep else "NV12")


class Store:
    """A FrameStore on the CPU."""

    def reserve(self, frames: int, layout: PlaneFormat) -> None:
        self._layout = layout
        dtype = np.uint8 if layout.sample_bytes == 1 else np.uint16
        self._data = np.full((frames, layout.rows, layout.row_samples), 0xAB, dtype)

    def copy_surfaces(self, frames: Iterable[tuple[int, int]], pitch_bytes: int) -> None:
        for slot, address in frames:
            rows = np.frombuffer(ctypes.string_at(address, pitch_bytes * self._layout.rows), self._data.dtype)
            self._data[slot] = rows.reshape(self._layout.rows, -1)[:, : self._layout.row_samples]

    def planes(self, frames: int, layout: PlaneFormat) -> Planes:
        return Planes(torch.from_numpy(self._data[:frames]), layout)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """The decoders that were made, in order."""
    decoders: list[Decoder] = []

    def create(**settings: Any) -> Decoder:
        decoders.append(Decoder(settings["codec"]))
        return decoders[-1]

    module = SimpleNamespace(
        PacketData=Packet,
        VideoPacketFlag=SimpleNamespace(ENDOFSTREAM=END),
        PyNvVCException=Fault,
        PyNvVCExceptionUnsupported=Fault,
        CreateDecoder=create,
    )
    monkeypatch.setattr(nvdec, "load", lambda name: module)
    monkeypatch.setattr(nvdec, "nvdec_codec", lambda codec: codec)
    monkeypatch.setattr(nvdec, "drop_contexts", lambda most: None)
    return decoders


def decoder(keep: int = 3) -> NvdecDecoder:
    return NvdecDecoder(SimpleNamespace(device_index=0, cuda_stream=0, synchronize=lambda: None), Store(), keep)  # type: ignore[arg-type]


def assert_exact(hardware: NvdecDecoder, index: VideoIndex, wanted: list[int]) -> None:
    plan = make_plan(index, wanted)
    ours, theirs = hardware.decode(index, plan), cpu.decode(index, plan)
    for name in ("y", "u", "v"):
        plane, expected = (getattr(planes, name).to(torch.int32) for planes in (ours, theirs))
        assert torch.equal(plane >> ours.format.shift, expected), (index.info.path, wanted, name)


@pytest.mark.parametrize("name", ["h264", "h264_odd", "hevc", "vp9"])
def test_made_clips(name: str, clips: dict[str, Path], made: list[Decoder]) -> None:
    index, hardware, draw = indices.load(str(clips[name])), decoder(), random.Random(name)
    for count in (1, 1, 2, 5, 16, 40):
        assert_exact(hardware, index, [draw.randrange(60) for _ in range(count)])
    assert_exact(hardware, index, list(range(40, 56)))
    assert_exact(hardware, index, list(range(0, 60, 7)))
    assert len(made) == 1, "one decoder serves all plans of a video"


def test_parameter_sets_that_come_once_amid_the_stream(tmp_path: Path, made: list[Decoder]) -> None:
    index, hardware = indices.load(str(write_changing_sets(tmp_path))), decoder()
    for frame in (75, 5, 55, 35, 45):
        assert_exact(hardware, index, [frame, frame + 1])
    assert_exact(decoder(), index, [72])


@pytest.mark.parametrize("name", [name for name, stream in STREAMS.items() if stream.nvdec and "444" not in name])
def test_streams_of_every_structure(name: str, tmp_path: Path, made: list[Decoder]) -> None:
    index, hardware, draw = indices.load(str(STREAMS[name].make(tmp_path, name))), decoder(), random.Random(name)
    last = index.info.frames - 1
    for count in (1, 3, 8):
        assert_exact(hardware, index, [draw.randint(0, last) for _ in range(count)])
    assert_exact(hardware, index, list(range(last - 16, last + 1)))
    assert len(made) == 1


TRICKY = [
    "t01_opengop_h264.mp4",
    "t02_opengop_hevc.mp4",
    "t05_vfr.mp4",
    "t06_start8s.ts",
    "t09_hevc10_pq.mp4",
    "t15_1frame.mp4",
]


@pytest.mark.parametrize("name", [*TRICKY, "t15_1frame.mp4", "t18_intra.mp4", "t18_longgop.mp4"])
def test_tricky_files(name: str, tricky: Path, made: list[Decoder]) -> None:
    index, hardware, draw = indices.load(str(tricky / name)), decoder(), random.Random(name)
    last = index.info.frames - 1
    for count in (1, 3, 8):
        assert_exact(hardware, index, [draw.randint(0, last) for _ in range(count)])
    assert_exact(hardware, index, [0, last, last // 2])
    assert len(made) == 1


def test_unwanted_frames_stay_unmapped_and_calls_are_few(clips: dict[str, Path], made: list[Decoder]) -> None:
    index = indices.load(str(clips["h264"]))
    wanted = list(range(20, 28))
    assert_exact(decoder(), index, wanted)
    assert made[0].mapped < len(wanted) + 12
    assert made[0].calls == 2, "up to the first that is wanted, and all the rest: each gives up the interpreter lock"
    made.clear()
    assert_exact(decoder(), indices.load(str(clips["vp9"])), [25, 29])
    assert made[0].mapped == 2, "with a time for each packet just the wanted ones"


def test_videos_of_many_sizes_in_turn(clips: dict[str, Path], made: list[Decoder]) -> None:
    hardware = decoder(keep=2)
    for _ in range(2):
        for name in ("h264", "h264_odd", "hevc", "vp9"):
            assert_exact(hardware, indices.load(str(clips[name])), [3, 50])
    assert hardware.created == len(made) == 8, "four kinds in turn, of which two are kept"


def test_a_miscounting_decoder_is_asked_for_times(
    clips: dict[str, Path], made: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that swallows a frame when it is given many packets a call."""
    original = Decoder.Decode

    def swallow(self: Decoder, packet: Packet) -> list[Frame]:
        frames = original(self, packet)
        return frames[1:] if len(frames) > 2 and packet.decode_flag != END else frames

    monkeypatch.setattr(Decoder, "Decode", swallow)
    assert_exact(decoder(), indices.load(str(clips["h264"])), [22, 23])
    assert len(made) == 2, "the decoder that lost count is not used again"


def test_a_frame_that_does_not_come_is_named(
    clips: dict[str, Path], made: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "Decode", lambda self, packet: [])
    index = indices.load(str(clips["h264"]))
    with pytest.raises(Unsupported, match="NVDEC left out frame 7"):
        decoder().decode(index, make_plan(index, [7]))


@pytest.mark.parametrize(
    ("code", "expected"),
    [(801, Unsupported), (1, Unsupported), (2, DeviceMemoryError), (700, SyncError), (719, SyncError)],
)
def test_what_a_failing_decoder_means(
    code: int, expected: type[Exception], clips: dict[str, Path], made: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, hardware = indices.load(str(clips["h264"])), decoder()
    assert_exact(hardware, index, [3])

    def fail(self: Decoder, packet: Packet) -> list[Frame]:
        raise Fault(f"HandleVideoSequence : \nError code : {code}\nError Type : it would not go\nat somewhere.cpp:274")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "Decode", fail)
        with pytest.raises(expected, match="it would not go"):
            hardware.decode(index, make_plan(index, [3]))
    assert_exact(hardware, index, [3, 40])
    assert len(made) == 2, "the decoder that failed is not used again"
