"""Lists of videos with columns: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from typing import IO, Any

from gpupipe.data.bytes import ByteStream, held, open_file
from gpupipe.data.bytes.name import join, scheme
from gpupipe.errors import OpenError, SourceError
from gpupipe.types import Entry

TABLES = (".csv", ".jsonl", ".ndjson")


def read_table(path: str, path_column: str) -> list[Entry]:
    """Reads a table with a header (CSV) or one JSON object a line; a CSV column of nothing but numbers becomes numbers.

    Raises:
        SourceError: naming the file and the line that is wrong.
    """
    base = os.path.dirname(path)
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        with _opened(path) as file:
            if path.lower().endswith(".csv"):
                rows = _csv_rows(csv.DictReader(file), path, path_column)
            else:
                rows = [(n, _parse(line, path, n)) for n, line in enumerate(file, 1) if line.strip()]
    except OpenError as error:
        raise SourceError(f"cannot read the table {path}: {error.message}", fix=error.fix) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"cannot read the table {path}: {error}", fix="give a UTF-8 table") from error
    if not rows:
        raise SourceError(f"the table {path} has no rows", fix=f"give a header with {path_column!r} and one row a video")
    return [row_entry(row, path_column, base, f"{path} line {number}") for number, row in rows]


def _opened(path: str) -> IO[str]:
    if not scheme(path):
        return open(path, encoding="utf-8-sig", newline="")
    return io.TextIOWrapper(io.BufferedReader(ByteStream(open_file(path))), encoding="utf-8-sig", newline="")


def _csv_rows(reader: csv.DictReader[str], path: str, path_column: str) -> list[tuple[int, dict[str, Any]]]:
    names = [name.strip() for name in reader.fieldnames or ()]  # "path, label"
    twice = {name for name in names if name and names.count(name) > 1}
    if twice:
        raise SourceError(f"{path} has two columns {min(twice)!r}", fix="name each column once")
    if path_column not in names:
        raise SourceError(
            f"the first line of {path} names no column {path_column!r}; its columns are {', '.join(names) or 'none'}",
            fix="begin with a header, as in path,label (a list of lines like 'video.mp4 3' has none, and needs commas), or "
            "name the column of paths with source.path_column",
        )
    reader.fieldnames = names
    rows: list[tuple[int, dict[str, Any]]] = []
    for row in reader:
        if None in row or None in row.values():  # how DictReader tells of cells too many, and too few
            raise SourceError(
                f"{path} line {reader.line_num} has not as many cells as the header", fix="quote cells that hold commas"
            )
        rows.append((reader.line_num, dict(row)))
    for name in names:
        numbers = [_number(row[name]) for _, row in rows] if name != path_column else [None]
        if None not in numbers:  # a column as a whole: "007" next to "a7" is a name, not a seven
            for (_, row), number in zip(rows, numbers, strict=True):
                row[name] = number
    return rows


def row_entry(row: Mapping[str, Any], path_column: str, base: str | None, where: str) -> Entry:
    """The entry of one row; its path is taken relative to ``base``, the folder of its table, where there is one.

    Raises:
        SourceError: when the row has no path.
    """
    path = row.get(path_column)
    columns = {k: v for k, v in row.items() if k != path_column}
    if held.holds_bytes(path):
        return held_entry(path, columns)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SourceError(
            f"{where} has no {path_column!r}; its columns are {', '.join(map(str, row)) or 'none'}",
            fix="name the column of paths with SourceConfig.path_column",
        )
    return Entry(join(base or "", os.fspath(path)), columns, where if base is not None else "")


def held_entry(video: Any, columns: Mapping[str, Any]) -> Entry:
    """The entry of a video whose bytes are there, or in a binary file.

    Raises:
        SourceError: when the file cannot be read.
    """
    try:
        kept = held.hold(video)
    except OpenError as error:
        raise SourceError(error.message, fix=error.fix) from error
    return Entry(kept.name, columns, held=kept)


def _parse(line: str, path: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of thousands of digits
        raise SourceError(f"{path} line {number} is not JSON: {error}", fix="write one JSON object a line") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} line {number} is not a JSON object", fix="write one JSON object a line")
    return value


def _number(cell: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(cell) if "_" not in cell else None  # Python reads 2024_01 as a number; tables do not
        except ValueError:
            continue
    return None
