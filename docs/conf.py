"""Sphinx configuration. ``make docs`` builds with warnings as errors."""

from __future__ import annotations

from typing import Any

import gpupipe

project = "gpupipe"
author = "The gpupipe authors"
copyright = author
version = release = gpupipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
    "exclude-members": "model_config, model_post_init, parse",
    "special-members": "__len__, __iter__, __getitem__",
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"gpupipe {version}"


def keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Runs before napoleon, which takes the text before an attribute's first colon for its type."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # a comment: an empty line alone would be skipped


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, annotation: str | None
) -> tuple[str, str | None] | None:
    """A configuration's fields are listed below it: its signature would say them again, with all their bounds."""
    from gpupipe.config import StageConfig

    if what == "class" and isinstance(obj, type) and issubclass(obj, StageConfig):
        return "(**fields)", None
    return None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-process-signature", short_signature)
