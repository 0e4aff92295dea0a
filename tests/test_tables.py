"""Parquet tables: rows as written, columns that are not asked for left on the disk, and errors that name what is wrong."""

from __future__ import annotations

import os
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpupipe import VideoLoader
from gpupipe.config import LoaderConfig, SourceConfig
from gpupipe.data.source import collect, column_kinds
from gpupipe.data.source.listing import list_videos
from gpupipe.device import inventory
from gpupipe.errors import DeviceError, SourceError
from gpupipe.types import Entry

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CONFIG = SourceConfig()
SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu"}


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(arrow.table(columns), path, **options)
    return path


def test_rows_are_entries_with_the_columns_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {
        "caption": ["a dog", "ein Ärger"], "score": [1.5, 2.0], "path": ["x/1.mp4", "/abs/2.mp4"], "label": [0, 12],
        "start_frame": [3, None], "unused": [{"a": 1}, None],
    })  # fmt: skip
    entries = collect(path, CONFIG, ("score", "caption"))
    common = [{"score": 1.5, "caption": "a dog", "label": 0}, {"score": 2.0, "caption": "ein Ärger", "label": 12}]
    assert entries == [
        Entry(str(tmp_path / "x/1.mp4"), {**common[0], "start_frame": 3}),
        Entry("/abs/2.mp4", {**common[1], "start_frame": None}),
    ]
    assert entries[1].named == f"/abs/2.mp4 ({path} row 1)"
    assert column_kinds(entries, ["score", "caption"]) == {"label": "int", "score": "float", "caption": "text"}


def test_a_misspelt_label_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "t.parquet", {"path": ["1.mp4", "2.mp4"], "score": [1, 2], "lable": [0, 1]})
    assert "label" not in list_videos(path, LoaderConfig()).kinds
    assert caplog.text.count(f"1.mp4 ({path} row 0) has 'lable'") == 1


def test_a_column_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    """Its bytes are overwritten: whoever reads them fails."""
    vectors = arrow.array(list(np.random.default_rng(0).random((50, 64), np.float32)))
    path = write(tmp_path / "t.parquet", {"path": [f"{k}.mp4" for k in range(50)], "vector": vectors}, use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(1)
    assert column.path_in_schema.startswith("vector")
    data = bytearray(path.read_bytes())
    begin = column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    assert len(collect(path, CONFIG)) == 50
    with pytest.raises(SourceError, match=r"cannot read the table .*t\.parquet"):
        collect(path, CONFIG, ("vector",))


def test_many_row_groups_keep_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"path": [f"{k}.mp4" for k in range(70_000)]}, row_group_size=999)
    entries = collect(path, CONFIG)
    assert [entry.path for entry in entries] == [str(tmp_path / f"{k}.mp4") for k in range(70_000)]
    assert entries[69_999].where == f"{path} row 69999"


def test_a_pattern_of_tables_reads_them_sorted(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"path": ["2.mp4"]})
    write(tmp_path / "a.pq", {"path": ["1.mp4"]})
    (tmp_path / "c.csv").write_text("path\n3.mp4\n")
    assert [Path(entry.path).name for entry in collect(f"{tmp_path}/*", CONFIG)] == ["1.mp4", "2.mp4", "3.mp4"]


@pytest.mark.parametrize(
    ("columns", "asked", "says"),
    [
        ({"file": ["a.mp4"]}, (), "t.parquet names no column 'path'; its columns are file"),
        (
            {"path": ["a.mp4"], "score": [1]},
            ("scor",),
            "names no column 'scor'; its columns are path, score; did you mean 'sco",
        ),
        ({"path": ["a.mp4", None]}, (), "t.parquet row 1 has no 'path'"),
        ({"path": [7]}, (), "t.parquet row 0 has no 'path', but a int in its place"),
        ({"path": []}, (), "t.parquet has no rows"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, columns: dict[str, Any], asked: tuple[str, ...], says: str) -> None:
    with pytest.raises(SourceError) as caught:
        collect(write(tmp_path / "t.parquet", columns), CONFIG, asked)
    assert says in str(caught.value)


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    table = arrow.Table.from_arrays([arrow.array(["a.mp4"]), arrow.array([1]), arrow.array([2])], ["path", "label", "label"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"t\.parquet has two columns 'label'"):
        collect(tmp_path / "t.parquet", CONFIG)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"path\na.mp4\n" * 9])
def test_what_is_no_parquet_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(SourceError, match=r"cannot read the table .*t\.parquet"):
        collect(tmp_path / "t.parquet", CONFIG)


def test_text_that_is_none_is_told_as_a_fault_of_the_table(tmp_path: Path) -> None:
    odd = arrow.StringArray.from_buffers(1, arrow.py_buffer(b"\0\0\0\0\2\0\0\0"), arrow.py_buffer(b"\xff\xfe"))
    write(tmp_path / "t.parquet", {"path": odd})
    with pytest.raises(SourceError, match=r"cannot read the table .*t\.parquet: 'utf-8' codec"):
        collect(tmp_path / "t.parquet", CONFIG)


def test_turned_bytes_end_in_rows_or_in_an_error_of_the_table(tmp_path: Path) -> None:
    """Whatever pyarrow makes of them; 400 files with up to 20 bytes changed, some cut."""
    draw = random.Random(4)
    columns = {"path": [f"{k}.mp4" for k in range(50)], "label": list(range(50)), "v": [[float(k), 1.0] for k in range(50)]}
    whole = write(tmp_path / "whole.parquet", columns).read_bytes()
    path = tmp_path / "t.parquet"
    outcomes = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
        try:
            outcomes.add(len(collect(path, CONFIG, ("v",))) > 0)
        except SourceError:
            outcomes.add(None)
    assert outcomes == {True, None}


def test_types_of_pythons_own_are_not_unpickled(tmp_path: Path) -> None:
    """Arrow's schemas may name a type of Python's by its pickle, which pyarrow once loaded by itself."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "loaded"),)

    evil = pickle.dumps(Evil())
    pickle.loads(evil)
    (tmp_path / "loaded").rmdir()  # that is what it does
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": evil}
    fields = [arrow.field("path", arrow.string(), metadata=metadata), arrow.field("v", arrow.int64(), metadata=metadata)]
    table = arrow.Table.from_arrays([arrow.array(["a.mp4"]), arrow.array([1])], schema=arrow.schema(fields))
    parquet.write_table(table, tmp_path / "t.parquet")
    entries = collect(tmp_path / "t.parquet", CONFIG, ("v",))
    assert (entries[0].path, entries[0].columns["v"]) == (str(tmp_path / "a.mp4"), 1)
    assert not (tmp_path / "loaded").exists()


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", {"path": ["a.mp4"]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    inventory._import.cache_clear()
    try:
        with pytest.raises(DeviceError, match="pip install pyarrow"):
            collect(path, CONFIG)
    finally:
        inventory._import.cache_clear()


def test_a_loader_reads_a_parquet_table(clips: dict[str, Path], tmp_path: Path) -> None:
    columns = {"file": [str(clips["h264"]), str(clips["vp9"])], "class": ["run", "jump"], "text": ["one", "two"]}
    path = write(tmp_path / "t.parquet", columns)
    source = {"path_column": "file", "label_column": "class"}
    with VideoLoader(path, **SMALL, source=source, columns="text", shuffle=False) as loader:
        (batch,) = loader
    assert loader.classes == ("jump", "run")
    assert batch["label"].tolist() == [1, 0]
    assert batch.text == {"text": ["one", "two"]}
