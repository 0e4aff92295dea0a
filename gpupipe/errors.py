"""Errors that a user of gpupipe can meet: each says what happened, to which file, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


class GpupipeError(Exception):
    """Base of all errors raised on purpose by gpupipe.

    Args:
        message: what happened, naming the file, the field or the argument.
        fix: what the user can do about it.
        path: the video or file concerned, if there is one.
        time_seconds: the place in the video, in seconds of its own clock, if there is one.
    """

    code = "TT_ERR"

    def __init__(
        self, message: str, *, fix: str | None = None, path: str | None = None, time_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.path = path
        self.time_seconds = time_seconds

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        if self.path and self.path not in self.message:
            text += f" (in {self.path}"
            text += f" at {self.time_seconds:.3f} s)" if self.time_seconds is not None else ")"
        if self.fix:
            text += f"\n  What to do: {self.fix}"
        return text


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a configuration.

    Attributes:
        place: the names that lead to it, from the outermost on; none where it concerns the whole.
        message: what is wrong.
        fix: what to do about it.
    """

    place: tuple[str, ...]
    message: str
    fix: str | None = None


class ConfigError(GpupipeError, ValueError):
    """A setting has an unknown name or a value that cannot work.

    Args:
        message, fix: as of any error here.
        faults: all that is wrong, one by one, where the message has been made of them.
    """

    code = "TT_ERR_CONFIG"

    def __init__(self, message: str, *, fix: str | None = None, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(message, fix=fix)
        self.faults = faults


class SourceError(GpupipeError):
    """The videos asked for cannot be found or listed."""

    code = "TT_ERR_SOURCE"


class OpenError(GpupipeError):
    """A file cannot be opened as a video: unreadable, damaged at its head, or without a video stream."""

    code = "TT_ERR_OPEN"


class DecodeError(GpupipeError):
    """A frame that was asked for could not be decoded."""

    code = "TT_ERR_DECODE"


class SampleError(GpupipeError, ValueError):
    """The clip asked for does not exist in this video (too short under the padding policy ``error``)."""

    code = "TT_ERR_SAMPLE"


class FrameIndexError(SampleError, IndexError):
    """A video has no frame at this position."""

    code = "TT_ERR_INDEX"


class DeviceError(GpupipeError):
    """A device or a part of its software (driver, NVRTC, headers, a package) is not there."""

    code = "TT_ERR_DEVICE"


class DeviceMemoryError(GpupipeError):
    """The device has not enough free memory for a buffer that the pipeline needs."""

    code = "TT_ERR_MEMORY"


class MemoryLeakError(GpupipeError):
    """A training loop holds more memory from step to step; what grows is named where it can be."""

    code = "TT_ERR_LEAK"


class ShapeError(GpupipeError, ValueError):
    """A tensor given to an op has a shape, a type or a place that does not fit; the argument is named, with what would fit."""

    code = "TT_ERR_SHAPE"


class GraphError(GpupipeError):
    """The pipeline's stages do not fit together (an output that no later stage can take)."""

    code = "TT_ERR_GRAPH"


class NotFiniteError(GpupipeError, ArithmeticError):
    """Losses or gradients are NaN or infinite, step after step; where that begins is named."""

    code = "TT_ERR_NOT_FINITE"


class SyncError(GpupipeError):
    """CUDA reported a fault on a stream of the pipeline; the stage that was running is named."""

    code = "TT_ERR_SYNC"


class StarvedError(GpupipeError, TimeoutError):
    """No batch came within ``timeout_seconds``; the stage that the threads are in is named."""

    code = "TT_ERR_STARVED"


class ClosedError(GpupipeError):
    """A loader or an iterator was used after it was closed or replaced by a newer one."""

    code = "TT_ERR_CLOSED"


def noted(error: Exception, note: str) -> Exception:
    """A user's own error with a note on where it was raised. A StopIteration becomes a RuntimeError, as in a generator (PEP
    479): the loop over batches would end by it."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"StopIteration was {note}")
    error.add_note(note)
    return error
