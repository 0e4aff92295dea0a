"""Visits to videos: as tasks, and as all that is known of them before their pixels; and how many there may be at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupipe.data.assembly import Assembly
from gpupipe.data.cache import KeptClip
from gpupipe.data.decode import Choice, Decoder
from gpupipe.data.index import VideoIndex
from gpupipe.data.plan import Plan
from gpupipe.errors import DecodeError, GpupipeError
from gpupipe.types import ClipRequest, Entry, FramePick

_NAMED = 5
"""Files that an error names."""


@dataclass(frozen=True, slots=True)
class Task:
    """A visit that is to be made: its batch, the slots for its clips there, and what is to be visited."""

    number: int
    """Its place among the visits of the epoch, from 0 where the epoch is taken up."""
    batch: int
    """The number of its batch in the jitter buffer."""
    assembly: Assembly
    slots: range
    request: ClipRequest


@dataclass(frozen=True, slots=True)
class Visit:
    """A task of which all is known but the pixels: the clips of one video, decoded in one pass."""

    task: Task
    entry: Entry
    index: VideoIndex
    picks: list[FramePick]
    plan: Plan
    choice: Choice
    kept: KeptClip | None = None
    """Its planes, when they need not be decoded."""

    @property
    def number(self) -> int:
        return self.task.number

    @property
    def decoded(self) -> bool:
        return self.kept is not None

    @property
    def decoder(self) -> Decoder:
        return self.choice.decoder

    @property
    def kind(self) -> str:
        return f"{self.index.info.codec} {self.index.info.pix_fmt}"

    @property
    def cost(self) -> float:
        """Pixels to decode."""
        return self.plan.packets * self.index.info.width * self.index.info.height


class Skipped(NamedTuple):
    """A visit that was left out: its number, its video and its clips, why, and what to do about that. Not the task, which would
    keep the batch's memory, nor the error, which leads to it."""

    number: int
    path: str
    clips: int
    why: str
    fix: str | None


def all_skipped(visits: Sequence[Skipped], left_out: int) -> DecodeError:
    """What to say of an epoch that gave no batch, since every clip was skipped.

    Args:
        left_out: how many videos ``source.filter`` left out.
    """
    ordered = sorted(visits, key=lambda visit: visit.number)
    first, paths = ordered[0], list(dict.fromkeys(visit.path for visit in ordered))
    names = ", ".join(paths[:_NAMED]) + (", …" if len(paths) > _NAMED else "")
    clips = sum(visit.clips for visit in visits)
    what = f"all {clips} clips of the epoch were skipped, of {len(paths)} files: {names}; the first: {first.why}"
    return _none_usable(what, first.fix, first.path, left_out)


def all_failed(samples: int, last: GpupipeError, path: str, left_out: int) -> DecodeError:
    """What to say when so many samples in a row could not be used; the others as of :func:`all_skipped`."""
    what = f"{samples} samples in a row could not be used; the last: {last.message}"
    return _none_usable(what, last.fix, path, left_out)


def _none_usable(what: str, fix: str | None, path: str, left_out: int) -> DecodeError:
    if left_out:
        what += f". These are of the videos that source.filter leaves: {left_out} it leaves out (see VideoLoader.left_out)"
    return DecodeError(
        what, fix=f"{fix or 'check the list of videos'}; VideoLoader.bad_files has each file's reason", path=path
    )
