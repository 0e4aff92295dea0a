"""One thread's decoders: NVDEC, DALI and the CPU behind one call, with a fallback that is automatic, visible and lasting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gpupipe.data.cache import KeptClip
from gpupipe.data.decode import cpu
from gpupipe.data.decode.choice import Choice, Decoder, Mode, choose
from gpupipe.data.decode.lanes import Lane, free_decoders, give_back, take
from gpupipe.data.decode.nvdec import Unsupported
from gpupipe.data.decode.process import DecodeProcess
from gpupipe.data.files import UNKEPT
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan
from gpupipe.data.stop import Stop, never
from gpupipe.device.memory import give_back_idle
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import DecodeError, DeviceMemoryError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Planes

if TYPE_CHECKING:
    import torch

Damaged = Literal["keep", "bad"]
_NAMES = {"nvdec": "NVDEC", "dali": "DALI"}


class Fallbacks:
    """Videos that NVDEC (or DALI) gave up on in this run: they stay with the CPU, so that two visits give the same pixels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}

    def get(self, path: str) -> str | None:
        with self._lock:
            return self._reasons.get(path)

    def add(self, path: str, reason: str) -> None:
        with self._lock:
            self._reasons.setdefault(path, reason)


class DecodeEngine:
    """Runs plans for one thread; kept between epochs. On CUDA it holds a lane, with the decoders that its last user left there.

    Args:
        device: where the planes are wanted.
        mode: which decoder may be used.
        keep: NVDEC sessions to keep open.
        fallbacks: shared by the engines of one run.
        process: decodes what is decoded in software; None: this thread does.
        damaged: whether frames that software finds to be damaged are used, or are an error.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        mode: Mode,
        keep: int,
        fallbacks: Fallbacks,
        telemetry: Telemetry,
        process: DecodeProcess | None = None,
        damaged: Damaged = "keep",
    ) -> None:
        self.device = device
        self._mode = mode
        self._keep = keep
        self._fallbacks = fallbacks
        self._telemetry = telemetry
        self._process = process
        self._damaged = damaged
        self.files = UNKEPT
        """Lends the files that this process reads; the loader's, where it keeps files open."""
        self._lane: Lane | None = None
        self._leaving: weakref.finalize[..., DecodeEngine] | None = None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """This engine's own stream on a CUDA device, until :meth:`close`; None on the CPU."""
        return self._hardware().stream if self.device.type == "cuda" else None

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Memory of this engine's CUDA device to work in on its stream: at least ``size_bytes`` uint8, until the next call."""
        return self._hardware().store.scratch(size_bytes)

    @property
    def ready(self) -> bool:
        """False for an engine with a process that is not yet there: :meth:`get_ready` starts it."""
        return self._process is None or self._process.ready

    def get_ready(self, stop: Stop = never) -> None:
        """Starts the engine's process, if it has one, and waits for it.

        Raises:
            DeviceError: when it cannot be had.
            Stopped: when ``stop()`` turned true.
        """
        if self._process is not None:
            self._process.get_ready(stop)

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never) -> tuple[Planes, str]:
        """Decodes a plan's frames to this engine's device, by NVDEC where it serves, else in software; or by DALI.

        Returns:
            The planes as :meth:`run` gives them, and the name of the decoder: ``nvdec``, ``dali`` or ``cpu``.

        Raises:
            DecodeError: when a wanted frame cannot be decoded, or ``mode`` is ``nvdec`` or ``dali`` and that cannot serve.
            OpenError: when the file can no longer be read.
            SyncError, DeviceMemoryError: when CUDA fails.
            Stopped: when ``stop()`` turned true.
        """
        choice = self.choose(index)
        try:
            return self.run(choice.decoder, index, plan, stop), choice.decoder
        except Unsupported:
            choice = self.choose(index)
            return self.run(choice.decoder, index, plan, stop), choice.decoder

    def choose(self, index: VideoIndex) -> Choice:
        """Who is to decode a video: NVDEC, or software where NVDEC has not got it or has given it up before.

        Raises:
            DecodeError: when that is software and ``mode`` is ``nvdec`` or ``dali``.
        """
        path = index.info.path
        known = self._fallbacks.get(path)
        choice = Choice("cpu", known) if known is not None else choose(index.info, self.device, self._mode)
        if choice.decoder == "cpu" and self._mode in _NAMES:
            raise DecodeError(
                f"{path} cannot be decoded by {_NAMES[self._mode]}: {choice.reason or 'unknown'}",
                fix="use decoder='auto' or 'cpu'",
                path=path,
            )
        if choice.decoder == "cpu" and self.device.type == "cuda" and choice.reason is not None and self._mode != "cpu":
            self._telemetry.warn_once(f"fallback {path}", f"{path} is decoded on the CPU: {choice.reason}")
        return choice

    def run(self, decoder: Decoder, index: VideoIndex, plan: Plan, stop: Stop = never, *, whole: bool = False) -> Planes:
        """Decodes a plan's frames to this engine's device by ``nvdec``, ``dali`` or ``cpu``.

        With ``whole``, frames that software finds to be damaged are an error, however the engine takes them otherwise.

        Returns:
            The planes, valid until this engine's next decode and on a CUDA device complete once its stream has passed.

        Raises:
            Unsupported: when NVDEC or DALI gave up on the video; :meth:`choose` has another answer for it from now on.
            DecodeError, OpenError, SyncError, DeviceMemoryError, Stopped: as for :meth:`decode`.
        """
        path = index.info.path
        damaged: list[int] = []
        with stage("decode", path), self._telemetry.span("decode"):
            if decoder != "cpu":
                try:
                    planes = self._decode_in_hardware(decoder, index, plan, stop)
                except Unsupported as error:
                    self._fallbacks.add(path, str(error))
                    raise
            elif self._process is not None:
                planes = self._process.decode(index, plan, stop, damaged)
            else:
                planes = cpu.decode(index, plan, stop, self.files, damaged)
        if damaged:
            self._meet_damage(index, damaged, whole=whole)
        self._telemetry.count("packets_decoded", plan.packets)
        self._telemetry.count("frames_decoded", len(plan.frames))
        self._telemetry.count("bytes_planes", len(planes) * planes.format.used_bytes)
        if decoder == "cpu" and self.device.type == "cuda":
            self._telemetry.count("bytes_uploaded", planes.data.nbytes)
            with stage("upload", path):
                planes = self._hardware().store.upload(planes)
        elif decoder != "cpu":
            self._telemetry.count("bytes_uploaded", plan.packet_bytes(index))
        return planes

    def _meet_damage(self, index: VideoIndex, frames: list[int], *, whole: bool) -> None:
        """Raises: DecodeError: where damaged frames are not to be used."""
        path, first = index.info.path, frames[0]
        seconds = float(index.seconds[first])
        some = f"frame {first}" if len(frames) == 1 else f"{len(frames)} frames from frame {first} on"
        what = f"{path} is damaged: FFmpeg could decode {some} only in part"
        if whole or self._damaged == "bad":
            raise DecodeError(what, fix="replace the file, or leave it out", path=path, time_seconds=seconds)
        self._telemetry.count("damaged_frames", len(frames))
        self._telemetry.warn_once(
            f"damaged {path}",
            f"{what} ({seconds:.3f} s) and patched it up; decode={{'damaged': 'bad'}} makes such clips those of a bad file",
        )

    def recall(self, clip: KeptClip, path: str) -> Planes:
        """The planes of a clip that was kept, on this engine's device, valid as those of :meth:`run`.

        Raises:
            SyncError, DeviceMemoryError: when CUDA fails.
        """
        self._telemetry.count("bytes_planes", sum(part.nbytes for part in clip.parts))
        if self.device.type != "cuda":
            return clip.on_host()
        self._telemetry.count("bytes_uploaded", sum(part.nbytes for part in clip.parts if not part.is_cuda))
        with stage("recall", path):
            lane = self._hardware()
            hand_over(clip.parts, [clip.ready] if clip.ready is not None else [], lane.stream)
            return lane.store.put(clip.parts, clip.format, non_blocking=True)

    def _hardware(self) -> Lane:
        if self._lane is None and self._process is not None:  # never opens a session: leaves those that are open to others
            self._lane = Lane(self.device)
        elif self._lane is None:
            self._lane = take(self.device)
            self._leaving = weakref.finalize(self, give_back, self._lane)
            self._leaving.atexit = False
        return self._lane

    def _decode_in_hardware(self, decoder: Decoder, index: VideoIndex, plan: Plan, stop: Stop) -> Planes:
        lane = self._hardware()
        if decoder == "dali":
            return self._with_memory(lane.dali().decode, index, plan, stop)
        serving = lane.nvdec(self._keep)
        before = serving.created
        try:
            return self._with_memory(serving.decode, index, plan, stop)
        finally:
            self._telemetry.count("decoders_created", serving.created - before)

    def _with_memory(self, decode: Callable[..., Planes], index: VideoIndex, plan: Plan, stop: Stop) -> Planes:
        """Decodes, a second time when memory was short and some could be freed: of idle decoders, this thread's own among them,
        and what torch keeps for itself, for decoders take theirs past torch."""
        try:
            return decode(index, plan, stop, self.files)
        except DeviceMemoryError:
            own = self._lane.free_decoders() if self._lane is not None else 0
            freed = [free_decoders() > 0, own > 0, give_back_idle(self.device)]
            if not any(freed):
                raise
        return decode(index, plan, stop, self.files)

    def twin(self) -> DecodeEngine:
        """An engine like this one, with a lane and a process of its own."""
        other = type(self)(
            self.device,
            mode=self._mode,
            keep=self._keep,
            fallbacks=self._fallbacks,
            telemetry=self._telemetry,
            process=DecodeProcess(self._process.nice) if self._process is not None else None,
            damaged=self._damaged,
        )
        other.files = self.files
        return other

    def give_up(self) -> None:
        """For an engine whose thread is stuck: ends its process, which may set the thread free."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Leaves the decoders to the next engine; a later decode takes a lane anew."""
        if self._process is not None:
            self._process.close()
        if self._leaving is not None:
            self._leaving()
        self._lane = self._leaving = None
