"""Filters by facts of the index: each bound is exact, what is left out is told, and files without an index are not lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from clips import write_clip

from gpupipe import VideoLoader
from gpupipe.config import FilterConfig
from gpupipe.data import index as indices
from gpupipe.data.index import fill
from gpupipe.data.source.filter import left_out
from gpupipe.errors import ConfigError, SourceError
from gpupipe.types import Entry

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 1, "device": "cpu", "shuffle": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """short: 10 frames in 1/3 s, 64 x 96; long: 60 frames in 2 s, 128 x 64; fast: 60 frames in 1 s, 64 x 64."""
    root = tmp_path_factory.mktemp("filter")
    write_clip(root / "short.mp4", width=64, height=96, frames=10)
    write_clip(root / "long.mp4", width=128, height=72, frames=60)
    write_clip(root / "fast.mp4", width=64, height=64, frames=60, fps=60)
    return root


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({}, []),
        ({"min_frames": 10}, []),
        ({"min_frames": 11}, ["short"]),
        ({"max_frames": 59}, ["fast", "long"]),
        ({"min_seconds": 1.0}, ["short"]),
        ({"min_seconds": 1.01}, ["fast", "short"]),
        ({"max_seconds": 2.0}, []),
        ({"max_seconds": 1.99}, ["long"]),
        ({"min_size": 65}, ["fast", "short"]),
        ({"max_size": 71}, ["long"]),
        ({"fps": [30, 30]}, ["fast"]),
        ({"fps": [31, 1000]}, ["long", "short"]),
        ({"min_size": 65, "max_seconds": 1.5, "fps": [1, 60]}, None),
    ],
)
def test_each_rule_leaves_out_what_it_says(folder: Path, rules: dict[str, Any], names: list[str] | None) -> None:
    entries = [Entry(str(folder / f"{name}.mp4")) for name in ("fast", "long", "short")]
    if names is None:
        with pytest.raises(
            SourceError, match=r"leaves none of 3 videos; the first, .*fast\.mp4, has a shorter side of 64 pixels"
        ):
            left_out(entries, FilterConfig(**rules), 1)
        return
    assert [Path(path).stem for path in left_out(entries, FilterConfig(**rules), 1)] == names


def test_a_turned_video_is_measured_as_displayed(folder: Path, media: Path) -> None:
    entries = [Entry(str(path)) for path in sorted(media.iterdir()) if path.suffix in (".mp4", ".mkv", ".webm")]
    for entry in entries:
        shorter = min(indices.load(entry.path).info.display_size)
        others = [Entry(str(folder / "long.mp4")), entry]
        assert list(left_out(others, FilterConfig(max_size=shorter), 1)) == []
        if shorter > 72:
            assert list(left_out(others, FilterConfig(max_size=shorter - 1), 1)) == [entry.path]


def test_a_loader_tells_what_it_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "gpupipe"),
        VideoLoader(folder, **SMALL, source={"filter": {"min_frames": 20, "fps": (1, 40)}}) as loader,
    ):
        assert [Path(path).stem for path in loader.dataset.paths] == ["long"]
        assert len(loader) == len(list(loader)) == 1
    assert loader.left_out == {
        str(folder / "fast.mp4"): "has 60.000 frames a second, not fps=(1, 40)",
        str(folder / "short.mp4"): "has 10 frames, less than min_frames=20",
    }
    assert "source.filter leaves out 2 of 3 videos: 1 by " in caplog.text
    with VideoLoader(folder, **SMALL) as loader:
        assert loader.left_out == {}


def test_a_file_that_cannot_be_indexed_is_left_to_on_bad_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    rows = [str(tmp_path / "bad.mp4"), str(tmp_path / "none.mp4"), str(folder / "long.mp4")]
    with VideoLoader(rows, **SMALL, source={"filter": {"min_frames": 20}}, on_bad_file="skip") as loader:
        assert loader.dataset.paths == rows
        assert [batch.paths for batch in loader] == [[rows[2]]]
        assert set(loader.bad_files) == set(rows[:2])


def test_indices_that_are_there_are_not_made_again(folder: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [Entry(str(path)) for path in sorted(folder.iterdir())]
    rules = FilterConfig(min_frames=20)
    monkeypatch.setattr(indices, "_indices", type(indices._indices)())
    first = left_out(entries, rules, 2)
    made = {path: path.stat().st_mtime_ns for path in fresh_cache.rglob("*") if path.is_file()}
    assert len(made) >= 3
    monkeypatch.setattr(indices, "_indices", type(indices._indices)())

    def refuse(self: Any) -> None:
        raise AssertionError("a process was started to make an index that is there")

    monkeypatch.setattr(fill.ScanProcess, "start", refuse)
    assert left_out(entries, rules, 2) == first
    assert {path: path.stat().st_mtime_ns for path in fresh_cache.rglob("*") if path.is_file()} == made


def test_ranks_begin_at_different_videos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each makes its part of what is missing and finds the rest made."""
    entries = [Entry(str(path)) for path in sorted(folder.iterdir())]
    begun = []

    def watched(paths: list[str], processes: int, made: set[str] | None) -> Any:
        begun.append(Path(paths[0]).stem)
        assert len(paths) == 3
        return original(paths, processes, made)

    original = fill.fill
    monkeypatch.setattr(fill, "fill", watched)
    results = [left_out(entries, FilterConfig(min_frames=20), 1, (rank, 3)) for rank in range(3)]
    assert begun == ["fast", "long", "short"]
    assert results[0] == results[1] == results[2]


def test_classes_keep_their_numbers_under_a_filter(folder: Path) -> None:
    rows = [{"path": str(folder / f"{name}.mp4"), "label": name} for name in ("fast", "long", "short")]
    with VideoLoader(rows, **SMALL, source={"filter": {"max_frames": 20}}) as loader:
        assert loader.classes == ("fast", "long", "short")
        assert [int(batch["label"]) for batch in loader] == [2]


def test_a_mixture_is_of_what_is_left(folder: Path) -> None:
    rows = [str(folder / "fast.mp4"), str(folder)]
    source = {"weights": [1, 2], "epoch_length": "all_exhausted", "filter": {"max_seconds": 1.5}}
    with VideoLoader(rows, **SMALL, source=source) as loader:
        assert [Path(path).stem for path in loader.dataset.paths] == ["fast", "fast", "short"]
        assert len(loader) == 3, "with the third video of the folder it would be 5"
    source["filter"] = {"fps": [1, 40]}
    with pytest.raises(ConfigError, match=r"gives 1\.0 to item 0 of videos, of which nothing is left"):
        VideoLoader(rows, **SMALL, source=source)


def test_bounds_that_nothing_can_pass_are_told() -> None:
    for rules in ({"min_size": 9, "max_size": 8}, {"fps": (30, 20)}, {"min_frames": 0}):
        with pytest.raises(ConfigError, match=r"FilterConfig.*(no video passes min_size=9|must be \(low, high\)|min_frames)"):
            FilterConfig(**rules)  # type: ignore[arg-type]
