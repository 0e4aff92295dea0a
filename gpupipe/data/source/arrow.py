"""Arrow's columns as rows: Parquet tables, of which only the columns asked for are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from gpupipe.data.bytes import open_stream
from gpupipe.data.source.columns import like_label
from gpupipe.device.inventory import load
from gpupipe.errors import SourceError
from gpupipe.telemetry import log

PARQUET = (".parquet", ".pq")
_ROWS, _ROWS_OF_BYTES = 65_536, 8
"""Rows that are read at a time: of paths, and of what may be videos in memory."""
_LARGE_BYTES = 256 << 20
"""Of a row group of videos, from which on its size is worth a word."""


def parquet_rows(
    path: str, needed: Sequence[str], further: Sequence[str]
) -> Iterator[tuple[dict[str, Any], Callable[[], Any] | None]]:
    """The rows of a Parquet table, with some of its columns; the others are not read from the disk. With each row, where its
    first column may hold bytes, what reads that place again.

    Args:
        needed: columns that the table must have, the path's first.
        further: columns that are read where it has them.

    Raises:
        SourceError: when the file is no such table, or lacks a column.
        OpenError: when it lies in a store that cannot be read.
        DeviceError: when pyarrow is not installed.
    """
    with _opened(path) as file:
        names = chosen(path, file.schema_arrow.names, needed, further)
        if not _may_be_bytes(file.schema_arrow.field(names[0]).type):
            for batch in file.iter_batches(_ROWS, columns=names):
                yield from ((row, None) for row in batch_rows(batch, names))
            return
        for group in range(file.num_row_groups):
            _tell_of_large(path, file, group)
            place = 0
            for batch in file.iter_batches(_ROWS_OF_BYTES, row_groups=[group], columns=names):
                for row in batch_rows(batch, names):
                    yield row, partial(_value, path, names[0], group, place)
                    place += 1


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """A Parquet file, wherever it lies."""
    parquet, arrow = load("pyarrow.parquet"), load("pyarrow")
    try:
        with open_stream(path) as stream, parquet.ParquetFile(stream) as file:
            yield file
    except (OSError, UnicodeDecodeError, arrow.lib.ArrowException) as error:
        raise SourceError(f"cannot read the table {path}: {error}", fix="give a Parquet file, written to its end") from error


def _tell_of_large(path: str, file: Any, group: int) -> None:
    """A video is read again from the begin of its row group on."""
    size, rows = file.metadata.row_group(group).total_byte_size, file.metadata.row_group(group).num_rows
    if group == 0 and rows > 1 and size > _LARGE_BYTES:
        log.warning(
            "%s has %d videos in a row group, %d MiB: each visit to one reads up to it. Write groups of few rows, or files",
            path,
            rows,
            size >> 20,
        )


def _value(path: str, column: str, group: int, place: int) -> Any:
    """What stands in one place of a table.

    Raises:
        As :func:`parquet_rows`, or IndexError when there is no such row any more.
    """
    with _opened(path) as file:
        for batch in file.iter_batches(_ROWS_OF_BYTES, row_groups=[group], columns=[column]):
            if place < batch.num_rows:
                return next(batch_rows(batch.slice(place, 1), [column]))[column]
            place -= batch.num_rows
    raise IndexError(f"{path} has no such row any more")


def _may_be_bytes(kind: Any) -> bool:
    """Whether a column of this type may hold videos and not their paths."""
    types = load("pyarrow").types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_struct(kind))


def chosen(where: str, present: Sequence[str], needed: Sequence[str], further: Sequence[str]) -> list[str]:
    """The columns to read, each once; among them one that may be ``label`` misspelt, where there is no ``label``.

    Raises:
        SourceError: when a needed one is not there, or there twice.
    """
    for name in needed:
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SourceError(
                f"{where} names no column {name!r}; its columns are {', '.join(present) or 'none'}{hint}",
                fix="name the column of paths with source.path_column" if name == needed[0] else "do not ask for it",
            )
    meant = like_label(present)
    if meant is not None and present.count(meant) == 1:
        further = (*further, meant)  # read, so that the loader can tell which column it is
    names = [*dict.fromkeys(needed), *(name for name in dict.fromkeys(further) if name in present and name not in needed)]
    twice = next((name for name in names if present.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"{where} has two columns {twice!r}", fix="name each column once")
    return names


def batch_rows(batch: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a ``pyarrow.RecordBatch``: Python's values, and NumPy arrays for lists of numbers."""
    columns = [_values(batch.column(name)) for name in names]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _values(array: Any) -> list[Any]:
    """One value a row, None for a null."""
    types = load("pyarrow").types
    kind = array.type
    if isinstance(array, load("pyarrow").ExtensionArray):
        return _values(array.storage)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
            numbers = array.flatten()  # of rows that are not null
            if not numbers.null_count:
                return _cut(numbers.to_numpy(zero_copy_only=False), array)
    values: list[Any] = array.to_pylist()
    return values


def _cut(numbers: np.ndarray, array: Any) -> list[np.ndarray | None]:
    """Views of one block of numbers, as long as each row's list: a list of Python's numbers takes eight times the memory."""
    lengths = load("pyarrow.compute").list_value_length(array).to_pylist()
    rows: list[np.ndarray | None] = []
    at = 0
    for length in lengths:
        rows.append(None if length is None else numbers[at : at + length])
        at += length or 0
    return rows
