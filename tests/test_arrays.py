"""Columns of arrays: each kind of list that rows and tables may have reaches the batch as one tensor, or is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.config import SourceConfig
from gpupipe.data.source import collect, column_kinds
from gpupipe.data.source.arrays import Arrays, filled, with_arrays
from gpupipe.errors import OpenError, SourceError
from gpupipe.types import Entry

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu", "shuffle": False}


def entries(*values: Any) -> list[Entry]:
    return [Entry(f"{'abc'[k]}.mp4", {"v": value}) for k, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        ([[1, 2, 3], (4, 5, 6)], "int64", (3,)),
        ([[1, 2], [0.5, 2]], "float64", (2,)),
        ([[[1.0], [2.0]], [[3.0], [4.0]]], "float64", (2, 1)),
        ([np.ones(3, np.float16), np.ones(3, np.float32)], "float32", (3,)),
        ([np.ones(3, np.float32), np.ones(3, np.float64)], "float64", (3,)),
        ([np.ones((2, 2), np.uint8), np.ones((2, 2), np.bool_)], "int64", (2, 2)),
        ([np.array(3), np.array(4)], "int64", ()),
        ([torch.ones(2, dtype=torch.bfloat16), torch.ones(2)], "float32", (2,)),
    ],
)
def test_the_type_of_a_column_follows_from_all_its_rows(values: list[Any], dtype: str, shape: tuple[int, ...]) -> None:
    rows = entries(*values)
    kinds = column_kinds(rows, ["v"])
    assert kinds == {"v": Arrays(dtype, shape)}
    arrays = [entry.columns["v"] for entry in with_arrays(rows, kinds)]
    assert {(array.dtype.name, array.shape) for array in arrays} == {(dtype, shape)}
    assert [np.asarray(array, float).tolist() for array in arrays] == [
        np.asarray(torch.as_tensor(v).float()).tolist() for v in values
    ]


def test_lists_of_text_stay_text() -> None:
    assert column_kinds(entries(["a", "b"], ["c"]), ["v"]) == {"v": "text"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[1, 2], [1, 2, 3]], "b.mp4 has an array of shape (3,) in column 'v', rows before it have (2,)"),
        ([[1, 2], 3], "b.mp4 has an array of shape () in column 'v'"),
        ([3, [1, 2]], "b.mp4 has an array of shape (2,) in column 'v', rows before it have ()"),
        ([[1, 2], ["a", "b"]], "b.mp4 has ['a', 'b'] in column 'v', other rows have numbers"),
        ([[1, 2], [[1], [2, 3]]], "b.mp4 has in column 'v' what makes no array"),
        ([[1, None], [1, 2]], "a.mp4 has an array in column 'v' of what are no real numbers of 64 bits (object)"),
        ([[1j], [2]], "no real numbers of 64 bits (complex128)"),
        ([[2**63]], "no real numbers of 64 bits (uint64)"),
        ([[1], None], "b.mp4 has no value in column 'v'"),
    ],
)
def test_what_makes_no_tensor_is_named_with_its_row(values: list[Any], says: str) -> None:
    with pytest.raises(SourceError) as caught:
        column_kinds(entries(*values), ["v"])
    assert says in str(caught.value)


@pytest.fixture
def rows(clips: dict[str, Path], tmp_path: Path) -> list[dict[str, Any]]:
    """Four rows with an embedding each, and a file of another."""
    names = ["h264", "vp9", "mpeg4", "h264_odd"]
    result: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        np.save(tmp_path / f"{number}.npy", np.full((2, 3), number + 0.25, np.float32))
        result.append({"path": str(clips[name]), "vector": [number / 7, 1.0], "file": f"{number}.npy", "label": number})
    return result


def test_arrays_of_json_lines_reach_the_batch(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with VideoLoader(tmp_path / "t.jsonl", **SMALL, columns="vector", source={"npy_columns": ["file"]}) as loader:
        one, two = loader
    assert (one["vector"].dtype, one["file"].dtype) == (torch.float64, torch.float32)
    assert torch.cat([one["vector"], two["vector"]]).tolist() == [row["vector"] for row in rows]
    assert two["file"].shape == (2, 2, 3)
    assert two["file"][:, 0, 0].tolist() == [2.25, 3.25]


def test_arrays_of_parquet_keep_their_type(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = np.arange(12, dtype=np.float32).reshape(4, 3)
    columns = {
        "path": [row["path"] for row in rows],
        "fixed": arrow.FixedSizeListArray.from_arrays(arrow.array(wanted.ravel()), 3),
        "free": arrow.array(wanted.tolist(), arrow.list_(arrow.float32())),
        "nested": arrow.array([[[k, 1], [2, 3]] for k in range(4)]),
        "half": arrow.array(list(wanted.astype(np.float16))),
        "flags": arrow.array([[True, False]] * 4),
    }
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet", row_group_size=3)
    with VideoLoader(tmp_path / "t.parquet", **SMALL, columns=list(columns)[1:]) as loader:
        batches = list(loader)
    for name in ("fixed", "free", "half"):
        got = torch.cat([batch[name] for batch in batches])
        assert got.dtype == torch.float32
        assert np.array_equal(got.numpy(), wanted)
    assert batches[1]["nested"].tolist() == [[[2, 1], [2, 3]], [[3, 1], [2, 3]]]
    assert batches[0]["flags"].dtype == torch.int64


def test_nulls_among_parquets_arrays_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for value, says in ((None, r"row 1\) has no value in column 'v'"), ([1.0, None], r"row 1\) has an array in column 'v' of")):
        table = arrow.table({"path": ["a.mp4", "b.mp4", "c.mp4"], "v": [[1.0, 2.0], value, [3.0, 4.0]]})
        parquet.write_table(table, tmp_path / "t.parquet")
        found = collect(tmp_path / "t.parquet", SourceConfig(), ("v",))
        assert list(found[2].columns["v"]) == [3.0, 4.0], "what comes after a null is not shifted"
        with pytest.raises(SourceError, match=says):
            column_kinds(found, ["v"])


def test_several_labels_a_video_are_a_tensor(rows: list[dict[str, Any]]) -> None:
    marked = [{"path": row["path"], "label": [0, 1, row["label"]]} for row in rows]
    with VideoLoader(marked, **SMALL) as loader:
        assert next(iter(loader))["label"].tolist() == [[0, 1, 0], [0, 1, 1]]


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("pickle-was-loaded"),))


def test_a_file_that_cannot_be_used_makes_its_row_a_bad_one(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a crash of the loader, and above all nothing is unpickled."""
    monkeypatch.chdir(tmp_path)
    np.save("1.npy", np.array([_Evil()], object), allow_pickle=True)
    Path("2.npy").write_bytes(pickle.dumps(_Evil()))
    np.save("3.npy", np.zeros((2, 4), np.float32))
    with VideoLoader(rows, **SMALL, source={"npy_columns": ["file"]}, on_bad_file="skip") as loader:
        (batch,) = loader
        reasons = loader.bad_files
    assert not Path("pickle-was-loaded").exists()
    assert batch["label"].tolist() == [0]
    told = [reasons[row["path"]] for row in rows[1:]]
    assert "1.npy, named by column 'file', cannot be used: it holds object" in told[0]
    assert "2.npy, named by column 'file', cannot be used" in told[1]
    assert "its shape is (2, 4), that of the first file (2, 3)" in told[2]


def test_files_are_found_from_where_the_loader_was_made(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path)
    with VideoLoader(rows, **SMALL, source={"npy_columns": ["file"]}) as loader:
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        assert next(iter(loader))["file"].shape == (2, 2, 3)


def test_other_files_are_refused_by_reason(tmp_path: Path) -> None:
    kind = Arrays("float32", (2,), file=True)
    np.save(tmp_path / "ints.npy", np.zeros(2, np.int64))
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }")
    whole = (tmp_path / "ints.npy").read_bytes()
    (tmp_path / "claims.npy").write_bytes(whole.replace(b"(2,), } ", b"(2e9,)} ".replace(b"e9", b"00")))
    assert filled(Entry("a.mp4", {"v": "ints.npy"}), {"v": kind}, str(tmp_path)).columns["v"].dtype == np.float32
    cases = {"none.npy": "No such file", "short.npy": "", "claims.npy": "too short for the shape"}
    for name, says in cases.items():
        with pytest.raises(OpenError, match=rf"{name}, named by column 'v', cannot be used.*{says}"):
            filled(Entry("a.mp4", {"v": name}), {"v": kind}, str(tmp_path))
    np.save(tmp_path / "floats.npy", np.zeros(2))
    with pytest.raises(OpenError, match="it holds float64, the first file int64"):
        filled(Entry("a.mp4", {"v": "floats.npy"}), {"v": Arrays("int64", (2,), file=True)}, str(tmp_path))


def test_a_column_without_files_is_told_when_the_loader_is_made(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none of the first files of column 'v' can be read; no/such\.npy: "):
        column_kinds(entries("no/such.npy", "nor/this.npy"), [], ["v"])
    with pytest.raises(SourceError, match=r"b\.mp4 names no file in column 'v': 7"):
        column_kinds(entries("a.npy", 7), [], ["v"])
