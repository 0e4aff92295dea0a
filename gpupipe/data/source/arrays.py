"""Columns of arrays: lists of numbers in rows, and .npy files that rows name. They reach the batch as one tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from gpupipe.data.bytes import open_stream
from gpupipe.data.bytes.name import join
from gpupipe.errors import OpenError, SourceError
from gpupipe.types import Entry

_TRIED = 16
"""Files of a column that are looked at until one tells shape and type."""
_HEADER_BYTES = 10_000
"""The longest header of a .npy file that is read, as NumPy has it."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """What the arrays of a column have in common.

    Attributes:
        dtype: ``int64``, ``float32`` or ``float64``.
        shape: of one row's array.
        file: whether the rows name .npy files.
    """

    dtype: str
    shape: tuple[int, ...]
    file: bool = False


class ArrayFile(str):
    """The name of a .npy file, in a column whose values are what such files hold."""

    __slots__ = ()


def is_list(value: Any) -> bool:
    """Whether a value holds several: a list, a NumPy array, a tensor."""
    if isinstance(value, np.generic):
        return False
    return isinstance(value, list | tuple) or (hasattr(value, "__array__") and hasattr(value, "shape"))


def arrays_of(entries: Iterable[Entry], name: str) -> Arrays | None:
    """What the arrays of a column have in common; None where it holds text, beside which lists may be empty.

    Raises:
        SourceError: when a row holds text and another one an array of numbers; or where none holds text, when a row's value is
            no array of numbers, or of another shape than the first.
    """
    found: Arrays | None = None
    text: Entry | None = None
    fault: SourceError | None = None  # in a column of text it is none
    kinds, has_arrays = set(), False
    for entry in entries:
        try:
            array = _numbers(entry, name)
        except SourceError as error:
            fault = fault or error
            continue
        if array is None:
            text = text or entry
            continue
        found = found or Arrays("", array.shape)
        if array.shape != found.shape:
            fault = fault or SourceError(
                f"{entry.named} has an array of shape {array.shape} in column {name!r}, rows before it have {found.shape}",
                fix="give all rows one shape, or do not ask for the column",
            )
        kinds.add(array.dtype)
        has_arrays = has_arrays or bool(array.ndim and array.size)
    if text is not None and has_arrays:
        raise SourceError(
            f"{text.named} has {text.columns[name]!r:.60} in column {name!r}, other rows have numbers",
            fix="give each row a list of numbers",
        )
    if text is not None:
        return None
    if fault is not None:
        raise fault
    return None if found is None else Arrays(np.result_type(*kinds).name, found.shape)


def with_arrays(entries: list[Entry], kinds: Mapping[str, Any]) -> list[Entry]:
    """The entries with the arrays of their columns as NumPy arrays of the column's type, which take less memory than lists."""
    names = {name: np.dtype(kind.dtype) for name, kind in kinds.items() if isinstance(kind, Arrays) and not kind.file}
    if not names:
        return entries
    result = []
    for entry in entries:
        made = {}
        for name, dtype in names.items():
            array = _numbers(entry, name)
            assert array is not None
            made[name] = array.astype(dtype, copy=False)
        result.append(replace(entry, columns={**entry.columns, **made}))
    return result


def _numbers(entry: Entry, name: str) -> np.ndarray | None:
    """A row's value as int64, float32 or float64; None for text."""
    value = entry.columns[name]
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unlike length
        raise SourceError(
            f"{entry.named} has in column {name!r} what makes no array: {error}", fix="give lists of numbers of one length"
        ) from error
    if array.dtype.kind in "US":
        return None
    dtype = _travels_as(array.dtype)
    if dtype is None or (array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63):
        raise SourceError(
            f"{entry.named} has an array in column {name!r} of what are no real numbers of 64 bits ({array.dtype})",
            fix="give whole or floating-point numbers, none of them missing",
        )
    return array.astype(dtype, copy=False)


def _travels_as(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type in which numbers reach the batch; None for what are no real numbers of at most 64 bits."""
    if dtype.kind in "biu":
        return np.dtype(np.int64)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    return None


def files_of(entries: list[Entry], name: str) -> Arrays:
    """What the .npy files of a column have in common, as the first of them that can be read tells.

    Raises:
        SourceError: when a row names none, or none of the first ones can be read.
    """
    paths = []
    for entry in entries:
        path = entry.columns.get(name)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise SourceError(
                f"{entry.named} names no file in column {name!r}: {path!r}",
                fix="give the path of a .npy file in each row, or do not ask for the column",
            )
        paths.append(os.fspath(path))
    reason = ""
    for path in paths[:_TRIED]:
        try:
            with open_stream(path) as file:
                shape, dtype, _ = _header(file)
                return Arrays(dtype.name, shape, file=True)
        except (OSError, ValueError, OpenError) as error:
            reason = reason or f"{path}: {error}"
    raise SourceError(f"none of the first files of column {name!r} can be read; {reason}", fix="write them by numpy.save")


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], np.dtype[Any]]:
    """(shape, type in the batch, type in the file) of a .npy file.

    Raises:
        ValueError: when it is none, or holds what are no real numbers.
    """
    form: Any = np.lib.format
    version = form.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format {version} is not that of plain arrays")
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = read(file, max_header_size=_HEADER_BYTES)
    travels = _travels_as(dtype)
    if travels is None:
        raise ValueError(f"it holds {dtype}, not real numbers")
    if math.prod(shape) * dtype.itemsize > _size(file):  # before memory is asked for
        raise ValueError(f"it is too short for the shape {shape} that it names")
    return shape, travels, dtype


def _size(file: BinaryIO) -> int:
    here, end = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(here)
    return end


def filled(entry: Entry, kinds: Mapping[str, Any], folder: str) -> Entry:
    """The entry with what its .npy files hold in the place of their paths; nothing in a file is ever unpickled.

    Args:
        folder: where relative paths start.

    Raises:
        OpenError: when a file cannot be read, or holds another shape or kind of number than the first one of its column.
    """
    names = [name for name, kind in kinds.items() if isinstance(kind, Arrays) and kind.file]
    if not names:
        return entry
    made = {name: _load(join(folder, os.fspath(entry.columns[name])), name, kinds[name]) for name in names}
    return replace(entry, columns={**entry.columns, **made})


def _load(path: str, name: str, kind: Arrays) -> np.ndarray:
    try:
        with open_stream(path) as file:
            shape, _, dtype = _header(file)
            if shape != kind.shape:
                raise ValueError(f"its shape is {shape}, that of the first file {kind.shape}")
            if not np.can_cast(dtype, kind.dtype, "same_kind"):
                raise ValueError(f"it holds {dtype}, the first file {kind.dtype}")
            file.seek(0)
            array: np.ndarray = np.load(file, allow_pickle=False)
            return array.astype(kind.dtype, copy=False)
    except (OSError, ValueError, EOFError, OpenError) as error:
        raise OpenError(f"{path}, named by column {name!r}, cannot be used: {error}", path=path) from error
