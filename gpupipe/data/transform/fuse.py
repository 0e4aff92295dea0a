"""Clips of a batch made together on CUDA: one launch for all of them, one more where contrast needs the frames' means or for
blur.

The first launch goes from samples to the finished clip, changes of colour included. Where contrast is among these it ends with
the RGB before contrast, and with the sums of its greys; before blur it ends with the RGB that is to be blurred. That is kept in
16 bits of [0, 1], at half the bytes of float32: it is off by 2^-17 at most, 1/500 of a code of 8 bits, which contrast and what
follows it multiply by a small number. Where RGB may leave [0, 1] it is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpupipe.data.transform import finish, gaussian, resize
from gpupipe.data.transform.adjust import fold
from gpupipe.data.transform.color import rgb_from_codes
from gpupipe.data.transform.params import ColorOp, TransformParams
from gpupipe.data.transform.picture import CHANNELS, Job, Scale, begin_on_cuda, check_planes, make_on_cuda
from gpupipe.types import PlaneFormat, Planes, VideoInfo

if TYPE_CHECKING:
    from gpupipe.config import TransformConfig

_UNIT_SCALE = (65535.0,) * CHANNELS + (2.0**23,) * CHANNELS
"""As ``cuda_src/store.cuh`` wants it: a float from 2^23 on is a whole number, whose lowest 16 bits are kept."""
_FLOAT_SCALE = (1.0,) * CHANNELS + (0.0,) * CHANNELS
_ALIGN = 256

Scratch = Callable[[int], torch.Tensor]
"""Gives at least so many bytes, uint8, that are used on the current stream alone until the next call."""


@dataclass(frozen=True, slots=True)
class ClipInput:
    """One clip of :meth:`gpupipe.data.transform.ClipTransform.apply_batch`.

    Attributes:
        planes: decoded frames of the video, on ``out``'s device.
        info: the video's size, rotation and colour.
        params: what ``draw`` gave, now or in another run.
        frame_map: T positions into ``planes``, repeats and any order allowed; with ``blend`` 2 T.
        out: a slot of the batch, ``clip_shape`` of ``dtype`` (on the CPU also float64: computed in float64); every element is
            written.
        blend: T shares, 0 to 1, of the second T positions in what the first T show; none: nothing is blended.
    """

    planes: Planes
    info: VideoInfo
    params: TransformParams
    frame_map: Sequence[int]
    out: torch.Tensor
    blend: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class _Second:
    """What a clip's second launch has to do."""

    color: finish.Clip
    sums_a_frame: int
    """That the first launch gives, wanted or not."""
    sigma: float
    """Of the blur; 0: none."""


def takes(out: torch.Tensor) -> bool:
    """Whether clips that lie there are made here."""
    return out.is_cuda


class Fuser:
    """Makes those clips of a batch that take one or two launches together.

    Args:
        config: the transform's.
        scale: (gain, bias) of each channel.
        dtype: the clips'.
    """

    def __init__(self, config: TransformConfig, scale: Scale, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._scale = tuple(float(value) for part in scale for value in part)
        self._time, self._channel = (1, 0) if config.layout == "NCTHW" else (0, 1)
        self._matrices: dict[tuple[object, ...], tuple[float, ...]] = {}

    def make(self, clips: Sequence[ClipInput], scratch: Scratch | None = None) -> list[ClipInput]:
        """Makes them on the current stream, the same bits every time; gives those that must be made in another way.

        Args:
            scratch: where to keep what the second launches begin with; None: in new memory of torch's.
        """
        left: list[ClipInput] = []
        jobs: list[Job] = []
        seconds: list[tuple[Job, _Second]] = []
        room = 0
        for clip in clips:
            made = self._jobs(clip)
            if made is None:
                left.append(clip)
                continue
            for job, second in made:
                jobs.append(job)
                if second is not None:
                    seconds.append((job, second))
                    frames, (height, width) = second.color.frames, second.color.size
                    job.out = room
                    job.sums = room + _aligned(frames * CHANNELS * height * width * job.item_bytes)
                    room = _aligned(job.sums + 4 * frames * second.sums_a_frame)
        if seconds:
            device = clips[0].out.device
            memory = scratch(room) if scratch is not None else torch.empty(room, dtype=torch.uint8, device=device)
            base = memory.data_ptr()
            for job, second in seconds:
                job.out += base
                job.sums += base
                second.color.rgb, second.color.sums = job.out, job.sums
        if jobs:
            make_on_cuda(jobs, self._dtype)
        colored = [second.color for _, second in seconds if not second.sigma]
        if colored:
            finish.make(colored, self._dtype)
        blurred = [gaussian.Clip(second.color, second.sigma) for _, second in seconds if second.sigma]
        if blurred and self._config.blur is not None:
            gaussian.make(blurred, self._config.blur.kernel_size, self._dtype)
        return left

    def _jobs(self, clip: ClipInput) -> list[tuple[Job, _Second | None]] | None:
        """What the first launch has to do, and the second: for the whole clip, or for each frame; None where others must."""
        if clip.out.dtype != self._dtype:
            return None
        params = clip.params
        if not params.frames:
            job = self._job(clip, params, clip.frame_map, clip.blend, 0)
            return None if job is None else [job]
        jobs = []
        for t, each in enumerate(params.frames):
            job = self._job(clip, each, clip.frame_map[t :: len(params.frames)], clip.blend[t : t + 1], t)
            if job is None:
                return None
            jobs.append(job)
        return jobs

    def _job(
        self, clip: ClipInput, params: TransformParams, frame_map: Sequence[int], blend: Sequence[float], first: int
    ) -> tuple[Job, _Second | None] | None:
        if not finish.serves(params.color):
            return None
        config, planes, info, out = self._config, clip.planes, clip.info, clip.out
        check_planes(planes, info, out.device)
        matrix, fill, ops = self._matrix(info, planes.format, params.color)
        way = begin_on_cuda(
            planes, info, params, out, config.size, fill, filter=config.interpolation, antialias=config.antialias, blend=blend
        )
        if way is None:
            return None
        begin, sums_a_frame = way
        strides = out.stride()
        strides = strides[self._time], strides[self._channel], strides[2], strides[3]
        item = out.element_size()
        address = out.data_ptr() + first * strides[0] * item
        contrast = 0
        while contrast < len(ops) and ops[contrast].name != "contrast":
            contrast += 1
        sigma = params.blur if config.blur is not None else 0.0
        if contrast == len(ops) and not sigma:
            steps = finish.pack_steps(ops, clamp=config.clamp)
            job = begin(matrix + self._scale, steps, config.clamp, frame_map, resize.FINISHED, item, address, strides)
            return job, None
        height, width = config.size
        target, bytes_a_value, scale = (resize.UNIT, 2, _UNIT_SCALE) if config.clamp else (resize.FLOAT, 4, _FLOAT_SCALE)
        before = finish.pack_steps(ops[:contrast], clamp=config.clamp)
        steps = finish.pack_steps(ops[contrast:], clamp=config.clamp)
        job = begin(
            matrix + scale, before, config.clamp, frame_map, target, bytes_a_value, 0,
            (CHANNELS * height * width, height * width, width, 1),
        )  # fmt: skip
        after = finish.Clip(
            0, target == resize.FLOAT, 0, sums_a_frame if contrast < len(ops) else 0, steps, self._scale,
            len(blend) or len(frame_map),
            config.size, address, strides,
        )  # fmt: skip
        return job, _Second(after, sums_a_frame, sigma)

    def _matrix(
        self, info: VideoInfo, form: PlaneFormat, ops: tuple[ColorOp, ...]
    ) -> tuple[tuple[float, ...], Sequence[float], tuple[ColorOp, ...]]:
        """(3, 4) from sample codes to RGB, and the fill, leading changes of colour included where nothing is clamped; the
        others."""
        config = self._config
        untagged = {"untagged_matrix": config.untagged_matrix, "untagged_range": config.untagged_range}
        if not config.clamp:
            folded, ops = fold(ops)
            fill = (folded @ np.array(config.fill)).tolist()
            return tuple((folded @ rgb_from_codes(info, form, **untagged)).ravel().tolist()), fill, ops
        key = (info.color_matrix, info.color_range, min(info.width, info.height) >= 720, form.bits, form.shift)
        found = self._matrices.get(key)
        if found is None:
            found = self._matrices[key] = tuple(rgb_from_codes(info, form, **untagged).ravel().tolist())
        return found, config.fill, ops


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
