"""What there is to read: every way of naming videos, and what is said when one names none."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpupipe.config import LoaderConfig, SourceConfig
from gpupipe.data.bytes import Identity, LocalFile
from gpupipe.data.source import class_names, collect, column_kinds, label_names, number_labels, start_frame
from gpupipe.data.source.columns import text_of
from gpupipe.data.source.listing import list_videos
from gpupipe.errors import ConfigError, OpenError, SourceError
from gpupipe.types import Entry

CONFIG = SourceConfig()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """b/2.mp4, a/10.mkv, a/9.MP4, top.webm and a text file; empty, for nothing here opens them."""
    for name in ("b/2.mp4", "a/10.mkv", "a/9.MP4", "top.webm", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(entries: list[Entry], root: Path) -> list[str]:
    return [os.path.relpath(entry.path, root) for entry in entries]


def table(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_is_one_entry_under_its_own_name(tree: Path) -> None:
    assert collect(str(tree / "top.webm"), CONFIG) == [Entry(str(tree / "top.webm"))]
    odd = tree / "top.clip"
    odd.touch()
    assert collect(odd, CONFIG) == [Entry(str(odd))], "a file that is named is taken"
    with pytest.raises(SourceError, match=r"notes\.txt is neither a video nor a table"):
        collect(tree / "a/notes.txt", CONFIG)


def test_a_label_that_is_no_number_is_named_with_its_row() -> None:
    rows = [Entry("1.mp4", {"label": "1"}), Entry("2.mp4", {"label": ""}), Entry("3.mp4", {"label": "3"})]
    with pytest.raises(SourceError, match=r"2\.mp4 has ''"):
        column_kinds(rows, [])
    with pytest.raises(SourceError, match=r"2\.mp4 has 'cat'"):
        column_kinds([Entry("1.mp4", {"label": 1}), Entry("2.mp4", {"label": "cat"})], [])
    with pytest.raises(SourceError, match=r"2\.mp4 has 1267650600228229401496703205376"):
        column_kinds([Entry("1.mp4", {"label": 1}), Entry("2.mp4", {"label": 2**100})], [])


def test_a_folder_is_searched_in_a_fixed_order(tree: Path) -> None:
    assert names(collect(tree, CONFIG), tree) == ["a/10.mkv", "a/9.MP4", "b/2.mp4", "top.webm"]
    assert names(collect(tree, SourceConfig(recursive=False)), tree) == ["top.webm"]
    assert names(collect(tree, SourceConfig(extensions=(".MKV",))), tree) == ["a/10.mkv"]


def test_links_that_go_around_in_a_circle_give_each_file_once(tree: Path) -> None:
    (tree / "a/back").symlink_to(tree)
    (tree / "elsewhere").symlink_to(tree / "b")
    found = [os.path.realpath(entry.path) for entry in collect(tree, CONFIG)]
    assert sorted(found) == sorted({os.path.realpath(p) for p in found})
    assert len(found) == 4


def test_a_linked_folder_outside_is_searched_too(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "x.mp4").touch()
    (tree / "c").symlink_to(outside)
    assert "c/x.mp4" in names(collect(tree, CONFIG), tree)


def test_globs_are_sorted_and_may_descend(tree: Path) -> None:
    assert names(collect(f"{tree}/a/*.[mM]*", CONFIG), tree) == ["a/10.mkv", "a/9.MP4"]
    assert names(collect(f"{tree}/**/*.mp4", CONFIG), tree) == ["b/2.mp4"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tree: Path) -> None:
    odd = tree / "take [1].mp4"
    odd.touch()
    assert collect(str(odd), CONFIG) == [Entry(str(odd))]


def test_lists_keep_their_order_and_may_mix(tree: Path) -> None:
    videos: list[Any] = [tree / "top.webm", str(tree / "a"), {"path": "later.mp4", "label": 3}, "missing.mp4"]
    found = collect(videos, CONFIG)
    assert [entry.path for entry in found[3:]] == ["later.mp4", "missing.mp4"], "a missing one in a list is met in its turn"
    assert names(found[:3], tree) == ["top.webm", "a/10.mkv", "a/9.MP4"]
    assert found[3].columns == {"label": 3}
    assert collect((path for path in ["x.mp4", "y.mp4"]), CONFIG) == [Entry("x.mp4"), Entry("y.mp4")]


@pytest.mark.parametrize(
    ("videos", "says"),
    [
        ("no/such.mp4", "no/such.mp4 does not exist"),
        ("no/such.csv", "no/such.csv does not exist"),
        (["no/such.jsonl"], "no/such.jsonl does not exist"),
        ("no/*.mp4", "no file matches 'no/*.mp4'"),
        ([], "the list of videos is empty"),
        (7, "videos=7 names no videos"),
        ([7], "7 (int) names no video"),
        ({"file": "a.mp4"}, "a row of videos has no 'path'; its columns are file"),
    ],
)
def test_each_error_names_what_was_asked_for(videos: Any, says: str) -> None:
    with pytest.raises(SourceError) as caught:
        collect(videos, CONFIG)
    assert says in str(caught.value)


def test_an_empty_folder_names_itself_and_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"{tmp_path}.*\.mp4"):
        collect(tmp_path, CONFIG)


def test_csv_columns_become_numbers_where_all_cells_are(tmp_path: Path) -> None:
    path = table(
        tmp_path / "list.csv",
        "path,label,score,caption,code,take",
        "x/1.mp4,0,1,a dog,007,2024_01",
        "/abs/2.mp4,12,2.5,42,a7,2024_02",
    )
    one, two = collect(path, CONFIG)
    assert (one.path, two.path) == (str(tmp_path / "x/1.mp4"), "/abs/2.mp4"), "relative paths start at the table"
    assert one.columns == {"label": 0, "score": 1, "caption": "a dog", "code": "007", "take": "2024_01"}
    assert two.columns == {"label": 12, "score": 2.5, "caption": "42", "code": "a7", "take": "2024_02"}
    kinds = column_kinds([one, two], ("score", "caption", "code", "take"))
    assert kinds == {"label": "int", "score": "float", "caption": "text", "code": "text", "take": "text"}


def test_an_empty_cell_among_numbers_is_missing_and_makes_them_no_text(tmp_path: Path) -> None:
    """One blank of thousands would turn a column of scores into text, silently."""
    path = table(tmp_path / "t.csv", "path,score,start_frame,note", "a.mp4,0.5,3,", "b.mp4, ,,x", "c.mp4,nan,,")
    entries = collect(path, CONFIG)
    assert [entry.columns["score"] for entry in entries[:2]] == [0.5, None]
    assert [start_frame(entry) for entry in entries] == [3, None, None]
    with pytest.raises(SourceError, match=r"b\.mp4 \(.*t\.csv line 3\) has no value in column 'score'.*\n.*nan"):
        column_kinds(entries, ["score"])
    assert column_kinds([entries[0], entries[2]], ["score", "note"]) == {"score": "float", "note": "text"}
    assert column_kinds(entries, ["note"]) == {"note": "text"}, "text may be empty"


def test_csv_with_byte_order_mark_quotes_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "list.CSV"
    path.write_bytes('\ufeffpath,caption\r\n"a, b.mp4","two\nlines"\r\n'.encode())
    assert collect(path, CONFIG) == [Entry(str(tmp_path / "a, b.mp4"), {"caption": "two\nlines"})]


def test_a_path_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    assert collect(table(tmp_path / "l.csv", "path,label", "0123,1"), CONFIG)[0].path == str(tmp_path / "0123")


def test_a_table_in_the_working_directory_gives_plain_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path / "l.csv", "path", "a.mp4")
    monkeypatch.chdir(tmp_path)
    assert collect("l.csv", CONFIG) == collect([{"path": "a.mp4"}], CONFIG) == [Entry("a.mp4")]


def test_json_lines_keep_their_types(tmp_path: Path) -> None:
    rows = [{"path": "a.mp4", "label": True, "id": 2**70}, {"path": "b.mp4", "label": 1, "id": 3}]
    entries = collect(table(tmp_path / "l.jsonl", json.dumps(rows[0]), "", json.dumps(rows[1])), CONFIG)
    assert [entry.columns for entry in entries] == [{"label": True, "id": 2**70}, {"label": 1, "id": 3}]
    assert column_kinds(entries, ["id"]) == {"label": "int", "id": "text"}, "what does not fit 64 bits is no tensor"


def test_the_path_column_may_have_another_name(tmp_path: Path) -> None:
    path = table(tmp_path / "l.csv", "file,path", "a.mp4,7")
    assert collect(path, SourceConfig(path_column="file")) == [Entry(str(tmp_path / "a.mp4"), {"path": 7})]


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("t.csv", ["file,label", "a.mp4,1"], "t.csv names no column 'path'; its columns are file, label"),
        ("t.csv", ["path,label", "a.mp4,1", ",2"], "t.csv line 3 has no 'path'"),
        ("t.csv", ["path,label", "a.mp4,1", "b.mp4"], "t.csv line 3 has not as many cells as the header"),
        ("t.csv", ["path,label", "a.mp4,1,2"], "t.csv line 2 has not as many cells as the header"),
        ("t.csv", ["path,label"], "t.csv has no rows"),
        ("t.csv", ["path,label,label", "a.mp4,1,2"], "t.csv has two columns 'label'"),
        ("t.jsonl", ["[" * 100_000], "t.jsonl line 1 is not JSON"),
        ("t.jsonl", ['{"path": "a.mp4", "label": ' + "9" * 5000 + "}"], "t.jsonl line 1 is not JSON"),
        ("t.jsonl", ['{"path": "a.mp4"}', "{oops"], "t.jsonl line 2 is not JSON"),
        ("t.jsonl", ["[1]"], "t.jsonl line 1 is not a JSON object"),
        ("t.jsonl", ['{"path": 7}'], "t.jsonl line 1 has no 'path'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, lines: list[str], says: str) -> None:
    with pytest.raises(SourceError) as caught:
        collect(table(tmp_path / name, *lines), CONFIG)
    assert says in str(caught.value)


def test_spaces_around_the_names_of_columns_do_not_count(tmp_path: Path) -> None:
    entries = collect(table(tmp_path / "t.csv", "path, label ", "a.mp4, 3"), CONFIG)
    assert entries == [Entry(str(tmp_path / "a.mp4"), {"label": 3})]


def test_blanks_behind_the_commas_are_no_part_of_the_cells(tmp_path: Path) -> None:
    lines = ['"a, b.mp4", cat , "one,  ""two""",  three', f"{tmp_path}/abs.mp4 ,cat, , 2"]
    entries = collect(table(tmp_path / "t.csv", 'path, label, "note", "a, b"', *lines), CONFIG)
    assert entries == [
        Entry(str(tmp_path / "a, b.mp4"), {"label": "cat", "note": 'one,  "two"', "a, b": "three"}),
        Entry(str(tmp_path / "abs.mp4"), {"label": "cat", "note": "", "a, b": "2"}),
    ]
    with pytest.raises(SourceError, match=r"t\.csv line 3 has not as many cells"):
        collect(table(tmp_path / "t.csv", "path, label", "a.mp4, 1", "b.mp4"), CONFIG)


def test_a_header_without_blanks_leaves_those_of_text_alone(tmp_path: Path) -> None:
    config = SourceConfig(label_column="kind", npy_columns=("array",))
    path = table(tmp_path / "t.csv", "path,kind,array,caption", ' a.mp4, cat,\tx.npy, "so" he said ', "b.mp4,cat ,y.npy,z")
    assert collect(path, config) == [
        Entry(str(tmp_path / "a.mp4"), {"label": "cat", "array": str(tmp_path / "x.npy"), "caption": ' "so" he said '}),
        Entry(str(tmp_path / "b.mp4"), {"label": "cat", "array": str(tmp_path / "y.npy"), "caption": "z"}),
    ]


def test_numpys_numbers_are_numbers() -> None:
    rows = [{"label": np.int64(3), "share": np.float32(0.5), "good": np.bool_(True)}]
    kinds = column_kinds([Entry("a.mp4", row) for row in rows], ["share", "good"])
    assert kinds == {"label": "int", "share": "float", "good": "int"}


def test_a_set_has_no_order_to_keep() -> None:
    with pytest.raises(SourceError, match="another order in each process"):
        collect({"a.mp4", "b.mp4"}, CONFIG)
    assert [entry.path for entry in collect({"b.mp4": 0, "a.mp4": 1}.keys(), CONFIG)] == ["b.mp4", "a.mp4"]


def test_a_table_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"path\n\xff\xfe.mp4\n")
    with pytest.raises(SourceError, match=r"t\.csv: 'utf-8'"):
        collect(tmp_path / "t.csv", CONFIG)


def test_labels_by_folder_number_the_sorted_names(tree: Path) -> None:
    (tree / "top.webm").unlink()
    entries = collect([tree / "b", tree / "a"], SourceConfig(label_from="folder"))
    assert [entry.columns["label"] for entry in entries] == [1, 0, 0]
    with pytest.raises(SourceError, match=r"1\.mp4 has a label of its own, 9, beside label_from='folder'"):
        collect([{"path": "b/1.mp4", "label": 9}, "a/1.mp4"], SourceConfig(label_from="folder"))


def test_a_class_is_the_folder_however_the_path_is_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "a")
    written = ["1.mp4", "./1.mp4", "../a/1.mp4", str(tree / "a" / "1.mp4"), "../b/1.mp4", "inner/../1.mp4"]
    (tree / "a" / "inner").mkdir(exist_ok=True)
    entries = collect(written, SourceConfig(label_from="folder"))
    assert [entry.columns["label"] for entry in entries] == [0, 0, 0, 0, 1, 0]
    assert class_names(entries) == ("a", "b")
    with pytest.raises(SourceError, match=r"/1\.mp4 lies in no folder that has a name"):
        collect(["/1.mp4"], SourceConfig(label_from="folder"))


def test_a_link_to_a_folder_is_a_class_of_its_own_name(tree: Path) -> None:
    (tree / "link").symlink_to(tree / "a")
    entries = collect([tree / "link" / "1.mp4"], SourceConfig(label_from="folder"))
    assert class_names(entries) == ("link",)


def test_each_class_has_one_number() -> None:
    with pytest.raises(ConfigError, match=r"SourceConfig\.classes: 'b' is there twice"):
        SourceConfig(classes=("b", "b", "c"))


@pytest.mark.parametrize(
    ("columns", "asked", "says"),
    [
        ([{"label": "cat"}], [], "labels are numbers of at most 64 bits, or all of them names: a.mp4 has 'cat'"),
        ([{"label": 1}, {"label": 2**63}], [], "at most 64 bits, or all of them names: b.mp4 has 9223372036854775808"),
        ([{"label": 1}, {}], [], "b.mp4 has no label, and other rows have one"),
        ([{"a": 1}, {"a": None}], ["a"], "b.mp4 has no value in column 'a' (its columns: a)"),
        ([{}, {}], ["fps"], "a.mp4 has no value in column 'fps'"),
        ([{"score": 1}, {"score": 2}], ["scor"], "(its columns: score); did you mean 'score'?"),
        ([{"mask": 1}], ["mask"], "'mask' has the name of a tensor of the batch"),
    ],
)
def test_a_column_that_cannot_travel_is_named(columns: list[dict[str, Any]], asked: list[str], says: str) -> None:
    entries = [Entry(f"{'ab'[k]}.mp4", row) for k, row in enumerate(columns)]
    with pytest.raises(SourceError) as caught:
        column_kinds(entries, asked)
    assert says in str(caught.value)


def test_a_column_asked_of_a_folder_is_told_to_need_a_table(tree: Path) -> None:
    for source in ({}, {"label_from": "folder"}):
        with pytest.raises(SourceError, match="has no value in column 'caption'") as caught:
            list_videos(tree, LoaderConfig(columns="caption", source=source))
        assert "a folder or a list of paths has no columns: give a table" in (caught.value.fix or "")


@pytest.mark.parametrize(
    "values",
    [
        ["a", None],
        ["a", 1, 2.5],
        ["a", float("nan")],
        ["a", {"b": 1}],
        [["a"], []],
        [["a"], "b"],
        [["a"], 1],
        [["a"], ["b", None]],
    ],
)
def test_a_column_of_text_is_one_in_any_order_of_its_rows(values: list[Any]) -> None:
    for each in (values, values[::-1]):
        assert column_kinds([Entry("x.mp4", {"c": value}) for value in each], ["c"]) == {"c": "text"}
        with pytest.raises(SourceError, match=r"y\.mp4 has no value in column 'c'"):
            column_kinds([Entry("y.mp4"), *(Entry("x.mp4", {"c": value}) for value in each)], ["c"])
    assert [text_of(None), text_of(float("nan")), text_of("nan"), text_of(2)] == ["", "", "nan", "2"]


@pytest.mark.parametrize("order", [1, -1])
def test_text_beside_arrays_is_named_in_any_order_of_the_rows(order: int) -> None:
    for text in ("a", ["a"]):
        rows = [Entry("a.mp4", {"c": text}), Entry("b.mp4", {"c": [1, 2]})][::order]
        with pytest.raises(SourceError, match=r"a\.mp4 has .* in column 'c', other rows have numbers"):
            column_kinds(rows, ["c"])


@pytest.mark.parametrize("missing", [None, float("nan"), ""])
def test_a_name_that_is_missing_is_the_fault_of_its_row(missing: Any) -> None:
    with pytest.raises(SourceError, match=rf"b\.mp4 has {missing!r}"):
        column_kinds([Entry("a.mp4", {"label": "cat"}), Entry("b.mp4", {"label": missing})], [])


def test_labels_that_are_all_missing_are_told_as_such(tmp_path: Path) -> None:
    path = table(tmp_path / "t.jsonl", '{"path": "a.mp4", "label": null}', '{"path": "b.mp4", "label": null}')
    with pytest.raises(
        SourceError, match=r"no row has a label, .*: that of .*a\.mp4 \(.*line 1\) is empty\n.*or leave the column"
    ):
        list_videos(path, LoaderConfig())


def test_start_frames_are_whole_numbers_or_absent() -> None:
    rows: list[dict[str, Any]] = [{}, {"start_frame": ""}, {"start_frame": None}, {"start_frame": 5}, {"start_frame": "6"}]
    assert [start_frame(Entry("a.mp4", row)) for row in rows] == [None, None, None, 5, 6]
    for bad in ("soon", 1.5, [3]):
        with pytest.raises(SourceError, match=r"start_frame=.* of a\.mp4 is not a whole number"):
            start_frame(Entry("a.mp4", {"start_frame": bad}))


def test_an_identity_tells_versions_of_a_file_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.mp4"
    file.write_bytes(b"12")
    monkeypatch.chdir(tmp_path)
    first = Identity.of("a.mp4")
    assert first == Identity.of(str(file)) == Identity(str(file), 2, file.stat().st_mtime_ns)
    os.utime(file, ns=(0, first.mtime_ns + 1))
    assert Identity.of("a.mp4") != first


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    for path, says in (
        (tmp_path / "pipe.mp4", "not a regular file"),
        (tmp_path, "is a folder"),
        (tmp_path / "none", "No such file"),
        ("a\0b.mp4", "null"),
    ):
        with pytest.raises(OpenError, match=says):
            Identity.of(str(path))


def test_range_reads_stop_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with LocalFile(str(tmp_path / "f")) as file:
        assert (file.read(3, 4), file.read(8, 9), file.read(20, 1), file.read(0, 0)) == (b"3456", b"89", b"", b"")
    with pytest.raises(OpenError, match="none"):
        LocalFile(str(tmp_path / "none"))


def test_the_folder_above_a_linked_one_is_that_which_the_kernel_finds(tmp_path: Path) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "far" / "clip.mp4").write_bytes(b"far")
    (tmp_path / "clip.mp4").write_bytes(b"another")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    identity = Identity.of(f"{tmp_path}/link/../clip.mp4")
    assert Path(identity.path).read_bytes() == b"far"
    assert identity == Identity.of(str(tmp_path / "far" / "clip.mp4"))
    assert Identity.of(f"{tmp_path}/link/./../inner/..//clip.mp4") == identity


def test_classes_keep_their_numbers_in_a_set_that_lacks_some(tmp_path: Path) -> None:
    for name in ("train/a/1.mp4", "train/b/2.mp4", "train/c/3.mp4", "val/b/4.mp4", "val/c/5.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    alone = SourceConfig(label_from="folder")
    assert [entry.columns["label"] for entry in collect(tmp_path / "train", alone)] == [0, 1, 2]
    shared = SourceConfig(label_from="folder", classes=("a", "b", "c"))
    assert [entry.columns["label"] for entry in collect(tmp_path / "val", shared)] == [1, 2]
    with pytest.raises(SourceError, match=r"3\.mp4 lies in a folder that source\.classes does not name"):
        collect(tmp_path / "train", SourceConfig(label_from="folder", classes=("a", "b")))


def test_the_label_may_have_another_name(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    table.write_text("file,class,score\na.mp4,3,0.5\nb.mp4,1,0.25\n")
    config = SourceConfig(path_column="file", label_column="class")
    entries = collect(table, config)
    assert [dict(entry.columns) for entry in entries] == [{"label": 3, "score": 0.5}, {"label": 1, "score": 0.25}]
    with pytest.raises(SourceError, match=r"a\.mp4 \(.*list\.csv.*\) has no column 'kind' \(its columns: class, score\)"):
        collect(table, SourceConfig(path_column="file", label_column="kind"))


def test_the_column_chosen_for_the_label_takes_the_place_of_one_called_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = table(tmp_path / "t.csv", "path,score,label", "a.mp4,3,7", "b.mp4,5,8")
    caplog.set_level("INFO", "gpupipe")
    listing = list_videos(path, LoaderConfig(source={"label_column": "score"}))
    assert [dict(entry.columns) for entry in listing.entries] == [{"label": 3}, {"label": 5}]
    assert caplog.messages == [
        f"source.label_column is 'score', so the column 'label' that {listing.entries[0].named} has too is left out"
    ]


def test_labels_that_only_some_items_have_can_be_left_out(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    videos = [table(tree / "train.csv", "path,label,score", "x.mp4,1,2", "y.mp4,0,3"), str(tree / "a")]
    weights = (0.7, 0.3)
    with pytest.raises(SourceError, match="has no label, and other rows have one") as caught:
        list_videos(videos, LoaderConfig(source={"weights": weights}))
    assert "source={'label_from': 'none'}" in (caught.value.fix or "")
    listing = list_videos(videos, LoaderConfig(source={"weights": weights, "label_from": "none"}))
    assert listing.kinds == {}
    assert listing.classes == ()
    assert [dict(entry.columns) for entry in listing.entries[:2]] == [{"score": 2}, {"score": 3}]
    near = table(tree / "near.csv", "path,lable", "x.mp4,1")
    assert list_videos(near, LoaderConfig(source={"label_from": "none"})).kinds == {}
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lable", True), ("labels", True), ("Label", True), ("lbl", True), ("label_id", True), ("level", False), ("table", False)],
)
def test_a_label_that_may_be_misspelt_is_told_of_once(
    name: str, meant: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lists = [table(tmp_path / f"{k}.csv", f"path,{name},score", "a.mp4,1,2", "b.mp4,2,3") for k in range(2)]
    listing = list_videos(lists, LoaderConfig())
    assert "label" not in listing.kinds
    assert caplog.text.count("no row has a column 'label'") == meant
    if meant:
        assert f"a.mp4 ({lists[0]} line 2) has {name!r}" in caplog.text
        assert f"source={{'label_column': {name!r}}}" in caplog.text
        assert list_videos(lists, LoaderConfig(source={"label_column": name})).kinds == {"label": "int"}


@pytest.mark.parametrize("fields", [{"columns": "labels"}, {"source": {"label_from": "folder"}}])
def test_a_column_near_to_label_is_not_told_of_where_it_is_meant_otherwise(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    list_videos(table(tmp_path / "a.csv", "path,labels", "a/1.mp4,1", "b/2.mp4,2"), LoaderConfig(**fields))
    list_videos(table(tmp_path / "b.csv", "path,label,labels", "a/1.mp4,1,2"), LoaderConfig())
    assert not caplog.records


@pytest.mark.parametrize("label", ["nan", "1e400", "-inf"])
def test_a_label_that_is_not_finite_is_named(tmp_path: Path, label: str) -> None:
    (tmp_path / "t.csv").write_text(f"path,label,score\na.mp4,1,2\nb.mp4,{label},nan\n")
    entries = collect(tmp_path / "t.csv", CONFIG)
    assert column_kinds([replace(e, columns={"score": e.columns["score"]}) for e in entries], ["score"]) == {"score": "float"}
    with pytest.raises(SourceError, match=r"b\.mp4 \(.*t\.csv line 3\) has the label"):
        column_kinds(entries, [])


def test_an_empty_path_is_told_as_such() -> None:
    for videos in ("", ["a.mp4", ""]):
        with pytest.raises(SourceError, match="a path in videos is empty"):
            collect(videos, CONFIG)


def test_a_link_in_a_circle_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "round.mp4").symlink_to(tmp_path / "round.mp4")
    with pytest.raises(SourceError, match=r"round\.mp4 is a link that leads nowhere, or in a circle"):
        collect(tmp_path / "round.mp4", CONFIG)


@pytest.mark.parametrize("ending", ["mp4", "", "."])
def test_endings_have_their_dot(ending: str) -> None:
    with pytest.raises(ConfigError, match=r"SourceConfig\.extensions: .*with its dot"):
        SourceConfig(extensions=(".mkv", ending))


def test_names_of_classes_are_numbered_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\na.mp4,run\nb.mp4,jump\nc.mp4,run\n")
    entries = collect(tmp_path / "t.csv", CONFIG)
    assert label_names(entries, CONFIG) == ("jump", "run")
    numbered = number_labels(entries, ("jump", "run"))
    assert [entry.columns["label"] for entry in numbered] == [1, 0, 1]
    assert column_kinds(numbered, []) == {"label": "int"}
    shared = SourceConfig(classes=("hop", "jump", "run"))
    assert [e.columns["label"] for e in number_labels(entries, label_names(entries, shared))] == [2, 1, 2]
    with pytest.raises(
        SourceError, match=r"b\.mp4 \(.*t\.csv line 3\) has the label 'jump', which source.classes does not name"
    ):
        number_labels(entries, ("run",))


@pytest.mark.parametrize(
    ("labels", "classes", "places"),
    [
        (["10", "2", "10"], ["2", "10"], [1, 0, 1]),
        (["007", "2.5"], ["2.5", "007"], [1, 0]),
        (["1", "1"], ["cat", "1"], [1, 1]),
        (["1", "cat"], ["cat", "1"], [1, 0]),
        (["1", "0"], ["cat", "dog"], [1, 0]),
    ],
)
def test_classes_that_are_given_are_used_where_labels_are_numbers(
    labels: list[str], classes: list[str], places: list[int], tmp_path: Path
) -> None:
    path = table(tmp_path / "t.csv", "path,label", *(f"{k}.mp4,{label}" for k, label in enumerate(labels)))
    listing = list_videos(path, LoaderConfig(source={"classes": classes}))
    assert ([entry.columns["label"] for entry in listing.entries], listing.classes) == (places, tuple(classes))
    rows = [{"path": f"{k}.mp4", "label": label} for k, label in enumerate(labels)]
    if not {"cat", "dog"} <= set(classes):
        listing = list_videos(rows, LoaderConfig(source={"classes": classes}))
        assert [entry.columns["label"] for entry in listing.entries] == places, "as text, too"


@pytest.mark.parametrize(("label", "classes"), [(3, ["2", "10"]), (0, ["2", "10"]), (2, ["cat", "dog"]), (-1, ["cat", "dog"])])
def test_a_number_that_is_no_class_is_named(label: int, classes: list[str]) -> None:
    with pytest.raises(SourceError, match=rf"a\.mp4 has the label {label}, which source\.classes does not name"):
        list_videos([{"path": "a.mp4", "label": label}], LoaderConfig(source={"classes": classes}))


def test_folders_that_are_called_by_numbers_are_numbered_once() -> None:
    listing = list_videos(["10/a.mp4", "2/b.mp4"], LoaderConfig(source={"label_from": "folder", "classes": ["2", "10"]}))
    assert [entry.columns["label"] for entry in listing.entries] == [1, 0]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_label_of_many_digits_is_shown_by_its_beginning(rows: int, digits: int, tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "path,label", *["a.mp4,1", "b.mp4," + "98" * (digits // 2)][-rows:])
    for classes in ([], ["cat", "1"]):
        with pytest.raises(SourceError, match=r"b\.mp4 \(.*t\.csv line \d\) has .*989898") as caught:
            list_videos(path, LoaderConfig(source={"classes": classes}))
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("labels", [["1", "cat"], ["", "cat"], [1, "cat"], [1, 2], [None, "cat"]])
def test_labels_that_are_not_all_names_are_not_numbered(labels: list[Any]) -> None:
    assert label_names([Entry("a.mp4", {"label": label}) for label in labels], CONFIG) == ()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["path,label", "a.mp4,1", "b.mp4,"], r"b\.mp4 \(.*t\.csv line 3\) has no label, and other rows have one"),
        (["a.mp4 3", "b.mp4 4"], r"first line of .* names no column 'path'; its columns are a\.mp4 3\n.*path,label"),
        (["a.mp4,3"], r"first line of .* names no column 'path'; its columns are a\.mp4, 3"),
    ],
)
def test_lists_that_are_no_tables_say_what_is_missing(lines: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.raises(SourceError, match=says):
        column_kinds(collect(tmp_path / "t.csv", CONFIG), [])
