"""What every place of bytes gives: an identity, and range reads."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a video from its earlier versions."""

    path: str
    """Its name: a path from the root, a URL, ``SHARD.tar::MEMBER``, or that of bytes which the program holds."""
    size_bytes: int
    mtime_ns: int
    """Time of the last change; 0 where ``tag`` tells versions apart."""
    tag: str = ""
    """A store's mark of the version (an etag), the place in a shard, or a digest; empty for local files."""

    @classmethod
    def of(cls, path: str) -> Identity:
        """Looks at the video now; at one in a remote store unless that was done a moment ago.

        Raises:
            OpenError: when it is missing, not a regular file, or may not be read.
            DeviceError: when a package that the store needs is not there, or the process may open no more files.
        """
        from gpupipe.data.bytes.place import place_of  # the places make identities

        return place_of(path).identity()

    def as_dict(self) -> dict[str, Any]:
        """Its fields, as JSON has them; without a tag that is empty, as they were stored before there were tags."""
        told = {"path": self.path, "size_bytes": self.size_bytes, "mtime_ns": self.mtime_ns}
        return told | ({"tag": self.tag} if self.tag else {})


class VideoFile(AbstractContextManager["VideoFile"], Protocol):
    """A video that is open for range reads, safe to use from several threads."""

    path: str

    def is_still(self, identity: Identity) -> bool:
        """True when what was opened is the version that ``identity`` tells of.

        Raises:
            OpenError: when it cannot be looked at any more.
        """

    @property
    def usable(self) -> bool:
        """False where the file system has let go of an open file."""

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Asks for (position, bytes) ahead of a read, without waiting for them."""

    def read(self, position: int, size_bytes: int) -> bytes:
        """``size_bytes`` bytes from ``position``, fewer where the file ends.

        Raises:
            OpenError: when they cannot be read.
        """

    def read_into(self, position: int, memory: memoryview) -> int:
        """Fills ``memory`` from ``position`` on; returns the bytes read, fewer where the file ends.

        Raises:
            OpenError: when they cannot be read.
        """

    def close(self) -> None:
        """Lets go of it; may be called again."""

    def __enter__(self) -> Self: ...
