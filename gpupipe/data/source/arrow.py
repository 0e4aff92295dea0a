"""Arrow's columns as rows: Parquet tables, of which only the columns asked for are read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpupipe.device.inventory import load
from gpupipe.errors import SourceError

PARQUET = (".parquet", ".pq")
_ROWS, _ROWS_OF_BYTES = 65_536, 8
"""Rows that are read at a time: of paths, and of what may be videos in memory."""


def parquet_rows(path: str, needed: Sequence[str], further: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet table, with some of its columns; the others are not read from the disk.

    Args:
        needed: columns that the table must have, the path's first.
        further: columns that are read where it has them.

    Raises:
        SourceError: when the file is no such table, or lacks a column.
        DeviceError: when pyarrow is not installed.
    """
    parquet, arrow = load("pyarrow.parquet"), load("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            names = chosen(path, file.schema_arrow.names, needed, further)
            rows = _ROWS_OF_BYTES if _may_be_bytes(file.schema_arrow.field(names[0]).type) else _ROWS
            for batch in file.iter_batches(rows, columns=names):
                yield from batch_rows(batch, names)
    except (OSError, UnicodeDecodeError, arrow.lib.ArrowException) as error:
        raise SourceError(f"cannot read the table {path}: {error}", fix="give a Parquet file, written to its end") from error


def _may_be_bytes(kind: Any) -> bool:
    """Whether a column of this type may hold videos and not their paths."""
    types = load("pyarrow").types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_struct(kind))


def chosen(where: str, present: Sequence[str], needed: Sequence[str], further: Sequence[str]) -> list[str]:
    """The columns to read, each once.

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
