"""Writes the tables of every field into docs/configuration.md, out of the models themselves: ``python docs/fields.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gpupipe.config import LoaderConfig

PAGE = Path(__file__).parent / "configuration.md"
MARK = "<!-- fields -->"
_BOUNDS = (("minimum", "≥ {}"), ("exclusiveMinimum", "> {}"), ("maximum", "≤ {}"), ("exclusiveMaximum", "< {}"))
_ROLE = re.compile(r":\w+:`([^`]*)`")
"""A cross-reference of reStructuredText."""
_LONGEST = 48
"""Characters of a default that is shown whole."""


def page() -> str:
    """The whole page: what people wrote, and behind the mark the tables."""
    text, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    return f"{text}{mark}\n\n{tables()}"


def tables() -> str:
    """One section for each stage, the loader's own first."""
    stages = dict(_stages(LoaderConfig, ""))
    return "\n".join(_section(model, place) for model, place in stages.items())


def _stages(model: type[BaseModel], place: str) -> Iterator[tuple[type[BaseModel], str]]:
    yield model, place
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield from _stages(inner, f"{place}.{name}".lstrip("."))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


def _section(model: type[BaseModel], place: str) -> str:
    schema = model.model_json_schema()
    about = _ROLE.sub(r"`\1`", " ".join((model.__doc__ or "").split()))
    lines = [f"## {f'`{place}`' if place else 'The loader'}", "", about, ""]
    lines += ["| field | values | default | what it is |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        values = _values(schema["properties"][name], schema.get("$defs", {}))
        meaning = _ROLE.sub(r"`\1`", " ".join((field.description or "").replace("``", "`").split()))
        cells = (f"`{name}`", values, _default(field), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    default = field.default
    if default is PydanticUndefined or isinstance(default, BaseModel):
        return ""
    shown = repr(default)
    return f"`{shown if len(shown) <= _LONGEST else shown[:_LONGEST] + '…'}`"


def _values(schema: dict[str, Any], known: dict[str, Any]) -> str:
    """What a field takes, in words."""
    if "$ref" in schema:
        return "fields of its own"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(part, known) for part in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value!r}`" for value in schema.get("enum", [schema.get("const")]))
    kind = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`True`, `False`",
        "string": "text",
        "null": "`None`",
    }.get(schema.get("type", ""), "any")
    if schema.get("type") == "array":
        parts = schema.get("prefixItems") or [schema.get("items", {})]
        inner = ", ".join(dict.fromkeys(_values(part, known) for part in parts))
        return f"{len(parts)} x ({inner})" if "prefixItems" in schema else f"list of {inner}"
    if schema.get("type") == "object":
        return "mapping"
    bounds = [form.format(schema[name]) for name, form in _BOUNDS if name in schema]
    return " ".join([kind, ", ".join(bounds)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
