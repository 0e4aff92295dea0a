"""Columns that travel with a clip: which are numbers, which are text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpupipe.errors import SourceError
from gpupipe.types import Entry

Kind = Literal["int", "float", "text"]


def column_kinds(entries: list[Entry], names: Iterable[str]) -> dict[str, Kind]:
    """The kind of each column asked for, and of ``label`` where any row has one.

    Raises:
        SourceError: when a row lacks a column, or a label is not a number.
    """
    wanted = list(dict.fromkeys(names))
    if "label" not in wanted and any("label" in entry.columns for entry in entries):
        wanted.insert(0, "label")
    kinds = {name: _kind(entries, name) for name in wanted}
    if kinds.get("label") == "text":
        raise SourceError("column 'label' is text", fix="number the classes, or ask for the text under another column name")
    return kinds


def _kind(entries: list[Entry], name: str) -> Kind:
    kind: Kind = "int"
    for entry in entries:
        if name not in entry.columns:
            have = ", ".join(map(str, entry.columns)) or "none"
            raise SourceError(
                f"{entry.path} has no column {name!r} (its columns: {have})", fix="fill it in, or do not ask for it"
            )
        value = entry.columns[name]
        if isinstance(value, bool | int):
            continue
        if isinstance(value, float):
            kind = "float"
        else:
            return "text"
    return kind
