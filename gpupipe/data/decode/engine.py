"""One thread's decoders: NVDEC and the CPU behind one call, with a fallback that is automatic, visible and lasting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

from gpupipe.data.decode import cpu
from gpupipe.data.decode.choice import Choice, choose
from gpupipe.data.decode.nvdec import NvdecDecoder, Unsupported
from gpupipe.data.decode.surface import FrameStore
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan
from gpupipe.data.stop import Stop, never
from gpupipe.device.stream import stage
from gpupipe.errors import DecodeError
from gpupipe.telemetry import Telemetry
from gpupipe.types import Planes

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "nvdec", "cpu"]


class Fallbacks:
    """Videos that NVDEC gave up on in this run: they stay with the CPU, so that two visits give the same pixels."""

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
    """Runs plans for one thread; kept between epochs, with its decoders and its memory.

    Args:
        device: where the planes are wanted.
        stream: this engine's own stream on a CUDA device; None on the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        mode: Mode,
        keep: int,
        fallbacks: Fallbacks,
        telemetry: Telemetry,
    ) -> None:
        self.device = device
        self.stream = stream
        self._mode = mode
        self._keep = keep
        self._fallbacks = fallbacks
        self._telemetry = telemetry
        self._store = FrameStore(stream) if stream is not None else None
        self._nvdec: NvdecDecoder | None = None

    def decode(self, index: VideoIndex, plan: Plan, stop: Stop = never) -> tuple[Planes, str]:
        """Decodes a plan's frames to this engine's device.

        Returns:
            The planes, on a CUDA device valid until this engine's next decode and complete once its stream has passed, and the
            name of the decoder: ``nvdec`` or ``cpu``.

        Raises:
            DecodeError: when a wanted frame cannot be decoded, or ``mode`` is ``nvdec`` and NVDEC cannot serve.
            OpenError: when the file can no longer be read.
            SyncError, DeviceMemoryError: when CUDA fails.
            Stopped: when ``stop()`` turned true.
        """
        path = index.info.path
        choice = self._choose(index)
        if choice.decoder == "nvdec":
            try:
                with stage("decode", path), self._telemetry.span("decode"):
                    planes = self._hardware().decode(index, plan, stop)
                self._account(plan, "nvdec")
                return planes, "nvdec"
            except Unsupported as error:
                if self._mode == "nvdec":
                    raise self._refused(path, str(error)) from error
                self._fallbacks.add(path, str(error))
                choice = Choice("cpu", str(error))
        if self.stream is not None and choice.reason is not None and self._mode != "cpu":
            self._telemetry.warn_once(f"fallback {path}", f"{path} is decoded on the CPU: {choice.reason}")
        with stage("decode", path), self._telemetry.span("decode"):
            planes = cpu.decode(index, plan, stop)
        self._account(plan, "cpu")
        if self._store is not None:
            with stage("upload", path):
                planes = self._store.upload(planes)
        return planes, "cpu"

    def _choose(self, index: VideoIndex) -> Choice:
        known = self._fallbacks.get(index.info.path)
        choice = Choice("cpu", known) if known is not None else choose(index.info, self.device, self._mode)
        if choice.decoder == "cpu" and self._mode == "nvdec":
            raise self._refused(index.info.path, choice.reason or "unknown")
        return choice

    def _hardware(self) -> NvdecDecoder:
        assert self.stream is not None
        assert self._store is not None
        if self._nvdec is None:
            self._nvdec = NvdecDecoder(self.stream, self._store, self._keep)
        return self._nvdec

    def _refused(self, path: str, reason: str) -> DecodeError:
        return DecodeError(f"{path} cannot be decoded by NVDEC: {reason}", fix="use decoder='auto' or 'cpu'", path=path)

    def _account(self, plan: Plan, decoder: str) -> None:
        self._telemetry.count("packets_decoded", plan.packets)
        self._telemetry.count("frames_decoded", len(plan.frames))
        self._telemetry.count(f"{decoder}_clips")

    def close(self) -> None:
        """Frees decoders and memory, after all work on the stream has passed."""
        if self.stream is not None:
            self.stream.synchronize()
        if self._nvdec is not None:
            self._nvdec.close()
            self._nvdec = None
        if self.stream is not None:
            self._store = FrameStore(self.stream)
