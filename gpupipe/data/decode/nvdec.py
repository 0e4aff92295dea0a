"""Hardware decode: PyNvVideoCodec's core decoder, fed packets from memory, on one thread's own CUDA stream."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpupipe.data.decode.bitstream import Bitstream
from gpupipe.data.decode.feed import PacketFeed, Scratch
from gpupipe.data.decode.surface import FrameStore
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Pass, Plan
from gpupipe.data.scan.bitstream.dpb import pictures_held
from gpupipe.data.stop import Stop, Stopped, never
from gpupipe.device.driver import drop_contexts
from gpupipe.device.inventory import load, nvdec_codec
from gpupipe.device.stream import fault
from gpupipe.errors import DeviceMemoryError
from gpupipe.types import PlaneFormat, Planes, VideoInfo

if TYPE_CHECKING:
    import torch

_CLASS = 64
"""Decoders are made for sizes rounded up to this many pixels, so that streams of like size share one by reconfiguration. More
room would be shared by more streams, but slows the decoding of small frames."""
_BYTE_STREAMS = ("h264", "hevc")
"""Codecs whose parser finds the pictures in any run of bytes by itself; the others want one picture a call."""
_PACKETS_A_CALL = 128
"""Each call gives up the interpreter lock twice, and holds memory for as many frames from then on."""
_BYTES_A_CALL = 64 << 20
"""Bound on the decoded frames of one call, which the decoder holds all at once."""
_NEVER = 1 << 62
"""A time that no packet has: the decoder leaves frames before it unmapped, but counts them."""

_ERROR_CODE = re.compile(r"Error code\s*:\s*(\d+)")
_ERROR_TYPE = re.compile(r"Error Type\s*:\s*(.+)")
_OUT_OF_MEMORY = 2
_FAULTS = range(700, 720)
"""Numbers of CUresult after which a context is of no more use: illegal address, launch failure and the like."""


class Unsupported(Exception):
    """NVDEC gave up on this stream; the CPU can take it."""


class _Miscounted(Exception):
    """A run gave more or fewer frames than it has packets."""


@dataclass(eq=False)
class _Session:
    """A decoder, and what it is set for."""

    decoder: Any
    kind: tuple[Any, ...]
    size: tuple[int, int]
    coded: tuple[tuple[int, int], ...]

    def can_turn_to(self, size: tuple[int, int], coded: tuple[tuple[int, int], ...]) -> bool:
        """Whether it can decode videos of another display size.

        It is set anew where the coded size changes. Where that is the same, it goes on cutting pictures for the old display
        size, and what is copied out is not all picture.
        """
        return self.size == size or not set(self.coded) & set(coded)


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
        self.keep = keep
        self.created = 0
        """Sessions opened so far."""
        self._sessions: list[_Session] = []
        """Least recently used first."""
        self._scratch = Scratch()
        self._bitstream = Bitstream()

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never, files: OpenFiles = UNKEPT) -> Planes:
        """Decodes a plan's frames, out of a file that ``files`` lends.

        Returns:
            Planes in the frame store, valid until its next use, complete once the stream has passed.

        Raises:
            Unsupported: when NVDEC cannot decode the stream, or left out a wanted frame.
            OpenError: when the file can no longer be read.
            DeviceMemoryError, SyncError: when CUDA fails.
            Stopped: when ``stop()`` turned true.
        """
        if index.info.codec in _BYTE_STREAMS:
            try:
                return self._decode(index, plan, stop, files, by_count=True)
            except _Miscounted:  # damaged: ask the parser's times, packet by packet
                pass
        return self._decode(index, plan, stop, files, by_count=False)

    def _decode(self, index: VideoIndex, plan: Plan, stop: Stop, files: OpenFiles, *, by_count: bool) -> Planes:
        session = None
        try:
            session = self._session(index)
            target = _Target(index, plan, self._store)
            with PacketFeed(index, files, self._scratch) as feed:
                for run in plan.passes:
                    put, shown = partial(self._put, index, run, feed.packets(run)), index.in_show_order(run.packets)
                    if by_count and shown[0] == run.first and index.unshown.isdisjoint(shown):
                        self._run_by_count(session.decoder, put, shown, target, stop)
                    else:  # leading or hidden pictures: they come out or not as the decoder sees fit
                        self._run_by_time(session.decoder, put, shown, target, stop)
            drop_contexts(target.unmapped)  # the decoder leaves one on the thread's stack for each frame it does not map
            return target.planes()
        except Stopped:  # an epoch that is broken off must not cost its sessions: the next one would wait for others
            self._rewind(session)
            raise
        except BaseException as error:
            self._drop(session)  # its parser may hold half a stream
            if isinstance(error, self._nvc.PyNvVCException | self._nvc.PyNvVCExceptionUnsupported):
                raise _explained(error, index.info.path) from error
            raise

    def _run_by_count(
        self, decoder: Any, put: Callable[[int], None], in_show_order: list[int], target: _Target, stop: Stop
    ) -> None:
        """Feeds many packets a call and tells frames apart by the order in which they come out, which is that of showing.

        Each call gives up the interpreter lock and must win it back: at small frame sizes that costs more than the decode. As
        long as no wanted frame can come out, frames are not even mapped: mapping waits for the engine.
        """
        expected = [target.slots.get(packet) for packet in in_show_order]
        wanted = deque(rank for rank, slot in enumerate(expected) if slot is not None)
        a_call = max(1, min(_PACKETS_A_CALL, _BYTES_A_CALL // target.frame_bytes))
        fed, shown, ended = 0, 0, False
        while wanted and fed < len(expected):
            if stop():
                raise Stopped
            unwanted = wanted[0] - fed  # the frame of this rank comes out once so many packets and its own have gone in
            count = min(a_call, unwanted if unwanted > 0 else a_call, len(expected) - fed)
            put(count)
            fed += count
            ended = fed == len(expected)
            frames = target.decode(decoder, self._call(0, last=ended), mapped_from=_NEVER if unwanted > 0 else 0)
            shown = target.take_in_order(frames, expected, shown)
            while wanted and wanted[0] < shown:
                wanted.popleft()
        rest = [] if ended else target.decode(decoder, self._end(), mapped_from=_NEVER)
        if target.take_in_order(rest, expected, shown) != fed:
            raise _Miscounted

    def _run_by_time(
        self, decoder: Any, put: Callable[[int], None], in_show_order: list[int], target: _Target, stop: Stop
    ) -> None:
        """Feeds packet by packet and tells frames apart by the number that each packet got for a time.

        NVDEC's parser hands times out again in rising order, so the numbers rise in the order of showing.
        """
        slots = {number: target.slots.get(packet) for number, packet in enumerate(in_show_order)}
        number_of = {packet: number for number, packet in enumerate(in_show_order)}
        wanted = deque(number for number, slot in slots.items() if slot is not None)
        for fed in [*sorted(in_show_order), None]:
            if stop():
                raise Stopped
            if fed is not None:
                put(1)
            packet = self._call(number_of[fed]) if fed is not None else self._end()
            for frame in target.decode(decoder, packet, mapped_from=wanted[0] if wanted else _NEVER):
                target.take(frame, slots.get(frame.getPTS()))
                while wanted and wanted[0] <= frame.getPTS():
                    wanted.popleft()
            target.copy()

    def _put(self, index: VideoIndex, run: Pass, packets: Iterator[tuple[int, bytes | memoryview]], count: int) -> None:
        """Puts the next packets of a run into the empty bitstream, the run's first one behind the parameter sets."""
        bitstream, length_size, first, changes = self._bitstream, index.length_size, run.first, index.set_changes
        bitstream.clear()
        for number, data in islice(packets, count):
            head = index.sets_at(first)[0] if number == first else changes.get(number)
            if head:
                bitstream.put(head)
            try:
                bitstream.put(data, length_size)
            except ValueError as error:
                raise Unsupported(f"packet {number} is damaged: {error}") from error

    def _call(self, time: int, *, last: bool = False) -> Any:
        """What the bitstream holds, as one packet for the decoder; behind the last one it puts out all it holds."""
        packet = self._nvc.PacketData()
        packet.bsl_data, packet.bsl = self._bitstream.address, self._bitstream.size_bytes
        packet.pts = packet.dts = time
        if last:
            packet.decode_flag = int(self._nvc.VideoPacketFlag.ENDOFSTREAM)
        return packet

    def _end(self) -> Any:
        """An empty packet that makes the decoder put out all it holds; the next one starts a new sequence."""
        packet = self._nvc.PacketData()
        packet.bsl_data = packet.bsl = 0
        packet.decode_flag = int(self._nvc.VideoPacketFlag.ENDOFSTREAM)
        return packet

    def _kind(self, index: VideoIndex) -> tuple[Any, ...]:
        """Streams of one kind can share a decoder.

        NVDEC's parser keeps to the number of surfaces of the first stream, so that one which holds more pictures would find
        some overwritten.
        """
        info = index.info
        room = tuple(-(-side // _CLASS) * _CLASS for side in (info.width, info.height))
        return info.codec, info.pix_fmt, pictures_held(info.codec, index.sets_at(0)[0]), room

    def _session(self, index: VideoIndex) -> _Session:
        """A decoder set for a video: one that is, one that can be, or a new one."""
        kind, size, coded = self._kind(index), (index.info.width, index.info.height), _coded(index.info)
        fitting = [each for each in self._sessions if each.kind == kind and each.can_turn_to(size, coded)]
        session = next((each for each in fitting if each.size == size), fitting[0] if fitting else None)
        if session is None:
            while len(self._sessions) >= self.keep:
                self._drop(self._sessions[0])
            decoder = self._nvc.CreateDecoder(
                gpuid=self._stream.device_index,
                codec=nvdec_codec(index.info.codec),
                cudacontext=0,
                cudastream=self._stream.cuda_stream,
                usedevicememory=True,
                maxwidth=kind[-1][0],
                maxheight=kind[-1][1],
            )
            session = _Session(decoder, kind, size, coded)
            self._sessions.append(session)
            self.created += 1
        elif session.size != size:
            session.decoder.setReconfigParams(*size)
            session.size, session.coded = size, coded
        self._sessions.remove(session)
        self._sessions.append(session)
        return session

    def _rewind(self, session: _Session | None) -> None:
        """Makes a decoder that was left amid a run let go of its pictures, so that the next plan can have it."""
        if session is None:
            return
        try:
            session.decoder.SetSeekPTS(_NEVER)
            drop_contexts(len(session.decoder.Decode(self._end())))
        except Exception:  # whatever is wrong with it, another one takes its place
            self._drop(session)

    def _drop(self, session: _Session | None) -> None:
        """Lets a decoder go, once the copies from its surfaces have passed."""
        if session in self._sessions:
            self._sessions.remove(session)
            self._stream.synchronize()

    def close(self) -> int:
        """Lets all decoders go; how many there were."""
        count = len(self._sessions)
        for session in list(self._sessions):
            self._drop(session)
        return count


class _Target:
    """Where a plan's frames go: copied out of the decoder's surfaces, which its next call overwrites."""

    def __init__(self, index: VideoIndex, plan: Plan, store: FrameStore) -> None:
        self.slots = plan.slots
        self.frame_bytes = index.info.width * index.info.height * 2
        """An estimate of a decoded frame's size, on the safe side for 8-bit 4:2:0."""
        self._index = index
        self._plan = plan
        self._store = store
        self._format: PlaneFormat | None = None
        self._found = [False] * len(plan.frames)
        self._due: list[tuple[int, int]] = []
        """(slot, address) of frames that are taken and not yet copied."""
        self.unmapped = 0
        """Frames that the decoder counted but did not map."""

    def decode(self, decoder: Any, packet: Any, mapped_from: int) -> list[Any]:
        """One call of the decoder, in which frames of times before ``mapped_from`` are counted but have no pixels."""
        decoder.SetSeekPTS(mapped_from)
        frames: list[Any] = decoder.Decode(packet)
        if mapped_from == _NEVER:
            self.unmapped += len(frames)
        elif mapped_from:
            self.unmapped += sum(frame.getPTS() < mapped_from for frame in frames)
        return frames

    def take_in_order(self, frames: list[Any], expected: list[int | None], shown: int) -> int:
        """Takes frames that follow the first ``shown`` of the ``expected`` ones; returns how many have been shown now.

        Raises:
            _Miscounted: when there are more frames than expected.
        """
        if shown + len(frames) > len(expected):
            raise _Miscounted
        for frame, slot in zip(frames, expected[shown:], strict=False):
            if slot is not None:
                self.take(frame, slot)
        self.copy()
        return shown + len(frames)

    def take(self, frame: Any, slot: int | None) -> None:
        """Has a frame copied into its slot, by the next :meth:`copy`; None for a frame that is not wanted."""
        if slot is None or self._found[slot]:
            return
        if self._format is None:
            self._format = self._layout(frame)
            self._store.reserve(len(self._found), self._format)
        self._due.append((slot, frame.GetPtrToPlane(0)))
        self._found[slot] = True

    def copy(self) -> None:
        """Copies what was taken, before the decoder's next call overwrites it."""
        if self._due:
            self._store.copy_surfaces(self._due, self._surface_pitch)
            self._due.clear()

    def _layout(self, frame: Any) -> PlaneFormat:
        info = self._index.info
        kind = str(frame.format).rsplit(".", 1)[-1]
        width, height = info.width, info.height
        even = width + width % 2
        bits = info.bit_depth
        if kind in ("NV12", "P016"):
            layout = PlaneFormat(width, height, even // 2, -(-height // 2), bits, 16 - bits if bits > 8 else 0, True)
        elif kind in ("YUV444", "YUV444_16Bit"):
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


def _coded(info: VideoInfo) -> tuple[tuple[int, int], ...]:
    """What the coded size may be, (width, height): as FFmpeg has it, and rounded up as NVDEC may.

    In whole macroblocks in H.264; how far NVDEC rounds in other codecs is not known, so no two sizes of a class are told apart.
    """
    step = 16 if info.codec == "h264" else _CLASS
    height, width = info.coded_size or (info.height, info.width)
    return (width, height), (-(-info.width // step) * step, -(-info.height // step) * step)


def _explained(error: BaseException, path: str) -> Exception:
    """What a failure of PyNvVideoCodec means: too little memory, a faulty CUDA context, or a stream that is not for NVDEC."""
    reason = _ERROR_TYPE.search(str(error))
    what = reason[1].strip() if reason else str(error).strip()
    code = _ERROR_CODE.search(str(error))
    number = int(code[1]) if code else 0
    if number == _OUT_OF_MEMORY:
        return DeviceMemoryError(
            f"NVDEC found no memory to decode {path}: {what}",
            fix="free memory on this GPU, or use fewer decode threads (decode={'threads': …})",
            path=path,
        )
    if number in _FAULTS:
        return fault("decode", what, path)
    return Unsupported(what)
