"""VideoReader: random access to one video, for people and for tests."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import IO, NamedTuple, Self, SupportsIndex, get_args

import torch

from gpupipe.config import PathLike
from gpupipe.data import index as indices
from gpupipe.data.bytes import held
from gpupipe.data.decode import DecodeEngine, Fallbacks, Mode
from gpupipe.data.limit import within_limit
from gpupipe.data.plan import Plan, make_plan
from gpupipe.data.transform import to_rgb
from gpupipe.device.inventory import load, resolve_device
from gpupipe.device.stream import hand_over, stage
from gpupipe.errors import ConfigError, FrameIndexError, SampleError
from gpupipe.telemetry import Telemetry
from gpupipe.types import PlaneFormat, Planes, VideoInfo

_MOST_FRAMES, _MOST_BYTES = 128, 256 << 20
"""Frames that an iteration reads at a time, and their size as RGB: at most, but for one."""


class FramePlanes(NamedTuple):
    """One frame as the codec made it: ``y`` (H, W), ``u`` and ``v`` at their own size, uint8 or right-aligned uint16."""

    y: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor


class VideoReader:
    """Random access to one video's frames, as a sequence of them: ``reader[-1]``, ``reader[10:50:4]``, ``for frame in reader``.

    Threads may share a reader; they read one after the other. A copy, or one out of a pickle, opens the file anew.

    Args:
        path: the video: a path, a URL, ``SHARD.tar::MEMBER``, or its bytes, or a binary file that holds them.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``: where the results lie.
        decoder: ``auto``: NVDEC for what it decodes to the same bits, else the CPU; or one of ``nvdec``, ``dali`` and ``cpu``.

    Raises:
        OpenError: when the file cannot be opened as a video.
        DeviceError: when the device, or a package that it needs, is not there.
    """

    @within_limit("a VideoReader cannot be made")
    def __init__(
        self,
        path: PathLike | bytes | IO[bytes],
        *,
        device: str | torch.device = "auto",
        decoder: Mode = "auto",
    ) -> None:
        if decoder not in get_args(Mode):
            raise ConfigError(f"decoder={decoder!r} is not a decoder", fix="use 'auto', 'nvdec', 'dali' or 'cpu'")
        self._held: held.Held | None = None
        if isinstance(path, str | os.PathLike):
            name = os.fspath(path)
        elif held.holds_bytes(path):
            self._held = held.hold(path)
            name = self._held.name
        else:
            raise ConfigError(f"path={path!r} is not a path", fix="name one video file, or give its bytes")
        self.device = resolve_device(str(device))
        self._index = indices.load(name)
        if self.device.type == "cuda":
            load("cupy")
        self._telemetry = Telemetry()
        self._decoder = decoder
        self._reading = threading.Lock()
        self._engine = DecodeEngine(self.device, mode=decoder, keep=3, fallbacks=Fallbacks(), telemetry=self._telemetry)

    @property
    def info(self) -> VideoInfo:
        """Facts of the stream."""
        return self._index.info

    @property
    def pts_seconds(self) -> list[float]:
        """The time of each frame, in display order."""
        return [float(t) for t in self._index.seconds]

    def __len__(self) -> int:
        """Frames that can be read."""
        return self.info.frames

    def __getitem__(self, key: SupportsIndex | slice) -> torch.Tensor:
        """One frame, (3, H, W), by display position, or those of a slice, (N, 3, H, W), as :meth:`frames` gives them.

        Negative positions count from the end; a slice may reach beyond the ends, as for a list.

        Raises:
            FrameIndexError: when a position is not in the video.
            SampleError: when ``key`` is neither a position nor a slice of positions.
            DecodeError: as :meth:`frames`.
        """
        if isinstance(key, slice):
            try:
                return self.frames(range(len(self))[key])
            except (TypeError, ValueError) as error:
                if isinstance(error, SampleError):
                    raise
                raise SampleError(f"{key!r} is no slice of frames: {error}", fix="use whole numbers, as [10:50:4]") from None
        if not hasattr(key, "__index__"):
            raise SampleError(f"{key!r} is no frame position", fix="use [7] or [10:50:4]; frames() takes a list of positions")
        return self.frames([key])[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """All frames in display order, (3, H, W) uint8 RGB each; read some dozens at a time.

        Raises:
            DecodeError: as :meth:`frames`, when the iteration gets there.
        """
        height, width = self.info.display_size
        most = max(1, min(_MOST_FRAMES, _MOST_BYTES // (3 * height * width)))
        begin, count = 0, len(self)
        while begin < count:
            end = min(begin + most, count)
            starts = self._index.keyframes
            starts = starts[(starts > begin) & (starts < end)]
            if end < count and len(starts):  # nothing before a start is decoded again for what follows it
                end = int(starts[-1])
            for frame in self.frames(range(begin, end)):
                yield frame.clone()  # so that one that is kept keeps no others
            begin = end

    def frames(self, indices: Iterable[SupportsIndex]) -> torch.Tensor:
        """Frames by display position, in the order given, repeats allowed, negative ones counted from the end.

        Returns:
            (N, 3, H, W) uint8 RGB: display rotation applied, pixels not stretched by the pixel aspect, deep video scaled to 8
            bits without tone mapping.

        Raises:
            FrameIndexError: when a position is not in the video.
            SampleError: when ``indices`` is no list of positions.
            DecodeError: when a frame cannot be decoded, or differs in size from the others.
        """
        wanted = self._positions(indices)
        if not wanted:
            return torch.empty((0, 3, *self.info.display_size), dtype=torch.uint8, device=self.device)
        plan = make_plan(self._index, wanted)

        def rgb(planes: Planes) -> list[torch.Tensor]:
            frames = to_rgb(planes, self.info)
            if plan.frame_map == tuple(range(len(frames))):
                return [frames]
            return [frames[torch.tensor(plan.frame_map, device=self.device)]]

        return self._read(plan, rgb)[0]

    def frames_at(self, seconds: Iterable[float]) -> torch.Tensor:
        """The frames on show at given times of the video's own clock: of each, the last one with a time at or before it.

        Returns:
            As :meth:`frames`.

        Raises:
            SampleError: when a time lies before the first frame or at or after the end of the last.
        """
        if not isinstance(seconds, Iterable):
            raise SampleError(f"frames are asked for by a list of times, got {seconds!r}", fix=f"write [{seconds!r}]")
        try:
            times = [float(time) for time in seconds]
        except (TypeError, ValueError, OverflowError) as error:
            raise SampleError(f"frames are asked for by times in seconds, got {seconds!r}", fix="give numbers") from error
        start = self.info.start_seconds
        end = start + self.info.duration_seconds
        for time in times:
            if not start - 1e-9 <= time < end:
                raise SampleError(
                    f"{self.info.path} shows nothing at {time} s: its frames are shown from {start:.3f} to before {end:.3f} s",
                    fix="ask for a time inside the video",
                    path=self.info.path,
                )
        return self.frames([self._index.at(time) for time in times])

    def planes(self, indices: Iterable[SupportsIndex]) -> list[FramePlanes]:
        """Frames as the codec made them: stored orientation, chroma at its own size, no conversion.

        Raises:
            SampleError, DecodeError: as :meth:`frames`.
        """
        wanted = self._positions(indices)
        if not wanted:
            return []
        plan = make_plan(self._index, wanted)

        def copies(planes: Planes) -> list[torch.Tensor]:
            return [_right_aligned(plane, planes.format) for plane in (planes.y, planes.u, planes.v)]

        parts = self._read(plan, copies)
        return [FramePlanes(*(part[slot] for part in parts)) for slot in plan.frame_map]

    @within_limit("frames cannot be read")
    def _read(self, plan: Plan, convert: Callable[[Planes], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What ``convert`` makes of a plan's planes, usable on the caller's stream."""
        with self._reading:
            stream = self._engine.stream
            with torch.cuda.stream(stream):
                planes, _ = self._engine.decode(self._index, plan)
                with stage("convert", self.info.path):
                    made = convert(planes)
                done = stream.record_event() if stream is not None else None
        if done is not None:
            with stage("hand-over", self.info.path):
                hand_over(made, [done], torch.cuda.current_stream(self.device))
        return made

    def _positions(self, wanted: Iterable[SupportsIndex]) -> list[int]:
        length = len(self)
        if not isinstance(wanted, Iterable) or isinstance(wanted, str):
            raise SampleError(f"frames are asked for by a list of positions, got {wanted!r}", fix="write [0, 1] or range(2)")
        positions = []
        for item in wanted:
            try:
                position = operator.index(item)
            except TypeError:
                raise SampleError(f"{item!r} is no frame position", fix="use whole numbers; frames_at() takes times") from None
            if not -length <= position < length:
                raise FrameIndexError(
                    f"{self.info.path} has no frame {position}: it has frames 0 to {length - 1}",
                    fix="ask for a frame of the video",
                    path=self.info.path,
                )
            positions.append(position % length)
        return positions

    def close(self) -> None:
        """Leaves the decoder to the next reader or loader (see :func:`gpupipe.free_decoders`); a later read takes one anew."""
        with self._reading:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """As for a worker process that is spawned: what comes out of a pickle opens the file anew."""
        path = self._index.identity.path if self._held is None else self._held.fetch()
        return partial(type(self), path, device=self.device, decoder=self._decoder), ()

    def __repr__(self) -> str:
        info = self.info
        return f"VideoReader({info.path!r}, {len(self)} frames, {info.width}x{info.height} {info.codec}, on {self.device})"


def _right_aligned(plane: torch.Tensor, layout: PlaneFormat) -> torch.Tensor:
    """A copy of a plane with its samples shifted down to bit 0."""
    copy = plane.clone(memory_format=torch.contiguous_format)
    if layout.shift == 0:
        return copy
    codes = copy.view(torch.int16).to(torch.int32) & 0xFFFF  # torch shifts signed integers only
    return (codes >> layout.shift).to(torch.uint16)
