"""Writes the tables of every field into docs/configuration.md, and of what each preset sets into docs/transforms.md, out of the
models themselves: ``python docs/fields.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gpupipe.config import (
    PRESETS,
    GraphConfig,
    LeakConfig,
    LoaderConfig,
    MemoryConfig,
    PrecisionConfig,
    TrainingConfig,
    TransformConfig,
    WatchConfig,
)  # fmt: skip
from gpupipe.config.teletron import SHARED, TeleTronConfig

PAGE = Path(__file__).parent / "configuration.md"
MARK = "<!-- fields -->"
PRESETS_PAGE = PAGE.with_name("transforms.md")
PRESETS_MARKS = ("<!-- presets:begin -->", "<!-- presets:end -->")
TRAINING = {
    "gpupipe.train.TrainingConfig": TrainingConfig, "gpupipe.train.Precision": PrecisionConfig,
    "gpupipe.train.AdaptiveGraph": GraphConfig, "gpupipe.train.Watch": WatchConfig,
    "gpupipe.train.reserve_memory": MemoryConfig, "gpupipe.train.LeakWatch": LeakConfig,
}  # fmt: skip
"""What is configured apart from a loader, and of what it is the settings."""
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
    """One section for each stage, the loader's own first; behind them those of TeleTron's layout, and of a training step."""
    stages = dict(_stages(LoaderConfig, ""))
    sections = [_section(model, place) for model, place in stages.items()]
    sections += [_section(model, f"tele_tron.{place}".rstrip(".")) for model, place in _theirs()]
    sections += [_section(model, place) for place, model in TRAINING.items()]
    return "\n".join(sections)


def _theirs() -> Iterator[tuple[type[BaseModel], str]]:
    known = dict(_stages(LoaderConfig, ""))
    return ((model, place) for model, place in _stages(TeleTronConfig, "") if model not in known)


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
        if model is TeleTronConfig and name in SHARED:
            continue
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


def presets_page() -> str:
    """The page of transforms, with the table of what each preset sets between its marks."""
    text = PRESETS_PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(PRESETS_MARKS[0])
    _, end, after = rest.partition(PRESETS_MARKS[1])
    return f"{before}{begin}\n{presets_table()}\n{end}{after}"


def presets_table() -> str:
    """One column a preset, one row a field that any of them sets; the last column what holds without a preset."""
    plain = TransformConfig()
    made = {name: TransformConfig(preset=name) for name in PRESETS}
    fields = [name for name in TransformConfig.model_fields if any(name in preset for preset in PRESETS.values())]
    lines = ["| field | " + " | ".join(f"`{name}`" for name in made) + " | no preset |", "|---" * (len(made) + 2) + "|"]
    for field in fields:
        cells = [_preset_value(getattr(config, field)) for config in [*made.values(), plain]]
        lines.append(f"| `{field}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _preset_value(value: Any) -> str:
    if isinstance(value, BaseModel):
        return ", ".join(
            f"{name} {_preset_value(getattr(value, name))}"
            for name in type(value).model_fields
            if name in value.model_fields_set
        )
    if isinstance(value, tuple):
        return "(" + ", ".join(f"{part:.3g}" for part in value) + ")"
    return "none" if value is None else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PRESETS_PAGE.write_text(presets_page(), encoding="utf-8")
