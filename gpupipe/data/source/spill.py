"""Videos that are only bytes in memory, written to files for as long as a loader lives."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from gpupipe.errors import SourceError


class Spill:
    """A temporary folder for such videos, made when the first one comes, and removed by :meth:`close`, with the last reference
    or at the end of the process, whichever is first.

    Args:
        limit_bytes: of all videos together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._count = 0
        self._folder = ""
        self._remove: weakref.finalize[[str, int], Spill] | None = None

    def keep(self, data: bytes, name: str, where: str) -> str:
        """Writes a video.

        Args:
            name: what it is called where it comes from; only its ending is used.
            where: for errors.

        Returns:
            The path of its file.

        Raises:
            SourceError: when there is no room.
        """
        self._used += len(data)
        if self._used > self._limit:
            raise SourceError(
                f"up to {where} the bytes of videos come to {self._used} bytes, source.spill_gib allows {self._limit}",
                fix="write the videos to files once and name these, or raise source.spill_gib",
            )
        try:
            if self._remove is None:
                self._folder = tempfile.mkdtemp(prefix="gpupipe-videos-")
                self._remove = weakref.finalize(self, _remove, self._folder, os.getpid())
            ending = os.path.splitext(name)[1]
            path = os.path.join(self._folder, f"{self._count}{ending if ending[1:].isalnum() else ''}")
            self._count += 1
            with open(path, "xb") as file:
                file.write(data)
        except OSError as error:
            raise SourceError(
                f"the bytes of {where} cannot be written to a file: {error}", fix="set TMPDIR to a folder with room"
            ) from error
        return path

    def close(self) -> None:
        """Removes the files; may be called again."""
        if self._remove is not None:
            self._remove()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child the files are its parent's
        shutil.rmtree(folder, ignore_errors=True)
