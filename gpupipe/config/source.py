"""What there is to read, and what of it is taken."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gpupipe.config.ranges import ascending
from gpupipe.config.stage import StageConfig


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class FilterConfig(StageConfig):
    """Which videos are taken, by facts that their indices tell; a bound may be met exactly. Files that cannot be indexed are
    left to ``on_bad_file``."""

    example: ClassVar[str] = '{"min_seconds": 2, "min_size": 256}'

    min_frames: Annotated[int, Field(ge=1)] | None = None
    """Frames that a video has, at least."""
    max_frames: Annotated[int, Field(ge=1)] | None = None
    """Frames, at most."""
    min_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds from the first frame to the end of the last, at least."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds, at most."""
    min_size: Annotated[int, Field(ge=1)] | None = None
    """Pixels of the shorter side, as displayed, at least."""
    max_size: Annotated[int, Field(ge=1)] | None = None
    """Pixels of the shorter side, at most."""
    fps: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] | None = None
    """Average frames per second, (least, most)."""

    @model_validator(mode="after")
    def _some_pass(self) -> Self:
        for fact in ("frames", "seconds", "size"):
            least, most = getattr(self, f"min_{fact}"), getattr(self, f"max_{fact}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"no video passes min_{fact}={least:g} and max_{fact}={most:g}")
        ascending("fps", self.fps)
        return self


class SourceConfig(StageConfig):
    """Which files count as videos when a folder is given, and where labels come from."""

    example: ClassVar[str] = '{"label_from": "folder"}'

    extensions: tuple[str, ...] = (
        ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv", ".wmv", ".3gp",
        ".ogv",
    )  # fmt: skip
    """Endings of the names of files that count as videos in a folder or a shard, in lower or upper case."""
    recursive: bool = True
    """Look into the folders inside a folder too."""
    label_from: Literal["column", "folder", "none"] = "column"
    """``folder``: the label is the position of the video's parent folder's name among ``classes``; rows may have none then.
    ``none``: batches have no labels, and those that rows have are left out, as for a table with labels beside a folder without.
    """
    classes: tuple[str, ...] = ()
    """Names of the folders or of the labels, in the order of their numbers; none: those that are there, sorted. A label that is
    a number stands for the name that reads as this number, or where all names are words, for its place among them. Give a
    validation set the ``classes`` of the training loader: it may lack some."""
    path_column: str = "path"
    """The column of a table that holds the video's path; relative paths start at the table's own folder."""
    label_column: str = "label"
    """The column of a table that holds the label; in the batch it is ``label`` whatever its name here, and another column that
    is called ``label`` is left out. Names of classes become their place among ``classes``."""

    npy_columns: tuple[str, ...] = ()
    """Columns that hold paths of .npy files, relative to the table's own folder: what the files hold travels to the batch under
    the column's name, all of one shape. They are read with the clip, never unpickled; one that cannot be used makes its row a
    bad file."""

    filter: FilterConfig = FilterConfig()
    """Which videos are taken, by length, size and rate; all unless asked for. Indices that are missing are made when the loader
    is, which reads each file's packets once; ``gpupipe index`` makes them ahead."""
    root: Annotated[str, BeforeValidator(_as_text)] | None = None
    """A folder that all files must lie in, once links are followed: for lists that others made. A row whose path leads out of
    it, by ``..``, as an absolute path or URL or through a link, is an error that names the row; members of shards lie where
    their shard does. Relative paths start where they do without it. Or a URL, with which all videos' URLs must begin. None:
    paths lead anywhere."""
    weights: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = ()
    """Shares of an epoch's samples, a number for each item of the list of videos: ``VideoLoader(["a.csv", "b/"],
    source={"weights": [0.7, 0.3]})``. They need not sum to 1; shares are exact to rounding. None: each video once."""
    epoch_length: Literal["total", "first_exhausted", "all_exhausted"] | Annotated[int, Field(ge=1, le=10**9)] = "total"
    """Samples of an epoch, over all ranks. ``total``: as many as there are videos; ``first_exhausted``: as many as there are
    before a source has to repeat one; ``all_exhausted``: until all of each source has come; or a number. Sources are repeated
    or cut to fit, and go on in the next epoch where they were left."""

    @field_validator("weights")
    @classmethod
    def _some_weight(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if value and not any(value):
            raise ValueError("all weights are 0: give one above it")
        return value

    @field_validator("extensions")
    @classmethod
    def _with_dots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for ending in value:
            if not ending.startswith(".") or ending == ".":
                raise ValueError(f"{ending!r} is no ending of a file's name: write it with its dot, as '.mp4'")
        return value

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for name in value if value.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice: each class has one number")
        return value
