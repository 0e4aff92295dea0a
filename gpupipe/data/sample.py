"""Which frames of a video make a clip. Works on the index alone: no pixel has been decoded yet."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gpupipe.config import ClipConfig
from gpupipe.data.index import VideoIndex
from gpupipe.errors import SampleError
from gpupipe.types import FramePick, VideoInfo

Place = tuple[int, float]
"""A frame, and the share of the following one."""
_NEAR = 1e-6
"""A place this near to a frame is that frame: steps and times are rounded."""


def pick_frames(
    config: ClipConfig,
    index: VideoIndex,
    rng: np.random.Generator,
    start_frame: int | None = None,
    place: tuple[int, int] = (0, 1),
) -> FramePick:
    """Picks the frames of one clip as ``config.sampling`` says, or from ``start_frame`` on where it is given.

    Args:
        place: which clip of the video it is, and of how many.

    Raises:
        SampleError: when the video is too short and ``config.pad`` is ``error``, or ``start_frame`` is not one of its frames.
    """
    frames = index.info.frames
    low, high = config.speed
    speed = float(rng.uniform(low, high)) if low < high else low
    if start_frame is not None:
        if not 0 <= start_frame < frames:
            raise SampleError(
                f"start_frame={start_frame} of {index.info.path}: the video has frames 0 to {frames - 1}",
                fix="correct the row",
                path=index.info.path,
            )
        real = _run(config, index, start_frame, speed)
    elif config.spans_video:
        real = [(frame, 0.0) for frame in _segments(config, frames, rng)]
    elif config.sampling == "regular":
        number, clips = place
        last = max(0, _last_start(config, index, speed))
        real = _run(config, index, round(last * number / (clips - 1)) if clips > 1 else last // 2, speed)
    else:
        real = _run(config, index, _random_start(config, index, rng, speed), speed)
    if config.reverse and rng.random() < config.reverse:
        real.reverse()
    return _pad(config, index, real, start_frame)


def fills(config: ClipConfig, index: VideoIndex, frames: int, start_frame: int | None = None) -> bool:
    """Whether a video has enough for a clip of so many frames, at whatever speed, from ``start_frame`` on where it is given."""
    longer = config.model_copy(update={"frames": frames})
    if start_frame is None and config.spans_video:
        return index.info.frames >= frames
    start = _first_start(config, index) if start_frame is None else start_frame
    return 0 <= start < index.info.frames and len(_run(longer, index, start, max(config.speed))) == frames


def shortage(config: ClipConfig, info: VideoInfo, start: int) -> str:
    """What a padded clip's video has, what the clip spans, and what to do, in words.

    Args:
        start: the clip's first frame in display order; not 0 only where a row or a keyframe decided it.
    """
    speed = max(config.speed)
    has = f"{info.frames} frames"
    if config.fps is not None:
        seconds = config.frames * speed / config.fps
        has += f" in {info.duration_seconds:.4g} s"
        spans, least = f"a clip of {config.frames} at {config.fps:g} fps lasts {seconds:.4g} s", f"'min_seconds': {seconds:.4g}"
    else:
        frames = _span(config, speed) + 1
        spans, least = f"a clip of {config.frames} with stride {config.stride} spans {frames}", f"'min_frames': {frames}"
    spans += f" at speed {speed:g}" if speed != 1 else ""
    if start:
        has += f", {info.frames - start} of them from the clip's start on"
    out = "let it start earlier" if start else f"leave short videos out with source={{'filter': {{{least}}}}}"
    meant = f"clip={{'pad': {config.pad!r}}}"
    return (
        f"{has}, and {spans}: the rest is padding, where batch['mask'] is False. Take {_shorter(config)}, {out}, or say that "
        f"it is meant with {meant}. stats() counts all such clips as clips_padded; this is told once"
    )


def _shorter(config: ClipConfig) -> str:
    """What makes a clip shorter, in words."""
    if config.fps is not None:
        return "a higher fps or fewer frames"
    return "a smaller stride or fewer frames" if config.stride > 1 else "fewer frames"


def _first_start(config: ClipConfig, index: VideoIndex) -> int:
    """The first frame from which a clip may start."""
    return int(index.keyframes[0]) if config.sampling == "keyframe" and len(index.keyframes) else 0


def _last_start(config: ClipConfig, index: VideoIndex, speed: float) -> int:
    """The last frame from which the whole clip fits; negative when it fits nowhere."""
    if config.fps is None:
        return index.info.frames - 1 - _span(config, speed)
    end = index.seconds[-1] - (config.frames - 1) * speed / config.fps
    return int(np.searchsorted(index.seconds, end + 1e-9, side="right")) - 1


def _random_start(config: ClipConfig, index: VideoIndex, rng: np.random.Generator, speed: float) -> int:
    """A random first frame among those from which the whole clip fits; the first of all when it fits nowhere."""
    last = _last_start(config, index, speed)
    if config.sampling != "keyframe":
        return int(rng.integers(last + 1)) if last >= 0 else 0
    fitting = index.keyframes[index.keyframes <= last]
    return int(rng.choice(fitting)) if len(fitting) else _first_start(config, index)


def _run(config: ClipConfig, index: VideoIndex, start: int, speed: float) -> list[Place]:
    """Frames from ``start`` on by stride or by time, as many as the video has."""
    if config.fps is None:
        steps = [_step(config, number, speed) for number in range(config.frames)]
        return [(start + frame, share) for frame, share in steps if start + frame + (share > 0) < index.info.frames]
    times = index.seconds[start] + np.arange(config.frames) * speed / config.fps
    end = index.info.start_seconds + index.info.duration_seconds
    shown = [float(time) for time in times if time < end - 1e-6 or time == times[0]]
    return [_at(index, time, blend=config.blend) for time in shown]


def _step(config: ClipConfig, number: int, speed: float) -> Place:
    """Where a frame of a clip by stride lies, from the clip's first one on."""
    step = number * config.stride * speed
    return _between(int(step), step % 1) if config.blend else (round(step), 0.0)


def _span(config: ClipConfig, speed: float) -> int:
    """How far after its first frame a clip by stride needs the last one."""
    frame, share = _step(config, config.frames - 1, speed)
    return frame + (share > 0)


def _between(frame: int, share: float) -> Place:
    """A place between two frames; one of the two where the place is that frame, but for rounding."""
    return (frame + 1, 0.0) if share > 1 - _NEAR else (frame, share if share > _NEAR else 0.0)


def _at(index: VideoIndex, time: float, *, blend: bool) -> Place:
    frame = index.at(time)
    if not blend or frame + 1 >= index.info.frames:
        return frame, 0.0
    here, following = float(index.seconds[frame]), float(index.seconds[frame + 1])
    return _between(frame, (time - here) / (following - here) if following > here else 0.0)


def _segments(config: ClipConfig, frames: int, rng: np.random.Generator) -> list[int]:
    """One frame out of each of T equal segments; all frames in order where the video has fewer than T."""
    if frames < config.frames:
        return list(range(frames))
    edges = np.arange(config.frames + 1) * frames / config.frames
    if config.sampling == "uniform":
        return [int(middle) for middle in (edges[:-1] + edges[1:]) / 2]
    return [int(rng.integers(int(low), int(high))) for low, high in pairwise(edges)]


def _pad(config: ClipConfig, index: VideoIndex, real: list[Place], start_frame: int | None) -> FramePick:
    info, missing = index.info, config.frames - len(real)
    if missing and config.pad == "error":
        begin, has, row = "", "", ""
        if start_frame is not None:
            begin, has = f" from start_frame={start_frame} on", f"{info.frames - start_frame} of its "
            row = "correct the row's start_frame, or "
        raise SampleError(
            f"{info.path} is too short{begin}: {has}{info.frames} frames at {info.fps:.3g} fps give {len(real)} of the "
            f"{config.frames} frames of a clip",
            fix=f"{row}use pad='repeat-last' or 'loop', {_shorter(config)}",
            path=info.path,
        )
    if config.pad == "loop":
        filled = [real[k % len(real)] for k in range(config.frames)]
    else:
        filled = real + [real[-1]] * missing
    blend = tuple(share for _, share in filled)
    mask = (True,) * len(real) + (False,) * missing
    return FramePick(tuple(frame for frame, _ in filled), mask, blend if any(blend) else ())
