"""A user's own transforms, any callables on a :class:`gpupipe.types.Clip`, before and after gpupipe's."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gpupipe.data.draws import AFTER, BEFORE, clip_generator
from gpupipe.data.transform import ClipTransform, to_rgb
from gpupipe.device.doing import at
from gpupipe.device.memory import PITCH_BYTES
from gpupipe.device.stream import stage
from gpupipe.errors import GraphError, noted
from gpupipe.types import Clip, ClipRecord, ClipRequest, FramePick, PlaneFormat, Planes, VideoInfo

_BEYOND = 4.0
"""Floats beyond this are taken for codes of 8 bits: a filter may overshoot 1, but not so far."""
UserTransform = Callable[[Clip], "Clip | torch.Tensor | None"]
"""Gives the new pixels, or the clip that holds them, or None when it has changed ``clip.video`` in place."""


class CallFailed(Exception):
    """A user's function raised ``error``: none of its kinds may be taken for an error of the video, or for the epoch's end."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Call(NamedTuple):
    """A user's function at work on a video, or on a batch's text: in it a thread may hang for ever."""

    name: str
    function: Callable[..., object]
    path: str
    what: str = "the transform"

    def __str__(self) -> str:
        return f"{self.what} {self.name}={self.function!r} at work on {self.path}"


Watch = Callable[[Call | None], None]
"""Told of a call before it begins, and with None after its end."""


def unwatched(call: Call | None) -> None:
    """For calls that nobody watches."""


class Source(NamedTuple):
    """What a clip is made of: as :meth:`ClipTransform.apply` wants it."""

    planes: Planes
    info: VideoInfo
    frame_map: Sequence[int]
    blend: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Custom:
    """What is called before and after the clip transform, in the thread and on the stream that make the clip.

    Attributes:
        before: gets ``clip.video`` (T, 3, H, W) uint8 RGB of the displayed frames, its own copy, and no ``params`` yet; gives
            (T, 3, H', W') of any size, uint8 or floating point in [0, 1], which is rounded to 8 bits. What it is given went
            through 8-bit RGB too: both are a price of the callable.
        after: gets ``clip.video``, the clip's place in the batch, in the batch's layout, dtype and normalisation; gives the
            same shape and dtype.
        untagged_matrix, untagged_range: as in :class:`gpupipe.TransformConfig`, for the RGB that ``before`` gets.
    """

    before: UserTransform | None = None
    after: UserTransform | None = None
    untagged_matrix: str = "auto"
    untagged_range: str = "limited"
    _looked: list[bool] = field(default_factory=list, compare=False, repr=False)
    """Whether floats that ``before`` gave were looked at, on a GPU."""
    _thread: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    @property
    def is_there(self) -> bool:
        """Whether there is a transform of the user's at all."""
        return self.before is not None or self.after is not None

    @property
    def calling(self) -> bool:
        """Whether the calling thread is inside of one of these."""
        return getattr(self._thread, "calling", False)

    def prepare(
        self,
        planes: Planes,
        info: VideoInfo,
        frame_map: Sequence[int],
        pick: FramePick,
        request: ClipRequest,
        number: int,
        watch: Watch = unwatched,
    ) -> Source:
        """The frames of clip ``number`` of a request, changed by ``before``.

        Returns:
            What was given, where there is no ``before``.

        Raises:
            GraphError: when ``before`` gives something that is no frames.
            CallFailed: when it raises.
        """
        if self.before is None:
            return Source(planes, info, frame_map, pick.blend)
        frames = sorted(set(frame_map))
        words = (
            planes.data if planes.format.sample_bytes == 1 else planes.data.view(torch.int16)
        )  # torch picks signed ones only
        picked = Planes(words[torch.tensor(frames, device=words.device)].view(planes.data.dtype), planes.format)
        rgb = to_rgb(picked, info, untagged_matrix=self.untagged_matrix, untagged_range=self.untagged_range)
        rgb = rgb[torch.tensor([frames.index(f) for f in frame_map], device=rgb.device)]
        if pick.blend:
            now, following = rgb.float().chunk(2)
            shares = torch.tensor(pick.blend, dtype=torch.float32, device=rgb.device).view(-1, 1, 1, 1)
            rgb = now.lerp_(following, shares).round_().to(torch.uint8)
        video = self._call("before", self.before, Clip(rgb, info, pick, clip_generator(request, BEFORE, number)), watch)
        if video.ndim != 4 or video.shape[:2] != rgb.shape[:2] or 0 in video.shape:
            raise GraphError(f"before= gave {tuple(video.shape)}, not ({len(rgb)}, 3, H, W)", path=info.path)
        if video.device != rgb.device:
            raise GraphError(f"before= gave frames on {video.device}, not on {rgb.device}", path=info.path)
        if video.is_floating_point():
            if video.device.type == "cpu" or not self._looked:  # on a GPU once: the host waits for the answer
                most = float(video.amax())
                if math.isnan(most):
                    raise GraphError("before= gave NaN: floats are RGB in [0, 1]", path=info.path)
                if most > _BEYOND:
                    raise GraphError(
                        f"before= gave values up to {most:.0f}: floats are RGB in [0, 1]", fix="divide by 255", path=info.path
                    )
                self._looked[:] = [True]
            video = (video.clamp(0, 1) * 255).round_().nan_to_num_(0)  # of NaN each device would make other codes
        elif video.dtype != torch.uint8:
            raise GraphError(f"before= gave {video.dtype}, not uint8 or a floating-point type", path=info.path)
        return Source(*_as_planes(video, info), range(len(video)))

    def finish(
        self, slot: torch.Tensor, info: VideoInfo, record: ClipRecord, transform: ClipTransform, watch: Watch = unwatched
    ) -> None:
        """Changes a finished clip in its slot by ``after``.

        Raises:
            GraphError: when ``after`` gives another shape or dtype.
            CallFailed: when it raises.
        """
        if self.after is None:
            return
        rng = clip_generator(record.request, AFTER, record.clip)
        video = self._call("after", self.after, Clip(slot, info, record.pick, rng, record.params), watch)
        if video is slot:
            return
        if tuple(video.shape) != transform.clip_shape or video.dtype != transform.dtype or video.device != slot.device:
            raise GraphError(
                f"after= gave {video.dtype} {tuple(video.shape)} on {video.device}, the batch has {transform.dtype} "
                f"{transform.clip_shape} on {slot.device}",
                path=info.path,
            )
        slot.copy_(video)

    def _call(self, name: str, function: UserTransform, clip: Clip, watch: Watch) -> torch.Tensor:
        watch(Call(name, function, clip.info.path))
        within, self._thread.calling = self.calling, True  # it may make a clip again by replay, and that calls it too
        try:
            # A batch is data: nothing is learnt through it.
            with stage("transform", clip.info.path), at(name, clip.info.path), torch.no_grad():
                given = function(clip)
        except Exception as error:
            note = f"raised by the transform {name}={function!r} for {clip.info.path}"
            raise CallFailed(noted(error, note)) from error
        finally:
            self._thread.calling = within
            watch(None)
        video = clip.video if given is None else given.video if isinstance(given, Clip) else given
        if not isinstance(video, torch.Tensor):
            raise GraphError(f"{name}= gave a {type(video).__name__}, not a tensor, a Clip or None", path=clip.info.path)
        if video.layout != torch.strided:
            raise GraphError(f"{name}= gave a tensor of layout {video.layout}, not a dense one", path=clip.info.path)
        return video


NO_CUSTOM = Custom()


def _as_planes(video: torch.Tensor, info: VideoInfo) -> tuple[Planes, VideoInfo]:
    """RGB in 8 bits as full-range planes in the order that H.273's identity matrix has: G, B, R. Nothing is lost by it."""
    count, _, height, width = video.shape
    pitch = -(-width // PITCH_BYTES) * PITCH_BYTES
    data = torch.zeros((count, 3 * height, pitch), dtype=torch.uint8, device=video.device)
    for row, channel in enumerate((1, 2, 0)):
        data[:, row * height : (row + 1) * height, :width] = video[:, channel]
    plain = replace(
        info, width=width, height=height, rotation=0, color_matrix="rgb", color_range="full", bit_depth=8, coded_size=None
    )
    return Planes(data, PlaneFormat(width, height, width, height)), plain
