"""The base of every stage's model: frozen, strict about names, and clear about what is wrong."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from gpupipe.errors import ConfigError

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound="StageConfig")


class StageConfig(BaseModel):
    """Base of all stage configurations: frozen, strict about names, clear about errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
    example: ClassVar[str] = ""
    """How its mapping is written, where that is not plain from the names."""
    elsewhere: ClassVar[dict[str, str]] = {}
    """What to write for names that other libraries have, or that belong to another place."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                names_only(value, f"{type(self).__name__}.{name}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(type(self), error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts True as 1, and YAML reads ``yes`` and ``on`` as True."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if _has_bool(value) and not kinds.isdisjoint((int, float)) and bool not in kinds:
            raise ValueError("Input should be a number, not true or false (in YAML yes, no, on and off are these)")
        return value

    @classmethod
    def parse(cls, value: Self | dict[str, Any] | None) -> Self:
        """Takes an instance, a mapping of its fields, or None for the defaults.

        Raises:
            ConfigError: for an unknown field or a value outside its range.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls(**names_only(value, cls.__name__))
        raise ConfigError(
            f"{cls.__name__} expected, got {type(value).__name__}: {value!r}",
            fix=f"pass {cls.__name__}(...) or a dict of its fields: {', '.join(cls.model_fields)}",
        )


class Misfit(ValueError):
    """Fields that do not fit each other, and the way out."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    return {annotation}.union(*map(_kinds, parts)) if parts else {annotation} if isinstance(annotation, type) else set()


def _has_bool(value: Any) -> bool:
    return any(map(_has_bool, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


def whole_number(value: Any) -> int | None:
    """A whole number, NumPy's included; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def names_only(values: dict[Any, Any], where: str) -> dict[str, Any]:
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: the key {key!r} is not a name", fix="see docs/api for the fields of each stage")
    return values


def _explain(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Turns pydantic's report into one sentence a field, with the nearest name for an unknown key."""
    problems = []
    fix = None
    for item in error.errors():
        # After the field's own name only positions: names there are those of the kinds of value that it may have.
        place = [str(part) for k, part in enumerate(item["loc"]) if k == 0 or isinstance(part, int)]
        where = ".".join(place) or model.__name__
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a nested stage has already explained itself
            problems.append(cause.message)
            fix = fix or cause.fix
        elif item["type"] == "extra_forbidden":
            hint, way_out = _right_name(model, str(item["loc"][-1]))
            problems.append(f"unknown key {where!r} in {model.__name__}{hint}")
            fix = fix or way_out
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type") and (inner := _stage_at(model, item["loc"])):
            problems.append(f"{model.__name__}.{where} takes a mapping of its fields (got {item['input']!r})")
            shown = f"write {where}={inner.example}; " if inner.example else ""
            fix = fix or f"{shown}its fields are {', '.join(inner.model_fields)}"
        else:
            if item["type"] == "literal_error" and isinstance(item["input"], str):
                known = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                close = difflib.get_close_matches(item["input"], known, n=1, cutoff=0.5)
                item["msg"] += f"; did you mean {close[0]!r}?" if close else ""
            whole = where == model.__name__  # the input of such a fault is the mapping of all fields
            given = "" if item["type"] == "missing" or whole else f" (got {item['input']!r})"
            name = model.__name__ if where == model.__name__ else f"{model.__name__}.{where}"
            problems.append(f"{name}: {item['msg'].removeprefix('Value error, ')}{given}")
            fix = fix or (cause.fix if isinstance(cause, Misfit) else None)
    return ConfigError("; ".join(problems), fix=fix or _meaning(model, error.errors()[0]["loc"]))


def _stages(annotation: Any) -> Iterator[type[StageConfig]]:
    """The stages among the kinds of value that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, StageConfig):
        yield annotation
    for part in get_args(annotation):
        yield from _stages(part)


def _stage_at(model: type[BaseModel], place: tuple[int | str, ...]) -> type[StageConfig] | None:
    field = model.model_fields.get(str(place[0])) if place else None
    return next(_stages(field.annotation), None) if field is not None else None


def _right_name(model: type[BaseModel], name: str) -> tuple[str, str | None]:
    """(what to say of an unknown name, what to do about it): what is meant by it here, the stage that has it, the nearest."""
    known = model.elsewhere.get(name) if issubclass(model, StageConfig) else None
    if known is not None:
        return "", known
    within = {stage: inner for stage, field in model.model_fields.items() for inner in _stages(field.annotation)}
    places = [f"{stage}.{name}" for stage, inner in within.items() if name in inner.model_fields]
    if places:
        stages = " or ".join(f"{place.partition('.')[0]}={{{name!r}: …}}" for place in places)
        return f"; did you mean {' or '.join(map(repr, places))}?", f"write {stages}"
    close = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.6)
    return (f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(model.model_fields)}"), None


def _meaning(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """What the field at a place of a model is for; for a place that is no field, which fields there are."""
    for part in place:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        elif field.description:
            return f"{part}: {' '.join(field.description.replace('``', '`').split())}"
    return f"{model.__name__} has {', '.join(model.model_fields)}"
