"""One list of entries out of whatever names videos."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from gpupipe.config import PathLike, SourceConfig
from gpupipe.data.bytes import held, name
from gpupipe.data.source.columns import is_blank, reads_as_number, shown
from gpupipe.data.source.dataset import dataset_entries, is_dataset
from gpupipe.data.source.inside import check_inside
from gpupipe.data.source.patterns import expanded
from gpupipe.data.source.shards import in_shards, is_shard
from gpupipe.data.source.stores import videos_at
from gpupipe.data.source.tables import TABLES, number_in, read_table, row_entry
from gpupipe.errors import SourceError
from gpupipe.telemetry import log
from gpupipe.types import Entry


class SupportsItems(Protocol):
    """A dataset that is asked for its items by number, as ``torch.utils.data.Dataset`` is."""

    def __getitem__(self, number: int, /) -> Any: ...

    def __len__(self) -> int: ...


Videos = PathLike | Mapping[str, Any] | Iterable[Any] | SupportsItems
"""A file, folder, pattern, table (.csv, .jsonl, .parquet), shard (.tar) or URL of these; a row, that is a mapping with path and
columns; a dataset of torch or of Hugging Face; or a list of any of these, in which the bytes of a video, or a binary file that
holds them, may stand too."""

_NO_VIDEOS = (".txt", ".tsv", ".json", ".yaml", ".yml", ".xml", ".xlsx", ".npy", ".pkl")
"""Endings of files that people keep lists in."""


def collect(videos: Videos, config: SourceConfig, columns: Sequence[str] = ()) -> list[Entry]:
    """Lists the videos in a fixed order: as given, folders and globs sorted by path.

    Files inside a list or a table are not looked at here: a missing one is a bad file, met when its turn comes. Of a list's
    items those are that name no single video: folders by their slash, tables, shards.

    Args:
        columns: what is to be read of a Parquet table besides path, label and ``start_frame``; other tables are read whole.

    Raises:
        SourceError: when ``videos`` is a path that does not exist, an empty folder, a pattern without matches, an unreadable
            table, of a type that names no videos, or when a path leads out of ``config.root``.
    """
    if isinstance(videos, bytes):
        raise SourceError(f"videos={videos!r} is bytes", fix="give text: os.fsdecode(path)")
    if isinstance(videos, str | os.PathLike | Mapping) or is_dataset(videos) or held.holds_bytes(videos):
        entries = _one(videos, config, columns, must_exist=True)
    elif isinstance(videos, set | frozenset):
        raise SourceError("a set of videos has another order in each process", fix="give a list, say sorted(videos)")
    elif isinstance(videos, Iterable):
        entries = _distinct(
            replace(entry, part=part) if part else entry
            for part, found in enumerate(_each(videos, config, columns))
            for entry in found
        )
    else:
        raise SourceError(f"videos={videos!r} names no videos", fix="give a path, a folder, a glob, a table or a list of them")
    if not entries:
        raise SourceError("the list of videos is empty", fix="give at least one video")
    if config.root is not None:
        check_inside(entries, config.root, config.npy_columns)
    if config.label_from == "folder":
        return _label_by_folder(entries, config.classes)
    if config.label_from == "none":
        return [_without_label(entry) for entry in entries]
    return entries if config.label_column == "label" else _label_by_column(entries, config.label_column)


def _each(videos: Iterable[Any], config: SourceConfig, columns: Sequence[str]) -> Iterator[list[Entry]]:
    """The entries of each item of a list."""
    for are_shards, group in groupby(videos, _names_shard):
        if are_shards:
            yield from in_shards([name.plain(os.fspath(item)) for item in group], config)
        else:
            yield from (_one(item, config, columns, must_exist=False) for item in group)


def _distinct(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with a name for each video that is held: two datasets of one class call their items alike."""
    result, owners = [], dict[str, Any]()
    for entry in entries:
        if entry.held is not None and owners.setdefault(entry.path, entry.held) is not entry.held:
            entry = replace(entry, path=f"{entry.path} of item {entry.part}")
        result.append(entry)
    return result


def _names_shard(item: Any) -> bool:
    """Whether an item of a list is the name of one shard. Several of them are listed at a time."""
    if not isinstance(item, str | os.PathLike):
        return False
    path = os.fspath(item)
    if not isinstance(path, str) or not is_shard(path) or os.path.isdir(path):
        return False
    return path == glob.escape(path) and "{" not in path


def _one(item: Any, config: SourceConfig, columns: Sequence[str], *, must_exist: bool) -> list[Entry]:
    if is_dataset(item):
        return dataset_entries(item, config, columns)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | os.PathLike):  # as torchvision lists samples
        item = {config.path_column: item[0], config.label_column: item[1]}
    if isinstance(item, Mapping):
        return [row_entry(item, config, base=None, where="a row of videos")]
    if held.holds_bytes(item):
        return [row_entry({config.path_column: item}, config, base=None, where="an item of videos")]
    if not isinstance(item, str | os.PathLike):
        raise SourceError(f"{item!r} ({type(item).__name__}) names no video", fix="use paths, or mappings with a path")
    path = name.plain(os.fspath(item))
    if not path:
        raise SourceError("a path in videos is empty", fix="leave it out, or write . for the working directory")
    if name.member_of(path) is not None or path.startswith(name.HELD):
        return [Entry(path)]
    if name.scheme(path):
        urls = [url for part in expanded(path) for url in _at(part, config, must_exist=must_exist)]
        return _files(urls, config, columns)
    if os.path.isdir(path):
        return _folder(path, config)
    if os.path.isfile(path):
        if is_shard(path):
            return in_shards([path], config)[0]
        if path.lower().endswith(_NO_VIDEOS):
            raise SourceError(
                f"{path} is neither a video nor a table that gpupipe reads",
                fix=f"make it a {' or '.join(TABLES)} table with a column {config.path_column!r}, or pass a list of paths",
            )
        return read_table(path, config, columns) if path.lower().endswith(TABLES) else [Entry(path)]
    several = expanded(path)
    if several != [path] or glob.has_magic(path):
        return _files([found for part in several for found in _matches(part)], config, columns)
    if must_exist and os.path.exists(path):
        raise SourceError(f"{path} is not a regular file", fix="give a file, a folder, a glob or a table")
    if must_exist and os.path.lexists(path):
        raise SourceError(f"{path} is a link that leads nowhere, or in a circle", fix="mend it, or name the file itself")
    if must_exist or path.endswith("/") or path.lower().endswith(TABLES) or is_shard(path):
        raise SourceError(f"{path} does not exist", fix="check the path; relative ones start at the working directory")
    return [Entry(path)]


def _matches(pattern: str) -> list[str]:
    """What a pattern stands for; without one, the path itself."""
    if not glob.has_magic(pattern):
        return [pattern]
    found = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    if not found:
        raise SourceError(f"no file matches {pattern!r}", fix="check the pattern; ** descends into folders")
    return found


def _at(url: str, config: SourceConfig, *, must_exist: bool) -> list[str]:
    if url.lower().endswith(TABLES) and "*" not in url:
        return [url]
    return videos_at(url, config, must_exist=must_exist)


def _files(paths: list[str], config: SourceConfig, columns: Sequence[str] = ()) -> list[Entry]:
    """Videos, and those of shards, in the order of the paths; or, where all are tables, what these list."""
    if all(path.lower().endswith(TABLES) for path in paths):
        return [entry for path in paths for entry in read_table(path, config, columns)]
    entries: list[Entry] = []
    for are_shards, group in groupby(paths, is_shard):
        some = list(group)
        found = in_shards(some, config) if are_shards else [[Entry(path) for path in some]]
        entries += [entry for each in found for entry in each]
    return entries


def _folder(path: str, config: SourceConfig) -> list[Entry]:
    found: list[str] = []
    visited: set[str] = set()
    extensions = (*(extension.lower() for extension in config.extensions), ".tar")
    for folder, subfolders, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or not config.recursive:  # links may lead around in a circle
            subfolders.clear()
        subfolders.sort()  # so that of two ways to a folder the same is taken everywhere
        if real not in visited:
            found += [os.path.join(folder, name) for name in files if name.lower().endswith(extensions)]
        visited.add(real)
    if not found:
        raise SourceError(
            f"no videos in the folder {path} (looked for {', '.join(config.extensions)})",
            fix="check the folder, or set SourceConfig.extensions; tables in it are named by a pattern, as in folder/*.parquet",
        )
    return _files(sorted(found), config)


def class_names(entries: Sequence[Entry]) -> tuple[str, ...]:
    """The names of the folders that the videos lie in, sorted.

    Raises:
        SourceError: when a video lies in no folder that has a name.
    """
    return tuple(sorted({_class_of(entry) for entry in entries}))


def _class_of(entry: Entry) -> str:
    """The name of the folder that a video lies in: as its path has it, which may be a link's, or that of the folder itself."""
    if entry.held is not None:
        raise SourceError(f"{entry.path} is bytes and lies in no folder, as label_from='folder' needs", path=entry.path)
    part = name.member_of(entry.path)
    folder = Path(entry.path if part is None else part[1]).parent
    own = folder.name
    if own in ("", os.pardir) and part is None:
        with suppress(OSError):  # the working directory is no more
            own = os.path.basename(os.path.realpath(folder))
    if own in ("", os.pardir):
        raise SourceError(f"{entry.path} lies in no folder that has a name, as label_from='folder' needs", path=entry.path)
    return own


def label_names(entries: Sequence[Entry], config: SourceConfig) -> tuple[str, ...]:
    """The names of the classes in the order of their numbers: those of ``config``, where labels are text or numbers; without,
    those that are there, where labels are text, none of it a number; else none.

    Empty labels are no names: they are a fault of their row.
    """
    labels = [entry.columns.get("label") for entry in entries]
    if config.classes:
        return config.classes if all(isinstance(x, str | Real) and not is_blank(x) for x in labels) else ()
    if not all(isinstance(label, str) and label and not reads_as_number(label) for label in labels):
        return ()
    return tuple(sorted({str(label) for label in labels}))


def number_labels(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """The entries with the place of each label among ``names`` for the label.

    A label that is a number stands for the name that reads as this number; where no name reads as one, for its place.

    Raises:
        SourceError: for a label that is not among them.
    """
    values = {number_in(name): number for number, name in enumerate(names)}
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    numbers |= {number: number for number in range(len(names))} if values.keys() == {None} else values
    for entry in entries:
        if entry.columns["label"] not in numbers:
            raise SourceError(
                f"{entry.named} has the label {shown(entry.columns['label'])}, which source.classes does not name",
                fix="add it to classes, or leave the row out",
                path=entry.path,
            )
    return [replace(entry, columns={**entry.columns, "label": numbers[entry.columns["label"]]}) for entry in entries]


def name_labels(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """The entries with the name for each label that is a number among ``names``."""

    def named(label: Any) -> Any:
        return names[label] if isinstance(label, int) and 0 <= label < len(names) else label

    return [replace(entry, columns={**entry.columns, "label": named(entry.columns.get("label"))}) for entry in entries]


def _without_label(entry: Entry) -> Entry:
    return replace(entry, columns={name: value for name, value in entry.columns.items() if name != "label"})


def _label_by_column(entries: list[Entry], column: str) -> list[Entry]:
    """The entries with a column in the place of their label; one that is called ``label`` is left out, for a batch has one."""
    for entry in entries:
        if column not in entry.columns:
            have = ", ".join(map(str, entry.columns)) or "none"
            raise SourceError(f"{entry.named} has no column {column!r} (its columns: {have})", fix="check source.label_column")
    other = next((entry for entry in entries if "label" in entry.columns), None)
    if other is not None:
        log.info("source.label_column is %r, so the column 'label' that %s has too is left out", column, other.named)
    return [
        replace(
            entry,
            columns={"label" if name == column else name: value for name, value in entry.columns.items() if name != "label"},
        )
        for entry in entries
    ]


def _label_by_folder(entries: list[Entry], classes: tuple[str, ...]) -> list[Entry]:
    numbers = {name: number for number, name in enumerate(classes or class_names(entries))}
    for entry in entries:
        if "label" in entry.columns:
            raise SourceError(
                f"{entry.path} has a label of its own, {entry.columns['label']!r}, beside label_from='folder'",
                fix="leave one of them out",
                path=entry.path,
            )
        if _class_of(entry) not in numbers:
            raise SourceError(
                f"{entry.path} lies in a folder that source.classes does not name",
                fix="add it to classes, or leave the folder out",
                path=entry.path,
            )
    return [replace(entry, columns={"label": numbers[_class_of(entry)], **entry.columns}) for entry in entries]
