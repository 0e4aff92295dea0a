"""Shards: uncompressed tar files, whose members are read in place.

What lies where in a shard is found out once, and kept in the cache folder next to the indices of videos. Names of members are
looked up there and never become paths, so that they lead nowhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupipe.data.bytes import name, open_file
from gpupipe.data.bytes.file import Identity, VideoFile
from gpupipe.data.bytes.piece import Piece
from gpupipe.data.bytes.stream import ByteStream
from gpupipe.device import disk
from gpupipe.errors import OpenError
from gpupipe.telemetry import log

_VERSION = 1
_KEPT = 256
"""Shards whose list of members is kept in memory."""
_SIDECARS = (".json", ".txt", ".cls")
_SIDECAR_BYTES = 16 << 20
_ZIPPED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_PLAIN_TAR = "unpack it and write an uncompressed .tar: videos do not get smaller, and only that can be read in place"


@dataclass(frozen=True)
class Shard:
    """What lies in a shard.

    Attributes:
        identity: the shard as it was.
        members: (position, bytes) of each file in it, by name. Of two with one name the later one, as tar has it.
        columns: what the files beside the video say, by key: a member's folder and its name up to the first dot.
        damage: where reading it came to an end too early; empty when it is whole.
    """

    identity: Identity
    members: Mapping[str, tuple[int, int]]
    columns: Mapping[str, Mapping[str, Any]]
    damage: str = ""


_lock = threading.Lock()
_shards: OrderedDict[str, Shard] = OrderedDict()
_reading: dict[str, threading.Lock] = {}


def _after_fork() -> None:
    """In a forked child no thread is left that would give back a lock which the fork found taken."""
    global _lock
    _lock = threading.Lock()
    _reading.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(path: str) -> Shard:
    """What lies in a shard: from memory, from the cache folder, or found out now (and kept in both).

    Raises:
        OpenError: when it cannot be read, is no tar file, is compressed, or a file beside a video cannot be understood.
    """
    now = Identity.of(path)
    shard = _remembered(now)
    if shard is not None:
        return shard
    with _lock:
        reading = _reading.setdefault(now.path, threading.Lock())
    try:
        with reading:
            shard = _remembered(now) or _stored(now)
            if shard is None:
                shard = _scan(now)
                disk.write(_file_of(now), _as_json(shard))
    finally:
        with _lock:
            _reading.pop(now.path, None)
    with _lock:
        _shards[now.path] = shard
        while len(_shards) > _KEPT:
            _shards.popitem(last=False)
    return shard


def key_of(member: str) -> str:
    """What a member shares with those that belong to it: its folder, and its name up to the first dot."""
    folder, base = os.path.split(member)
    return os.path.join(folder, base.split(".", 1)[0])


def place(path: str) -> tuple[int, int]:
    """(position in the shard, bytes) of a member.

    Raises:
        OpenError: when the shard cannot be read or has no such member.
    """
    return _find(path)[1]


def identity(path: str) -> Identity:
    """The identity of a member. Raises as :func:`place`."""
    shard, (begin, size) = _find(path)
    whole = shard.identity
    tag = " ".join(filter(None, [f"{begin} in {whole.size_bytes}", whole.tag]))
    return Identity(f"{whole.path}::{_split(path)[1]}", size, whole.mtime_ns, tag)


def open_member(path: str) -> VideoFile:
    """Opens a member, in the shard. Raises as :func:`place`."""
    shard, (begin, _) = _find(path)
    own = identity(path)
    return Piece(open_file(shard.identity.path), shard.identity, own, begin)


def _split(path: str) -> tuple[str, str]:
    parts = name.member_of(path)
    assert parts is not None, "who calls has looked"
    return parts


def _find(path: str) -> tuple[Shard, tuple[int, int]]:
    whole, member = _split(path)
    shard = load(whole)
    found = shard.members.get(member)
    if found is None:
        raise OpenError(f"{whole} has no member {member!r}", fix="was the shard written anew? List it again", path=path)
    return shard, found


def _remembered(now: Identity) -> Shard | None:
    with _lock:
        shard = _shards.get(now.path)
        if shard is None or shard.identity != now:
            return None
        _shards.move_to_end(now.path)
        return shard


def _file_of(whole: Identity) -> Path:
    digest = hashlib.sha256(whole.path.encode("utf-8", "surrogateescape")).hexdigest()
    return disk.cache_dir() / disk.SHARDS / digest[:2] / f"{digest[2:34]}.json"


def _as_json(shard: Shard) -> bytes:
    told = {"version": _VERSION, "identity": shard.identity.as_dict(), "damage": shard.damage}
    return json.dumps(told | {"members": shard.members, "columns": shard.columns}).encode()


def _stored(whole: Identity) -> Shard | None:
    """What the cache folder holds for this very shard; None when that is nothing, outdated or damaged."""
    try:
        told = json.loads(_file_of(whole).read_bytes())
        if told["version"] != _VERSION or Identity(**told["identity"]) != whole:
            return None
        members = {member: (int(begin), int(size)) for member, (begin, size) in told["members"].items()}
        return Shard(whole, members, dict(told["columns"]), str(told["damage"]))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the cached list of %s is damaged and is made again: %s", whole.path, error)
        return None


def _scan(whole: Identity) -> Shard:
    path = whole.path
    members: dict[str, tuple[int, int]] = {}
    with ByteStream(open_file(path), whole.size_bytes) as stream:
        _refuse_zipped(path, stream.read(8))
        stream.seek(0)
        damage = ""
        try:
            with tarfile.open(fileobj=stream, mode="r:", errors="surrogateescape") as tar:
                try:
                    for member in tar:
                        if member.isreg() and not member.issparse():  # links lead elsewhere
                            members[member.name] = (member.offset_data, member.size)
                except (tarfile.TarError, ValueError) as error:
                    damage = f"{error} at byte {tar.offset}"
                stream.seek(tar.offset)
                if not damage and stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # where tarfile ends without a word
                    damage = f"no header at byte {tar.offset}"
        except tarfile.TarError as error:
            raise OpenError(
                f"{path} is no tar file: {error}", fix="is it whole, and an uncompressed .tar?", path=path
            ) from error
        cut = [inside for inside, (begin, size) in members.items() if begin + size > whole.size_bytes]
        for inside in cut:
            del members[inside]
        damage = damage or (f"it ends inside {cut[0]!r}" if cut else "")
        columns = _columns(path, members, stream)
    if Identity.of(path) != whole:
        raise OpenError(f"{path} changed while it was listed", fix="wait until it is written", path=path)
    return Shard(whole, members, columns, damage)


def _refuse_zipped(path: str, head: bytes) -> None:
    kind = next((kind for begin, kind in _ZIPPED.items() if head.startswith(begin)), None)
    if kind is not None:
        raise OpenError(f"{path} is compressed ({kind}), and a shard is read in place", fix=_PLAIN_TAR, path=path)


def _columns(path: str, members: Mapping[str, tuple[int, int]], stream: ByteStream) -> dict[str, dict[str, Any]]:
    columns: dict[str, dict[str, Any]] = {}
    for member, (begin, size) in sorted(members.items(), key=lambda item: item[1]):
        key = key_of(member)
        ending = member[len(key) :].lower()
        if ending not in _SIDECARS:
            continue
        if size > _SIDECAR_BYTES:
            raise _bad(path, member, f"has {size} bytes")
        stream.seek(begin)
        row = columns.setdefault(key, {})
        for column, value in _values(path, member, ending, stream.read(size)).items():
            if column in row:
                raise _bad(path, member, f"gives {column!r}, which another file of the same key has given")
            row[column] = value
    return columns


def _values(path: str, member: str, ending: str, data: bytes) -> Mapping[str, Any]:
    try:
        text = data.decode("utf-8")
        if ending == ".txt":
            return {"txt": text.removesuffix("\n").removesuffix("\r")}
        if ending == ".cls":
            text = text.strip()
            return {"label": int(text) if text.removeprefix("-").isdecimal() else text}
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, member, f"cannot be read: {error}") from error
    return value if isinstance(value, dict) else {"json": value}


def _bad(path: str, member: str, what: str) -> OpenError:
    return OpenError(f"{path}::{member} {what}", fix="mend it, or leave it out of the shard", path=f"{path}::{member}")
