"""The base of every stage's model: frozen, strict about names, and clear about what is wrong."""

from __future__ import annotations

import difflib
import itertools
import numbers
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from gpupipe.errors import ConfigError, Fault

PathLike = str | os.PathLike[str]
Model = TypeVar("Model", bound="StageConfig")

UNBUILT: dict[str, str] = {
    "optical_flow": "a model for it can run on batch['video'] in the training step, or on each clip in VideoLoader(after=…)",
}
"""Parts of a training system that files name and gpupipe does not have, and what to do without."""


class StageConfig(BaseModel):
    """Base of all stage configurations: frozen, strict about names, clear about errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
    example: ClassVar[str] = ""
    """How its mapping is written, where that is not plain from the names."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Keys that a file may have beside these fields."""
    elsewhere: ClassVar[dict[str, str]] = {}
    """What to write for names that other libraries have, or that belong to another place."""
    unbuilt: ClassVar[dict[str, str]] = {}
    """What to do without parts that are planned, by their names."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                names_only(value, f"{type(self).__name__}.{name}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(type(self), error, values) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts True as 1, and YAML reads ``yes`` and ``on`` as True."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if _has_bool(value) and not kinds.isdisjoint((int, float)) and bool not in kinds:
            raise ValueError("Input should be a number, not true or false (in YAML yes, no, on and off are these)")
        return value

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        """All checks that :func:`fits` marks, so that what one finds hides nothing of the others."""
        stages = [kind for kind in type(self).__mro__ if issubclass(kind, StageConfig)]
        found = []
        for check in [check for kind in reversed(stages) for check in vars(kind).values() if getattr(check, "_fits", False)]:
            try:
                check(self)
            except ValueError as error:
                found.append(error)
        if len(found) > 1:
            raise Misfits(found)
        if found:
            raise found[0]
        return self

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


class Misfits(ValueError):
    """Several of these at once."""

    def __init__(self, errors: list[ValueError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


Check = TypeVar("Check", bound=Callable[[Any], None])


def fits(check: Check) -> Check:
    """Marks a method of a stage that holds its fields against each other and raises ValueError where they do not fit."""
    check._fits = True  # type: ignore[attr-defined]
    return check


_OUTSIDE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")
"""What pydantic calls numbers that are not in the range of a field."""


class _Short(reprlib.Repr):
    """Values as errors show them: a few lines of YAML can stand for gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20
        self.maxstring = self.maxother = 200


_shown = _Short().repr


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


def _explain(model: type[BaseModel], error: ValidationError, values: dict[str, Any]) -> ConfigError:
    """Turns pydantic's report into one sentence a field, with the nearest name for an unknown key."""
    items = [dict(item) for item in error.errors()]
    faults = [fault for item in _once(items, values) for fault in _faults(model, item)]
    fix = next((fault.fix for fault in faults if fault.fix), None)
    whole = tuple(Fault(fault.place, fault.message, fault.fix or _meaning(model, fault.place)) for fault in faults)
    message = "; ".join(fault.message for fault in faults)
    return ConfigError(message, fix=fix or _meaning(model, error.errors()[0]["loc"]), faults=whole)


def _once(items: list[dict[str, Any]], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The items of a report, but one only of a number outside its range: it may stand for several, as the side of a square, and
    the field may have other kinds of values."""
    for place, group in itertools.groupby(items, lambda item: item["loc"][:1]):
        same = list(group)
        outside = [item for item in same if item["type"] in _OUTSIDE]
        written = values.get(place[0]) if place else None
        if outside and isinstance(written, numbers.Real):
            yield next((item for item in outside if item["input"] == written), outside[0]) | {"loc": place}
        else:
            yield from same


def _faults(model: type[BaseModel], item: dict[str, Any]) -> Iterator[Fault]:
    """What one item of pydantic's report comes to."""
    # After the field's own name only positions: names there are those of the kinds of value that it may have.
    place = tuple(str(part) for k, part in enumerate(item["loc"]) if k == 0 or isinstance(part, int))
    where = ".".join(place) or model.__name__
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # a nested stage has already explained itself
        for fault in cause.faults or (Fault((), cause.message, cause.fix),):
            yield Fault(place + fault.place, fault.message, fault.fix)
    elif isinstance(cause, Misfits):
        for each in cause.errors:
            yield from _faults(model, {**item, "msg": str(each), "ctx": {"error": each}})
    elif item["type"] == "extra_forbidden":
        yield Fault(place, *_stranger(model, where, str(item["loc"][-1])))
    elif item["type"] in ("model_type", "model_attributes_type", "dict_type") and (inner := stage_at(model, item["loc"])):
        shown = f"write {where}={inner.example}; " if inner.example else ""
        message = f"{model.__name__}.{where} takes a mapping of its fields (got {_shown(item['input'])})"
        yield Fault(place, message, f"{shown}its fields are {', '.join(inner.model_fields)}")
    else:
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "literal_error" and isinstance(item["input"], str):
            known = re.findall(r"'([^']*)'", item["ctx"]["expected"])
            close = difflib.get_close_matches(item["input"], known, n=1, cutoff=0.5)
            message += f"; did you mean {close[0]!r}?" if close else ""
        whole = where == model.__name__  # the input of such a fault is the mapping of all fields
        given = "" if item["type"] == "missing" or whole else f" (got {_shown(item['input'])})"
        name = model.__name__ if whole else f"{model.__name__}.{where}"
        yield Fault(place, f"{name}: {message}{given}", cause.fix if isinstance(cause, Misfit) else None)


def _stranger(model: type[BaseModel], where: str, name: str) -> tuple[str, str | None]:
    """(what is wrong, what to do) with a key that a model does not have."""
    unbuilt = model.unbuilt.get(name) if issubclass(model, StageConfig) else None
    if unbuilt is not None:
        return f"{where!r} is not built yet", f"leave it out: {unbuilt}"
    hint, way_out = _right_name(model, name)
    return f"unknown key {where!r} in {model.__name__}{hint}", way_out


def _stages(annotation: Any) -> Iterator[type[StageConfig]]:
    """The stages among the kinds of value that a field takes."""
    if isinstance(annotation, type) and issubclass(annotation, StageConfig):
        yield annotation
    for part in get_args(annotation):
        yield from _stages(part)


def stage_at(model: type[BaseModel], place: tuple[int | str, ...]) -> type[StageConfig] | None:
    """The stage that a field of a model takes."""
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
    keys = _keys(model)
    close = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?", None
    return f"; known keys: {', '.join(keys)}", "leave it out, or write one of these"


def _keys(model: type[BaseModel]) -> list[str]:
    return [*model.model_fields, *(model.beside if issubclass(model, StageConfig) else ())]


def _first_sentence(text: str) -> str:
    """All of it is in docs/configuration.md."""
    plain = " ".join(text.replace("``", "`").split())
    found = re.match(r".+?\.(?=\s|$)", plain)
    return found[0] if found else plain


def _meaning(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """What the field at a place of a model is for, in a sentence; for a place that is no field, which fields there are."""
    for part in place:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
        elif field.description:
            return f"{part}: {_first_sentence(field.description)}"
    return f"{model.__name__} has {', '.join(_keys(model))}"
