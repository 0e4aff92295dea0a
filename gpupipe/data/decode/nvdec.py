"""Hardware decode: PyNvVideoCodec's core decoder, fed packets from memory, on one thread's own CUDA stream."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupipe.data.decode.cpu import Stop, Stopped, never
from gpupipe.data.decode.feed import PacketFeed
from gpupipe.data.decode.surface import FrameStore
from gpupipe.data.index import VideoIndex
from gpupipe.data.index.bitstream.nal import parameter_sets, to_annexb
from gpupipe.data.plan import Pass, Plan
from gpupipe.device.inventory import load, nvdec_codec
from gpupipe.types import PlaneFormat, Planes

if TYPE_CHECKING:
    import torch

_CLASS = 256
"""Decoders are made for sizes rounded up to this many pixels, so that streams of like size share one by reconfiguration."""
_ALIGN = 64
"""Coded sizes are multiples of at most this."""


class Unsupported(Exception):
    """NVDEC gave up on this stream; the CPU can take it."""


@dataclass
class _Session:
    decoder: Any
    size: tuple[int, int]


class NvdecDecoder:
    """Decodes plans on one CUDA stream; keeps its decoders between videos.

    Not for use by two threads at once. A decoder that fails is dropped: the next plan gets a new one.

    Args:
        stream: all decodes and copies are ordered on this stream.
        keep: decoders to keep, least recently used dropped first.
    """

    def __init__(self, stream: torch.cuda.Stream, store: FrameStore, keep: int = 3) -> None:
        self._nvc = load("PyNvVideoCodec")
        self._stream = stream
        self._store = store
        self._keep = keep
        self._sessions: OrderedDict[tuple[Any, ...], _Session] = OrderedDict()

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never) -> Planes:
        """Decodes a plan's frames.

        Returns:
            Planes in the frame store, valid until its next use, complete once the stream has passed.

        Raises:
            Unsupported: when NVDEC cannot decode the stream, or left out a wanted frame.
            OpenError: when the file can no longer be read.
            Stopped: when ``stop()`` turned true.
        """
        key, session = self._session(index)
        try:
            target = _Target(index, plan, self._store)
            with PacketFeed(index) as feed:
                for run in plan.passes:
                    self._run(session.decoder, index, feed, run, target, stop)
            return target.planes()
        except BaseException as error:
            self._sessions.pop(key, None)  # its parser may hold half a stream
            if isinstance(error, self._nvc.PyNvVCException | self._nvc.PyNvVCExceptionUnsupported):
                raise Unsupported(_first_line(error)) from error
            raise

    def _run(self, decoder: Any, index: VideoIndex, feed: PacketFeed, run: Pass, target: _Target, stop: Stop) -> None:
        codec, length_size = index.info.codec, index.length_size
        head = parameter_sets(codec, index.extradata) if codec in ("h264", "hevc") else b""
        packet_data = self._nvc.PacketData
        for number, data in feed.packets(run):
            if stop():
                raise Stopped
            try:
                data = to_annexb(data, length_size, head)
            except ValueError as error:
                raise Unsupported(f"packet {number} is damaged: {error}") from error
            head = b""
            packet = packet_data()
            packet.bsl_data, packet.bsl = _address(data), len(data)
            packet.pts = packet.dts = number
            packet.key = int(index.key[number])
            for frame in decoder.Decode(packet):
                target.take(frame, self._stream)
        end = packet_data()
        end.bsl_data = end.bsl = 0
        end.decode_flag = int(self._nvc.VideoPacketFlag.ENDOFSTREAM)
        for frame in decoder.Decode(end):
            target.take(frame, self._stream)

    def _session(self, index: VideoIndex) -> tuple[tuple[Any, ...], _Session]:
        info = index.info
        room = tuple(-(-(side + _ALIGN) // _CLASS) * _CLASS for side in (info.width, info.height))
        key = (info.codec, info.pix_fmt, room)
        size = (info.width, info.height)
        session = self._sessions.get(key)
        if session is None:
            while len(self._sessions) >= self._keep:
                self._sessions.popitem(last=False)
            decoder = self._nvc.CreateDecoder(
                gpuid=self._stream.device_index,
                codec=nvdec_codec(info.codec),
                cudacontext=0,
                cudastream=self._stream.cuda_stream,
                usedevicememory=True,
                maxwidth=room[0],
                maxheight=room[1],
            )
            session = self._sessions[key] = _Session(decoder, size)
        elif session.size != size:
            session.decoder.setReconfigParams(*size)
            session.size = size
        self._sessions.move_to_end(key)
        return key, session

    def close(self) -> None:
        self._sessions.clear()


class _Target:
    """Where a plan's frames go: copied out of the decoder's surfaces, which the next packet overwrites."""

    def __init__(self, index: VideoIndex, plan: Plan, store: FrameStore) -> None:
        self._index = index
        self._plan = plan
        self._store = store
        self._format: PlaneFormat | None = None
        self._found = [False] * len(plan.frames)

    def take(self, frame: Any, stream: torch.cuda.Stream) -> None:
        slot = self._plan.slots.get(frame.getPTS())
        if slot is None or self._found[slot]:
            return
        if self._format is None:
            self._format = self._layout(frame)
            self._store.reserve(len(self._found), self._format)
        self._store.copy_surface(slot, frame.GetPtrToPlane(0), self._surface_pitch, stream)
        self._found[slot] = True

    def _layout(self, frame: Any) -> PlaneFormat:
        info = self._index.info
        kind = str(frame.format).rsplit(".", 1)[-1]
        width, height = info.width, info.height
        even = width + width % 2
        if kind in ("NV12", "P016"):
            bits = info.bit_depth
            layout = PlaneFormat(width, height, even // 2, -(-height // 2), bits, 16 - bits if bits > 8 else 0, True)
        elif kind in ("YUV444", "YUV444_16Bit"):
            bits = info.bit_depth
            layout = PlaneFormat(width, height, width, height, bits, 16 - bits if bits > 8 else 0)
        else:
            raise Unsupported(f"NVDEC's output format {kind} is not one that gpupipe reads")
        self._surface_pitch = even * layout.sample_bytes
        if frame.framesize() < layout.rows * self._surface_pitch:
            raise Unsupported(f"a surface of {frame.framesize()} bytes cannot hold {layout}")
        return layout

    def planes(self) -> Planes:
        if self._format is None or not all(self._found):
            missing = self._plan.frames[self._found.index(False)]
            raise Unsupported(f"NVDEC left out frame {missing}")
        return self._store.planes(len(self._found), self._format)


def _address(data: bytes) -> int:
    import numpy as np

    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error Type" in line]
    return lines[0].removeprefix("Error Type : ") if lines else str(error).strip()
