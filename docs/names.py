"""Writes into each page of docs/api, which is made of directives, the names on it with a line each, so that it can be read as
it lies in the repository: ``python docs/names.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parent / "api").glob("[!i]*.md"))
BEGIN, END = "<!-- names:begin -->", "<!-- names:end -->"
_DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: (\S+)$", re.MULTILINE)
_CITED = re.compile(r" \([^()]*\b(19|20)\d\d[^()]*\)")
_ROLE = re.compile(r":\w+:`~?([^`]*)`")
"""A cross-reference of reStructuredText."""


def page(file: Path) -> str:
    """The whole page, with the list of its names behind the title."""
    text = file.read_text(encoding="utf-8")
    if BEGIN in text:
        before, _, rest = text.partition(f"{BEGIN}\n")
        text = before + rest.partition(f"{END}\n\n")[2]
    title, _, rest = text.partition("\n\n")
    lines = [line for kind, name in _DIRECTIVE.findall(text) for line in _lines(kind, name)]
    return "\n".join([title, "", BEGIN, *lines, END, "", rest])


def _lines(kind: str, name: str) -> Iterator[str]:
    if kind != "module":
        yield _line(name, _found(name))
        return
    module = importlib.import_module(name)
    for key, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == name and not key.startswith("_"):
            yield _line(f"{name}.{key}", value)


def _line(name: str, value: Any) -> str:
    shown = f"{name}()" if inspect.isfunction(value) else name
    return f"- `{shown}`: {_first_sentence(value)}"


def _found(name: str) -> Any:
    """What a dotted name stands for."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def _first_sentence(value: Any) -> str:
    """Of a docstring, in Markdown, on one line."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text).replace("``", "`")
    text = _CITED.sub("", text)
    sentence = re.match(r"(.*?[^.\d][.:])(\s|:|$)", text)
    return (sentence[1] if sentence else text).rstrip(":.") + "."


def main() -> None:
    for file in PAGES:
        file.write_text(page(file), encoding="utf-8")


if __name__ == "__main__":
    main()
