"""Which place a video's name leads to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from gpupipe.data.bytes import name
from gpupipe.data.bytes.file import Identity, VideoFile


class Place(NamedTuple):
    """A video in its place."""

    path: str
    """Its name, as the place takes it."""
    identity_of: Callable[[str], Identity]
    open_at: Callable[[str], VideoFile]

    def identity(self) -> Identity:
        """Looks at the video now."""
        return self.identity_of(self.path)

    def open(self) -> VideoFile:
        """Opens it for range reads."""
        return self.open_at(self.path)


@functools.lru_cache(maxsize=4096)  # asked several times for each clip
def place_of(path: str) -> Place:
    """The place of a video by its name. A shard lies in a place too, so places are imported here."""
    if path.startswith(name.HELD):
        from gpupipe.data.bytes import held

        return Place(path, held.identity, held.open_held)
    path = name.plain(path)
    if name.member_of(path) is not None:
        from gpupipe.data.bytes import shard

        return Place(path, shard.identity, shard.open_member)
    if name.scheme(path):
        from gpupipe.data.bytes import remote

        return Place(path, remote.identity, remote.RemoteFile)
    from gpupipe.data.bytes import local

    return Place(path, local.identity, local.LocalFile)
