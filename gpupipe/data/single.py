"""One clip made by itself, in the thread that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gpupipe.data.decode import DecodeEngine, Fallbacks, Mode
from gpupipe.data.draws import AUGMENT, clip_generator
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import make_plan
from gpupipe.data.transform import ClipInput, ClipTransform, TransformParams
from gpupipe.data.transform.custom import CallFailed, Custom
from gpupipe.device.stream import hand_over, stage
from gpupipe.telemetry import Telemetry
from gpupipe.types import ClipRecord, ClipRequest, FramePick, VideoInfo

Draw = Callable[[VideoInfo], TransformParams]
"""Parameters for frames of which such facts hold."""


class Which(NamedTuple):
    """Which clip: a request, the number of the clip among the request's, and its frames."""

    request: ClipRequest
    clip: int
    pick: FramePick


def drawn(transform: ClipTransform, which: Which, index: VideoIndex) -> Draw:
    """The parameters that a loader draws for a clip."""

    def draw(info: VideoInfo) -> TransformParams:
        generator = clip_generator(which.request, AUGMENT, which.clip)
        return transform.draw(info, generator, which.clip, displayed=index.info.display_size)

    return draw


def make_clip(
    index: VideoIndex, which: Which, transform: ClipTransform, custom: Custom, draw: Draw, device: torch.device, mode: Mode
) -> tuple[torch.Tensor, TransformParams, str]:
    """A clip as a loader makes it, by an engine of its own, whatever else the machine is at.

    Returns:
        A tensor of the transform's ``clip_shape`` and ``dtype`` on the device, usable on the current stream; the parameters
        that were used, and the decoder.

    Raises:
        OpenError, DecodeError, GraphError: when the clip cannot be made; the file is named.
    """
    plan, path = make_plan(index, which.pick.decoded), index.info.path
    engine = DecodeEngine(device, mode=mode, keep=1, fallbacks=Fallbacks(), telemetry=Telemetry())
    try:
        with torch.cuda.stream(engine.stream):
            planes, decoder = engine.decode(index, plan)
            with stage("transform", path):
                source = custom.prepare(planes, index.info, plan.frame_map, which.pick, which.request, which.clip)
                params = draw(source.info)
                shape = (1, *transform.clip_shape)
                out = torch.empty(shape, dtype=transform.dtype, device=device, memory_format=transform.memory_format)[0]
                transform.apply_batch([ClipInput(source.planes, source.info, params, source.frame_map, out, source.blend)])
                record = ClipRecord(path, which.request, which.pick, params, decoder, which.clip)
                custom.finish(out, index.info, record, transform)
            done = engine.stream.record_event() if engine.stream is not None else None
        if done is not None:
            hand_over([out], [done], torch.cuda.current_stream(device))
        return out, params, decoder
    except CallFailed as failed:
        raise failed.error from failed.error.__cause__
    finally:
        engine.close()
