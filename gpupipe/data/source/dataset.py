"""Datasets of other libraries as rows: torch's map-style ones, Hugging Face's, data frames. No video is decoded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpupipe.config import SourceConfig
from gpupipe.data.source.arrow import batch_rows, chosen
from gpupipe.data.source.columns import START_COLUMN
from gpupipe.data.source.spill import Spill
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
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not hasattr(kind, "__iter__")


def dataset_entries(dataset: Any, config: SourceConfig, columns: Sequence[str], spill: Spill | None) -> list[Entry]:
    """The entries of a dataset.

    Raises:
        SourceError: when an item names no video, or cannot be had.
        DeviceError: when pyarrow, which Hugging Face's datasets are made of, cannot be used.
    """
    if _hugging_face(dataset):
        return list(_hugging_face_entries(dataset, config, columns, spill))
    name = type(dataset).__name__
    rows = _frame_rows(dataset)
    if rows is not None:
        return [row_entry(row, config, "", f"{name} row {number}", spill) for number, row in enumerate(rows())]
    return [_entry(_item(dataset, number, name), config, f"{name}[{number}]", spill) for number in range(len(dataset))]


def _frame_rows(value: Any) -> Callable[[], list[dict[str, Any]]] | None:
    """What gives the rows of a data frame of pandas or polars, whose iterators give the names of columns."""
    if type(value).__name__ != "DataFrame":
        return None
    if hasattr(value, "to_dicts"):  # polars
        rows: Callable[[], list[dict[str, Any]]] = value.to_dicts
        return rows
    return partial(value.to_dict, "records") if hasattr(value, "to_dict") else None


def _item(dataset: Any, number: int, name: str) -> Any:
    try:
        return dataset[number]
    except Exception as error:
        raise SourceError(
            f"{name}[{number}] raised {type(error).__name__}: {error}", fix="give a dataset that has an item for each number"
        ) from error


def _entry(item: Any, config: SourceConfig, where: str, spill: Spill | None) -> Entry:
    """One item of a map-style dataset: a path, bytes, (path, label), or a mapping of columns."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | bytes | os.PathLike):
        item = {config.path_column: item[0], config.label_column: item[1]}
    elif isinstance(item, str | bytes | os.PathLike):
        item = {config.path_column: item}
    if not isinstance(item, Mapping):
        raise SourceError(
            f"{where} is a {type(item).__name__}, which names no video",
            fix="give a path, (path, label), or a mapping with a path: gpupipe decodes by itself",
        )
    return row_entry(item, config, "", where, spill)


def _hugging_face(value: Any) -> bool:
    package = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return package is not None and isinstance(value, tuple(getattr(package, kind) for kind in kinds if hasattr(package, kind)))


def _hugging_face_entries(dataset: Any, config: SourceConfig, columns: Sequence[str], spill: Spill | None) -> Iterator[Entry]:
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
    number = 0
    for table in dataset.select_columns(names).with_format("arrow").iter(rows):
        for batch in table.combine_chunks().to_batches():
            for row in batch_rows(batch, names):
                yield row_entry({config.path_column: row.pop(path_column), **row}, config, "", f"dataset row {number}", spill)
                number += 1
