"""A piece of an open file that is a video of its own: a member of a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from gpupipe.data.bytes.file import Identity, VideoFile
from gpupipe.errors import OpenError


class Piece:
    """``size_bytes`` bytes from ``begin`` on of a file that it closes. Reads end where the piece does.

    Args:
        whole: the version of that file in which the piece lies there.
        own: the piece's own identity.
    """

    def __init__(self, file: VideoFile, whole: Identity, own: Identity, begin: int) -> None:
        self.path = own.path
        self._file = file
        self._whole = whole
        self._own = own
        self._begin = begin

    def is_still(self, identity: Identity) -> bool:
        with self._named():
            return identity == self._own and self._file.is_still(self._whole)

    @property
    def usable(self) -> bool:
        return self._file.usable

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._file.will_need((self._begin + position, self._within(position, size)) for position, size in ranges)

    def read(self, position: int, size_bytes: int) -> bytes:
        with self._named():
            return self._file.read(self._begin + position, self._within(position, size_bytes))

    def read_into(self, position: int, memory: memoryview) -> int:
        with self._named():
            return self._file.read_into(self._begin + position, memory[: self._within(position, len(memory))])

    def _within(self, position: int, size_bytes: int) -> int:
        return max(0, min(size_bytes, self._own.size_bytes - position))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Around reads of the file: what goes wrong there is told under the piece's own name."""
        try:
            yield
        except OpenError as error:
            raise OpenError(f"{self.path} cannot be read: {error.message}", fix=error.fix, path=self.path) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
