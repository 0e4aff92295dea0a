"""Lists of videos with columns: CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpupipe.config import SourceConfig
from gpupipe.data.bytes import held, open_stream
from gpupipe.data.bytes.name import join
from gpupipe.data.source.arrow import PARQUET, parquet_rows
from gpupipe.data.source.columns import START_COLUMN
from gpupipe.errors import OpenError, SourceError
from gpupipe.types import Entry

TABLES = (".csv", ".jsonl", ".ndjson", *PARQUET)


def read_table(path: str, config: SourceConfig, columns: Sequence[str] = ()) -> list[Entry]:
    """Reads a table with a header (CSV), one JSON object a line, or a Parquet file; it may lie in a store far away.

    A CSV column of nothing but numbers becomes numbers; an empty cell among them is a missing one, None. Of CSV and JSON lines
    all columns are kept; of Parquet only the path, the label, ``start_frame`` and ``columns`` are read.

    Raises:
        SourceError: naming the file and the line that is wrong.
        DeviceError: for a Parquet file when pyarrow is not installed, or when a package that the store needs is not there.
    """
    try:
        entries = list(_rows(path, config, columns))
    except OpenError as error:
        raise SourceError(f"cannot read the table {path}: {error.message}", fix=error.fix) from error
    if not entries:
        raise SourceError(f"the table {path} has no rows", fix=f"give a header with {config.path_column!r} and one row a video")
    return entries


def _rows(path: str, config: SourceConfig, columns: Sequence[str]) -> Iterator[Entry]:
    base = os.path.dirname(path)
    if path.lower().endswith(PARQUET):
        needed = (config.path_column, *columns, *config.npy_columns)
        found = parquet_rows(path, needed, (config.label_column, "label", START_COLUMN))
        for number, (row, again) in enumerate(found):
            yield row_entry(row, config, base, f"{path} row {number}", again)
        return
    for number, row in _lines(path, config):
        yield row_entry(row, config, base, f"{path} line {number}")


def _lines(path: str, config: SourceConfig) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a text table with the numbers of their lines."""
    try:
        with io.TextIOWrapper(open_stream(path), encoding="utf-8-sig", newline="") as file:
            if path.lower().endswith(".csv"):
                return _csv_rows(file, path, config)
            return [(n, _parse(line, path, n)) for n, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"cannot read the table {path}: {error}", fix="give a UTF-8 table") from error


def _csv_rows(file: Iterable[str], path: str, config: SourceConfig) -> list[tuple[int, dict[str, Any]]]:
    names, spaced, lines = _header(file)
    twice = {name for name in names if name and names.count(name) > 1}
    if twice:
        raise SourceError(f"{path} has two columns {min(twice)!r}", fix="name each column once")
    if config.path_column not in names:
        raise SourceError(
            f"the first line of {path} names no column {config.path_column!r}; its columns are {', '.join(names) or 'none'}",
            fix="begin with a header, as in path,label (a list of lines like 'video.mp4 3' has none, and needs commas), or "
            "name the column of paths with source.path_column",
        )
    stripped = {config.path_column, config.label_column, *config.npy_columns}.intersection(names)
    reader = csv.DictReader(file, names, strict=True, skipinitialspace=spaced)
    rows: list[tuple[int, dict[str, Any]]] = []
    for row in reader:
        line = lines + reader.line_num
        if None in row or None in row.values():  # how DictReader tells of cells too many, and too few
            raise SourceError(f"{path} line {line} has not as many cells as the header", fix="quote cells that hold commas")
        rows.append((line, {**row, **{name: row[name].strip() for name in stripped}}))
    for name in names:
        filled = [(row, number_in(row[name])) for _, row in rows if row[name].strip()] if name != config.path_column else []
        if filled and all(number is not None for _, number in filled):  # as a whole: "007" next to "a7" is no seven
            for _, row in rows:
                row[name] = None  # an empty cell among numbers is one that is missing, and no text
            for row, number in filled:
                row[name] = number
    return rows


def _header(file: Iterable[str]) -> tuple[list[str], bool, int]:
    """(names of the columns, whether there are blanks behind the commas, lines) of a CSV file's header."""
    lines: list[str] = []

    def read() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    names = next(csv.reader(read(), strict=True), [])
    spaced = any(name.startswith(" ") for name in names[1:])
    if spaced:  # then quotes stand behind the blanks
        names = next(csv.reader(lines, strict=True, skipinitialspace=True))
    return [name.strip() for name in names], spaced, len(lines)


def row_entry(
    row: Mapping[str, Any], config: SourceConfig, base: str | None, where: str, again: Callable[[], Any] | None = None
) -> Entry:
    """The entry of one row; its paths are taken relative to ``base``, the folder of its table, where there is one.

    In the path's place there may also be bytes, a binary file, or a mapping of ``bytes`` and ``path`` as Hugging Face's
    datasets have it. In a table or a dataset such a video is called as its row is.

    Args:
        again: gives what stands in the path's place once more, so that the bytes need not be kept.

    Raises:
        SourceError: when the row has no path, or a file that cannot be read.
    """
    path_column = config.path_column
    path = row.get(path_column)
    columns = {k: v for k, v in row.items() if k != path_column}
    for column in config.npy_columns:
        if base and isinstance(columns.get(column), str) and columns[column]:
            columns[column] = join(base, columns[column])
    data, inner = _video_in(path)
    if data is not None:
        label = f"{where}: {inner}" if inner else where
        try:
            if base is None or isinstance(data, held.Held):
                kept = held.hold(data)
            else:
                kept = held.hold(data if again is None else partial(_once_more, again), label, like=data)
        except OpenError as error:
            raise SourceError(error.message, fix=error.fix) from error
        return Entry(kept.label, columns, held=kept)
    path = inner or path
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        instead = "" if row.get(path_column) in (None, "") else f", but a {type(path).__name__} in its place"
        raise SourceError(
            f"{where} has no {path_column!r}{instead}; its columns are {', '.join(map(str, row)) or 'none'}",
            fix="name the column of paths with SourceConfig.path_column"
            if base is not None or not all(isinstance(value, int | float) for value in row.values())
            else "for a mixture give a list of its sources, and source={'weights': [0.7, 0.3]}",
        )
    return Entry(join(base or "", os.fspath(path)), columns, where if base is not None else "")


def _video_in(value: Any) -> tuple[Any, str]:
    """(a video's bytes or what holds them, its path or name) in the place of a path."""
    if isinstance(value, str):
        return None, ""
    if isinstance(value, Mapping):
        data, name = value.get("bytes"), value.get("path")
        return (data if held.holds_bytes(data) and data else None), (name if isinstance(name, str) else "")
    return (value if held.holds_bytes(value) and value else None), ""


def _once_more(again: Callable[[], Any]) -> Any:
    value = again()
    data, _ = _video_in(value)
    if data is None:
        raise SourceError(f"there is a {type(value).__name__} in the place of its bytes")
    return data


def _parse(line: str, path: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or a number of thousands of digits
        raise SourceError(f"{path} line {number} is not JSON: {error}", fix="write one JSON object a line") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} line {number} is not a JSON object", fix="write one JSON object a line")
    return value


def number_in(cell: str) -> int | float | None:
    """The number that a cell holds; None for text, and for a whole number of thousands of digits, which no type has."""
    if "_" in cell:  # Python reads 2024_01 as a number; tables do not
        return None
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return None if cell.strip().lstrip("+-").isdecimal() else float(cell)
    except ValueError:
        return None
