"""source.root: whatever way a path has of leading out of the folder is found, and what lies inside is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpupipe.config import SourceConfig
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


@pytest.mark.parametrize("url", ["https://host/a.mp4", "file:///etc/passwd"])
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
