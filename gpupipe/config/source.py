"""What there is to read, and what of it is taken."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator

from gpupipe.config.stage import StageConfig


class SourceConfig(StageConfig):
    """Which files count as videos when a folder is given, and where labels come from."""

    example: ClassVar[str] = '{"label_from": "folder"}'

    extensions: tuple[str, ...] = (
        ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv", ".wmv", ".3gp",
        ".ogv",
    )  # fmt: skip
    """Endings of the names of files that count as videos in a folder, in lower or upper case."""
    recursive: bool = True
    """Look into the folders inside a folder too."""
    label_from: Literal["column", "folder"] = "column"
    """``folder``: the label is the position of the video's parent folder's name among ``classes``; rows may have none then."""
    classes: tuple[str, ...] = ()
    """Names of the folders, or of the labels where these are text, in the order of their numbers; none: those that are there,
    sorted. Give a validation set the ``classes`` of the training loader: it may lack some."""
    path_column: str = "path"
    """The column of a table that holds the video's path; relative paths start at the table's own folder."""
    label_column: str = "label"
    """The column of a table that holds the label; in the batch it is ``label`` whatever its name here. Names of classes become
    their place among ``classes``."""

    npy_columns: tuple[str, ...] = ()
    """Columns that hold paths of .npy files, relative to the table's own folder: what the files hold travels to the batch under
    the column's name, all of one shape. They are read with the clip, never unpickled; one that cannot be used makes its row a
    bad file."""

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
