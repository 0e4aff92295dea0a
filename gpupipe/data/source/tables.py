"""Lists of videos with columns: CSV and JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpupipe.errors import SourceError
from gpupipe.types import Entry

TABLES = (".csv", ".jsonl", ".ndjson")


def read_table(path: str, path_column: str) -> list[Entry]:
    """Reads a table with a header (CSV) or one JSON object a line; cells that are numbers become numbers.

    Raises:
        SourceError: naming the file and the line that is wrong.
    """
    base = Path(path).parent
    entries = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.lower().endswith(".csv"):
                rows = csv.DictReader(file)
                for row in rows:
                    cells = {name: _number(cell) if name != path_column else cell for name, cell in row.items() if name}
                    entries.append(row_entry(cells, path_column, base, f"{path} line {rows.line_num}"))
            else:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        entries.append(row_entry(_parse(line, path, number), path_column, base, f"{path} line {number}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"cannot read the table {path}: {error}", fix="give a UTF-8 table") from error
    if not entries:
        raise SourceError(f"the table {path} has no rows", fix=f"give a header with {path_column!r} and one row a video")
    return entries


def row_entry(row: Mapping[str, Any], path_column: str, base: Path, where: str) -> Entry:
    """The entry of one row; its path is taken relative to ``base``.

    Raises:
        SourceError: when the row has no path.
    """
    path = row.get(path_column)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SourceError(
            f"{where} has no {path_column!r}; its columns are {', '.join(map(str, row)) or 'none'}",
            fix="name the column of paths with SourceConfig.path_column",
        )
    return Entry(os.path.join(base, os.fspath(path)), {k: v for k, v in row.items() if k != path_column})


def _parse(line: str, path: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise SourceError(f"{path} line {number} is not JSON: {error}", fix="write one JSON object a line") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} line {number} is not a JSON object", fix="write one JSON object a line")
    return value


def _number(cell: str | None) -> Any:
    for kind in (int, float):
        try:
            return kind(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return cell
