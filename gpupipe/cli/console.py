"""What the commands share: results on stdout, progress on stderr, plain text where nobody watches a terminal."""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from gpupipe.errors import GpupipeError, SourceError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_INTERVAL_SECONDS = 10.0
"""Between two lines of progress where stderr is not a terminal."""


def say(text: str = "") -> None:
    """One line of the result, on stdout."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # a file's name that the terminal's encoding does not have
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; a stream that was closed before Python began is None."""
    return stream is not None and stream.isatty()


def tell(text: str) -> None:
    """One line about the work, on stderr."""
    print(text, file=sys.stderr, flush=True)


def to_json(value: Any) -> str:
    """The value as JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, default=str)


def emit_json(value: Any) -> None:
    """The result as JSON on stdout."""
    say(to_json(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def say_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Aligned ``name  value`` lines on stdout; a value of None shows as a dash."""
    rows = [(name, "-" if value is None else str(value)) for name, value in facts]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        lines = value.splitlines() or [""]
        say(f"{name:<{width}}  {lines[0]}")
        for line in lines[1:]:
            say(f"{'':<{width}}  {line}")


def say_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns on stdout, two spaces between them."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    for row in [list(head), *cells]:
        say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def existing(videos: Sequence[str]) -> list[str]:
    """The videos named on a command line, each of which must be there.

    In a list a loader takes a missing file for a bad one and goes on; a person who mistyped a name wants to be told.

    Raises:
        SourceError: for the first that is no file, folder or pattern.
    """
    for video in videos:
        if not os.path.exists(video) and not glob.has_magic(video) and not any(sign in video for sign in ("://", "::", "{")):
            raise SourceError(f"{video} does not exist", fix="check the path; relative ones start at the working directory")
    return list(videos)


def check_writable(option: str, file: Path) -> None:
    """Looks whether a result can be written to ``file``, before the work that makes it.

    Raises:
        GpupipeError: when it is a folder, or lies where nothing can be written.
    """
    if file.is_dir():
        raise GpupipeError(f"{option} {file} is a folder", fix="name a file in it")
    place = next(parent for parent in (file, *file.absolute().parents) if parent.exists())
    if (place != file and not place.is_dir()) or not os.access(place, os.W_OK):
        raise GpupipeError(f"{option} {file} cannot be written: see {place}", fix="name a file in a folder of yours")


def size_text(count: float | None) -> str | None:
    """Bytes as MiB or GiB; None stays None."""
    if count is None:
        return None
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


class Progress:
    """A progress bar on stderr; where that is no terminal, a line at both ends and every ten seconds in between.

    Args:
        title: what is being done.
        total: steps in all; None when the end is not known.
    """

    def __init__(self, title: str, total: float | None) -> None:
        self._title = title
        self._total = total
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=8), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), TimeElapsedColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, text="")
        else:
            tell(f"{self._title} ...")
        return self

    def update(self, done: float, text: str = "", total: float | None = None) -> None:
        """Shows that ``done`` steps are done; ``total`` corrects the number of steps in all."""
        self._total = self._total if total is None else total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self._total, text=text)
            return
        of = f"/{self._total:g}" if self._total is not None else ""
        self._last = f"{self._title} {done:g}{of}{'  ' if text else ''}{text}"
        if time.monotonic() - self._told >= PLAIN_INTERVAL_SECONDS:
            self._told = time.monotonic()
            tell(self._last)
            self._last = ""

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last:
            tell(self._last)
