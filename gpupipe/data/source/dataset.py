"""Datasets of other libraries as rows: torch's map-style ones, Hugging Face's, data frames. No video is decoded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpupipe.config import SourceConfig
from gpupipe.data.bytes import held
from gpupipe.data.source.arrow import batch_rows, chosen
from gpupipe.data.source.columns import START_COLUMN
from gpupipe.data.source.tables import row_entry
from gpupipe.errors import SourceError
from gpupipe.types import Entry

_ROWS, _ROWS_OF_BYTES = 4096, 8
"""Rows that are read at a time: of paths, and of videos in memory."""


def is_dataset(value: Any) -> bool:
    """Whether a value is a dataset that is asked for its items by number, one of Hugging Face's, or a data frame."""
    if isinstance(value, str | bytes | os.PathLike | list | tuple):
        return False
    if _hugging_face(value) or _frame_rows(value) is not None:
        return True
    if isinstance(value, Mapping | Sequence):
        return False
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(value, data.Dataset):
        return not isinstance(value, data.IterableDataset)
    kind = type(value)
    numbered = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return numbered and not hasattr(kind, "__iter__") and not hasattr(kind, "read")


def dataset_entries(dataset: Any, config: SourceConfig, columns: Sequence[str]) -> list[Entry]:
    """The entries of a dataset. Items that are bytes are not kept: it is asked for them again, by one thread at a time.

    Raises:
        SourceError: when an item names no video, or cannot be had.
        DeviceError: when pyarrow, which Hugging Face's datasets are made of, cannot be used.
    """
    if _hugging_face(dataset):
        return list(_hugging_face_entries(dataset, config, columns))
    name = type(dataset).__name__
    rows = _frame_rows(dataset)
    if rows is not None:
        return [row_entry(row, config, "", f"{name} row {number}") for number, row in enumerate(rows())]
    items = _Items(dataset, name, config)
    return [items.entry(number) for number in range(len(dataset))]


def _frame_rows(value: Any) -> Callable[[], list[dict[str, Any]]] | None:
    """What gives the rows of a data frame of pandas or polars, whose iterators give the names of columns."""
    if type(value).__name__ != "DataFrame":
        return None
    if hasattr(value, "to_dicts"):  # polars
        rows: Callable[[], list[dict[str, Any]]] = value.to_dicts
        return rows
    return partial(_pandas_rows, value) if hasattr(value, "to_dict") else None


def _pandas_rows(frame: Any) -> list[dict[str, Any]]:
    """The rows of a data frame of pandas. Its mark of what is missing is None here: it is equal to nothing, nor unequal."""
    missing = getattr(sys.modules.get("pandas"), "NA", None)
    return [{name: None if value is missing else value for name, value in row.items()} for row in frame.to_dict("records")]


class _Asked:
    """A dataset of which threads ask for one item at a time: it need not be safe for several of them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._lock, self._owner = threading.Lock(), os.getpid()

    def ask(self, number: int) -> Any:
        if self._owner != os.getpid():  # in a forked child the lock may be one that nobody gives back
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            return self.dataset[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset,)


class _Items(_Asked):
    """A map-style dataset, whose items are paths, bytes, (path, label), or mappings of columns."""

    def __init__(self, dataset: Any, name: str, config: SourceConfig) -> None:
        super().__init__(dataset)
        self._name = name
        self._config = config

    def entry(self, number: int) -> Entry:
        try:
            item = self.ask(number)
        except Exception as error:
            raise SourceError(
                f"{self._name}[{number}] raised {type(error).__name__}: {error}",
                fix="give a dataset that has an item for each number",
            ) from error
        row = self._row(item)
        where = f"{self._name}[{number}]"
        if row is None:
            raise SourceError(
                f"{where} is a {type(item).__name__}, which names no video",
                fix="give a path, (path, label), or a mapping with a path: gpupipe decodes by itself",
            )
        return row_entry(row, self._config, "", where, partial(self.video, number))

    def video(self, number: int) -> Any:
        """What stands in the path's place of an item."""
        return (self._row(self.ask(number)) or {}).get(self._config.path_column)

    def _row(self, item: Any) -> Mapping[str, Any] | None:
        if isinstance(item, tuple) and len(item) == 2 and _is_video(item[0]):
            return {self._config.path_column: item[0], self._config.label_column: item[1]}
        if _is_video(item):
            return {self._config.path_column: item}
        return item if isinstance(item, Mapping) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self._name, self._config)


def _is_video(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) or held.holds_bytes(value)


class _Arrow(_Asked):
    """Rows of Arrow's, of which one column is asked for."""

    def video(self, column: str, number: int) -> Any:
        """What stands in a column, as it is stored."""
        (batch,) = self.ask(number).select([column]).combine_chunks().to_batches()
        return next(batch_rows(batch, [column]))[column]


def _hugging_face(value: Any) -> bool:
    package = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return package is not None and isinstance(value, tuple(getattr(package, kind) for kind in kinds if hasattr(package, kind)))


def declared_classes(videos: Any, config: SourceConfig) -> tuple[str, ...]:
    """The names of the classes by which datasets of Hugging Face number their labels, as their ``ClassLabel`` has them; else
    none.

    Raises:
        SourceError: when two datasets of a list number differently.
    """
    found: tuple[str, ...] = ()
    for item in videos if isinstance(videos, list | tuple) else [videos]:
        if not _hugging_face(item):
            continue
        names = tuple(getattr((item.features or {}).get(config.label_column), "names", None) or ())
        if found and names and names != found:
            raise SourceError(
                f"two datasets number their classes differently: {', '.join(found)}, and {', '.join(names)}",
                fix="cast the columns to one ClassLabel: dataset.cast_column",
            )
        found = found or names
    return found


def _hugging_face_entries(dataset: Any, config: SourceConfig, columns: Sequence[str]) -> Iterator[Entry]:
    """Reads Arrow's columns as they are stored: the path, or the bytes, of a video column, and what else is asked for."""
    package = sys.modules["datasets"]
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset))
        raise SourceError(f"videos is a {type(dataset).__name__} of the splits {splits}", fix="give one: dataset['train']")
    if not isinstance(dataset, package.Dataset):
        raise SourceError(
            "a streamed dataset has neither length nor order to shuffle", fix="load it with streaming=False, or list its files"
        )
    path_column = config.path_column
    videos = [name for name, feature in dataset.features.items() if isinstance(feature, package.Video)]
    if path_column not in dataset.column_names and len(videos) == 1:
        path_column = videos[0]
    further = (config.label_column, "label", START_COLUMN)
    names = chosen("the dataset", dataset.column_names, (path_column, *columns, *config.npy_columns), further)
    rows = _ROWS_OF_BYTES if path_column in videos else _ROWS
    stored, number = dataset.select_columns(names).with_format("arrow"), 0
    again = _Arrow(dataset.select_columns([path_column]).with_format("arrow"))
    for table in stored.iter(rows):
        for batch in table.combine_chunks().to_batches():
            for row in batch_rows(batch, names):
                value = row.pop(path_column)
                ask = partial(again.video, path_column, number)
                yield row_entry({config.path_column: value, **row}, config, "", f"dataset row {number}", ask)
                number += 1
