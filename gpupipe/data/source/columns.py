"""Columns that travel with a clip: which are numbers, which are arrays, which are text."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from gpupipe.data.source.arrays import ArrayFile, Arrays, arrays_of, files_of, is_list
from gpupipe.errors import SourceError
from gpupipe.telemetry import log
from gpupipe.types import BATCH_TENSORS, Entry

Kind = Literal["int", "float", "text"] | Arrays

START_COLUMN = "start_frame"
_SHOWN = 60
"""Signs of a value that an error shows, at most."""


def column_kinds(entries: list[Entry], names: Iterable[str], files: Iterable[str] = ()) -> dict[str, Kind]:
    """The kind of each column asked for, and of ``label`` where any row has one.

    Args:
        files: columns that hold paths of .npy files; asked for by being named here.

    Raises:
        SourceError: when a row lacks a column, a label is not a number, arrays differ in shape, or a name is one of the
            batch's own tensors.
    """
    names, files = tuple(names), tuple(files)
    wanted = list(dict.fromkeys(names + files))
    taken = [name for name in wanted if name in BATCH_TENSORS]
    if taken:
        raise SourceError(f"column {taken[0]!r} has the name of a tensor of the batch", fix="name the column differently")
    if "label" not in wanted and any("label" in entry.columns for entry in entries):
        wanted.insert(0, "label")
    files += tuple(name for name in wanted if any(isinstance(entry.columns.get(name), ArrayFile) for entry in entries))
    kinds = {name: files_of(entries, name) if name in files else _kind(entries, name, asked=name in names) for name in wanted}
    if kinds.get("label") == "text":
        blank = next((entry for entry in entries if is_blank(entry.columns["label"])), None)
        odd = blank or next((entry for entry in entries if not _is_usable(entry.columns["label"])), entries[0])
        raise SourceError(
            f"labels are numbers of at most 64 bits, or all of them names: {odd.named} has {shown(odd.columns['label'])}",
            fix="fill in a number in each row, or in each a name; other text goes into a column of its own, say "
            "columns=['caption'], and comes out in batch.text",
        )
    if kinds.get("label") == "float":
        for entry in entries:
            if not math.isfinite(entry.columns["label"]):
                raise SourceError(
                    f"{entry.named} has the label {entry.columns['label']}, which no loss can use",
                    fix="fill it in, or leave the row out",
                    path=entry.path,
                )
    return kinds


def like_label(names: Iterable[Any]) -> str | None:
    """The name among those of a table's columns that may be ``label`` misspelt; None where ``label`` itself is there."""
    found = {text.strip().lower(): text for text in names if isinstance(text, str)}
    if "label" in found.values():
        return None
    close = difflib.get_close_matches("label", found, n=1, cutoff=0.75)  # 'lable' and 'label_id', not 'level' and 'table'
    return found[close[0]] if close else None


def tell_of_label(entries: Iterable[Entry], asked: Iterable[str]) -> None:
    """Warns where no row has a label, but some have a column that may be meant for it and is not asked for."""
    first: dict[tuple[Any, ...], Entry] = {}  # rows by their columns, in which few differ
    for entry in entries:
        if "label" in entry.columns:  # of most lists the first row has one
            return
        first.setdefault(tuple(entry.columns), entry)
    for columns, entry in first.items():
        name = like_label(column for column in columns if column not in asked)
        if name is not None:
            log.warning(
                f"no row has a column 'label', so batches have no labels; {entry.named} has {name!r}: if that is the label, "
                f"give source={{'label_column': {name!r}}} or rename it"
            )
            return


def dtype_of(kind: Kind) -> np.dtype[Any]:
    """The type of a column's numbers in a batch."""
    return np.dtype(kind.dtype if isinstance(kind, Arrays) else np.int64 if kind == "int" else np.float64)


def text_of(value: Any) -> str:
    """A value as text; what is missing is empty, as in CSV."""
    return "" if _is_missing(value) else str(value)


def shown(value: Any) -> str:
    """A value as errors show it: no more than its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_missing(value: Any) -> bool:
    """Whether there is no value: None, or NaN, as pandas writes text that is missing."""
    return value is None or (isinstance(value, numbers.Real) and value != value)


def is_blank(value: Any) -> bool:
    """Whether there is no value, or text without a sign."""
    return _is_missing(value) or (isinstance(value, str) and not value)


def reads_as_number(value: Any) -> bool:
    """Whether a value is a number of at most 64 bits, or text that can be read as one."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, numbers.Integral) or -(2**63) <= int(value) < 2**63


def _is_usable(label: Any) -> bool:
    """Whether a label is a number of at most 64 bits, or text that can be read as one that is finite."""
    return reads_as_number(label) and math.isfinite(float(label))


def _missing(entries: Iterable[Entry], entry: Entry, name: str, *, asked: bool) -> SourceError:
    have = ", ".join(map(str, entry.columns)) or "none"
    if not asked:
        if all(_is_missing(other.columns.get(name)) for other in entries):
            return SourceError(
                f"no row has a label, though there is a column for it: that of {entry.named} is empty",
                fix="label each row, or leave the column out",
            )
        return SourceError(
            f"{entry.named} has no label, and other rows have one",
            fix="label each row, or read no labels: source={'label_from': 'none'}",
        )
    close = difflib.get_close_matches(name, [column for column in map(str, entry.columns) if column != name], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    fix = "fill it in (nan for a number that is not known), or do not ask for it"
    if not entry.where and not set(entry.columns) - {"label"}:
        fix = f"a folder or a list of paths has no columns: give a table, or rows, with 'path' and {name!r}"
    return SourceError(f"{entry.named} has no value in column {name!r} (its columns: {have}){hint}", fix=fix)


def _kind(entries: list[Entry], name: str, *, asked: bool = True) -> Kind:
    kind: Kind = "int"
    arrays, lacking = False, None
    for entry in entries:
        value = entry.columns.get(name)
        if value is None:
            lacking = lacking or entry
        elif isinstance(value, str):
            kind = "text"
        elif is_list(value):
            arrays = True
        elif isinstance(value, numbers.Integral | np.bool_) and -(2**63) <= int(value) < 2**63:  # NumPy's numbers included
            continue
        elif not isinstance(value, numbers.Real) or isinstance(value, numbers.Integral):
            kind = "text"
        elif kind == "int":
            kind = "float"
    if kind == "text" and not arrays:  # which may be empty, but not without its column
        lacking = next((entry for entry in entries if name not in entry.columns), None)
    if lacking is not None:
        raise _missing(entries, lacking, name, asked=asked)
    return (arrays_of(entries, name) or "text") if arrays else kind


def start_frame(entry: Entry) -> int | None:
    """Where the clip of a row starts, None where the row does not say.

    Raises:
        SourceError: when its ``start_frame`` is not a whole number.
    """
    value: Any = entry.columns.get(START_COLUMN)
    if is_blank(value):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise SourceError(
            f"start_frame={value!r} of {entry.named} is not a whole number", fix="count frames from 0, or leave the cell empty"
        ) from None
