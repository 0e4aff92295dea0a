"""source.root: whatever way a path has of leading out of the folder is found, and what lies inside is taken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_bytes_shard import write_shard

from gpupipe.config import SourceConfig
from gpupipe.data.bytes import held, store
from gpupipe.data.source import collect
from gpupipe.errors import SourceError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder ``in`` with a video, beside one outside of it, and links between them."""
    for name in ("in/a/1.mp4", "in/2.mp4", "out/secret.mp4", "inner/3.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "in/file.mp4").symlink_to(tmp_path / "out/secret.mp4")
    (tmp_path / "in/folder").symlink_to(tmp_path / "out")
    (tmp_path / "in/home").symlink_to(tmp_path / "in/a")
    (tmp_path / "way").symlink_to(tmp_path / "in")
    return tmp_path


def rooted(tree: Path, videos: Any, **fields: Any) -> list[str]:
    return [entry.path for entry in collect(videos, SourceConfig(root=tree / "in", **fields))]


@pytest.mark.parametrize(
    "path",
    [
        "../out/secret.mp4",
        "a/../../out/secret.mp4",
        "folder/secret.mp4",
        "folder/../out/secret.mp4",
        "file.mp4",
        "home/../../out/none.mp4",
        "missing/../../x.mp4",
        "{tree}/out/secret.mp4",
        "{tree}/inner/3.mp4",
        "/etc/passwd",
        "..",
        ".",
        "a\0b.mp4",
    ],
)
def test_a_path_that_leads_out_is_refused_with_its_row(tree: Path, path: str) -> None:
    table = tree / "in" / "t.jsonl"
    table.write_text('{"path": "2.mp4"}\n' + f'{{"path": "{path.format(tree=tree)}"}}\n'.replace("\0", "\\u0000"))
    with pytest.raises(SourceError, match=r"t\.jsonl line 2\).* does not lie inside source\.root="):
        rooted(tree, table)


@pytest.mark.parametrize("path", ["\ud800.mp4", "\ud800/a.mp4"])
def test_a_path_that_no_file_system_can_have_is_refused_with_its_row(tree: Path, path: str) -> None:
    (tree / "in" / "t.jsonl").write_text(json.dumps({"path": path}))
    with pytest.raises(SourceError, match=r"t\.jsonl line 1\).* does not lie inside source\.root="):
        rooted(tree, tree / "in" / "t.jsonl")


@pytest.mark.parametrize(
    "url",
    ["https://host/a.mp4", "file:///etc/passwd", "file://localhost/etc/passwd", "file:///x/%2e%2e/etc/passwd",
     "file://held%3A//x", "file://https%3A//host/a.mp4"],
)  # fmt: skip
def test_a_url_is_no_path_inside(tree: Path, url: str) -> None:
    with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
        rooted(tree, [{"path": url}])


def test_what_lies_inside_is_taken_however_it_is_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [
        "a/1.mp4",
        "./2.mp4",
        "home/1.mp4",
        "a/../2.mp4",
        "home/../2.mp4",
        "not/yet.mp4",
        f"{tree}/in/2.mp4",
        f"{tree}/way/2.mp4",
    ]
    table = tree / "in" / "t.csv"
    table.write_text("path\n" + "\n".join(inside) + "\n")
    assert rooted(tree, table) == [os.path.join(tree / "in", path) for path in inside]
    monkeypatch.chdir(tree / "in")
    assert rooted(tree, ["2.mp4", {"path": "a/1.mp4"}]) == ["2.mp4", "a/1.mp4"]
    assert [entry.path for entry in collect("2.mp4", SourceConfig(root="/"))] == ["2.mp4"]


@pytest.mark.parametrize("videos", ["{}/in", "{}/in/*.mp4", "{}/out/secret.mp4"])
def test_folders_and_patterns_are_held_to_it_too(tree: Path, videos: str) -> None:
    """They follow links as lists do."""
    with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
        rooted(tree, videos.format(tree))
    assert rooted(tree, f"{tree}/in/a") == [f"{tree}/in/a/1.mp4"]


def test_arrays_that_rows_name_are_held_to_it_too(tree: Path) -> None:
    rows = [{"path": str(tree / "in/2.mp4"), "latent": str(tree / "in/2.npy")}]
    assert rooted(tree, rows, npy_columns=("latent",)) == [rows[0]["path"]]
    rows[0]["latent"] = str(tree / "in/folder/2.npy")
    with pytest.raises(SourceError, match=r"in/2\.mp4: '.*folder/2\.npy', which is .*/out/2\.npy, does not lie inside"):
        rooted(tree, rows, npy_columns=("latent",))


def test_a_root_that_is_not_there_is_told(tree: Path) -> None:
    with pytest.raises(SourceError, match=r"source\.root='.*none' is no folder"):
        collect([str(tree / "in/2.mp4")], SourceConfig(root=tree / "none"))


def test_a_member_lies_where_its_shard_does(tree: Path) -> None:
    """Its own name leads nowhere, whatever it looks like."""
    write_shard(tree / "in" / "s.tar", {"../../up.mp4": b"x", "a.mp4": b"x"})
    write_shard(tree / "out" / "s.tar", {"a.mp4": b"x"})
    expected = [f"{tree}/in/s.tar::../../up.mp4", f"{tree}/in/s.tar::a.mp4"]
    assert rooted(tree, tree / "in" / "s.tar") == expected
    assert rooted(tree, [{"path": path} for path in expected]) == expected
    for path in ("in/../out/s.tar::a.mp4", "in/folder/s.tar::a.mp4", "out/s.tar::../in/2.mp4"):
        with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
            rooted(tree, [{"path": f"{tree}/{path}"}])
        with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
            rooted(tree, [f"{tree}/{path.split('::')[0]}"])


def test_bytes_lie_nowhere_and_their_names_lead_to_none(tree: Path) -> None:
    """A list that others made cannot ask for what the program holds."""
    data = held.hold(b"x", "secret")
    assert rooted(tree, [b"x", data])[1] == "secret"
    with pytest.raises(SourceError, match=r"held://secret' does not lie inside"):
        rooted(tree, [{"path": data.name}])


ROOT = "https://host/set"


@pytest.mark.parametrize("path", ["a.mp4", "b/c.mp4?x=1", "s.tar::../a.mp4"])
def test_a_url_may_be_the_root(path: str) -> None:
    rows = [{"path": f"{ROOT}/{path}"}]
    assert [entry.path for entry in collect(rows, SourceConfig(root=ROOT))] == [f"{ROOT}/{path}"]


@pytest.mark.parametrize(
    "path",
    [
        "https://host/settle/a.mp4",
        "https://host/set/../a.mp4",
        "https://host/set/%2e%2e/a.mp4",
        "https://host/set/..%2fa.mp4",
        "https://host/set/.\t./a.mp4",
        "https://host/set/../s.tar::a.mp4",
        "https://host/set\\..\\a.mp4",
        "https://host.evil/set/a.mp4",
        "http://host/set/a.mp4",
        "https://user@host/set/a.mp4",
        "file:///https://host/set/a.mp4",
        "/etc/passwd",
        "set/a.mp4",
        "held://set/a.mp4",
    ],
)
def test_urls_that_lead_out_of_it_are_refused_before_a_store_is_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(store, "listing", ask)
    monkeypatch.setattr(store, "system", ask)
    for videos in ([{"path": path}], [path]):
        with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
            collect(videos, SourceConfig(root=ROOT))


@pytest.mark.parametrize("videos", ["https://other/set/", "https://other/*.mp4", "https://host/set/{../a,b}.tar"])
def test_folders_and_patterns_in_stores_are_held_to_it_too(videos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "listing", lambda *_: pytest.fail("asked"))
    with pytest.raises(SourceError, match=r"does not lie inside source\.root="):
        collect(videos, SourceConfig(root=ROOT))
