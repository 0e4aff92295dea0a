"""A configuration's file: its layout, what is wrong with it and where, and what in a configuration comes from it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal

import yaml
from pydantic import BaseModel

from gpupipe.config import LoaderConfig, TransformConfig
from gpupipe.config.distinct import DistinctLoader
from gpupipe.config.stage import UNBUILT, Model, PathLike, StageConfig, names_only, stage_at
from gpupipe.config.teletron import SHARED, STAGES, Place, TeleTronConfig, translate
from gpupipe.config.training import TRAINING_KEYS, TrainingConfig
from gpupipe.errors import ConfigError, Fault

ROOTS = ("gpupipe", "tele_tron")
"""Keys that a whole configuration may stand under."""
TELETRON_KEYS = frozenset(TeleTronConfig.model_fields) - frozenset(SHARED)
OWN_KEYS = frozenset(LoaderConfig.model_fields) - frozenset(SHARED)


@dataclass(frozen=True)
class Document(Generic[Model]):
    """What a file says, and what it comes to.

    Attributes:
        path: the file's name, as it was given.
        layout: ``gpupipe``: this project's own; ``tele_tron``: see :mod:`gpupipe.config.teletron`.
        root: the key that the configuration stands under; empty where it is the whole file.
        config: the configuration; None when there are faults.
        faults: all that is wrong, by keys of the file.
        others: keys beside the root, which are not looked at.
        training: what it says of the training step, which is no loader's; the defaults when there are faults.
    """

    path: str
    layout: Literal["gpupipe", "tele_tron"]
    root: str
    config: Model | None
    faults: tuple[Fault, ...]
    others: tuple[str, ...]
    training: TrainingConfig
    _keys: dict[Place, Place] = field(repr=False)
    _node: yaml.Node | None = field(repr=False)

    def line(self, key: Place) -> int | None:
        """The line of the file, from 1, in which a key stands, or the last of those that lead to it."""
        node, line = self._node, None
        for name in key:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            pair = next(((k, v) for k, v in reversed(pairs) if isinstance(k, yaml.ScalarNode) and k.value == name), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        return line

    def where(self, key: Place) -> str:
        """``run.yaml:3: clip.frames``."""
        line = self.line(key)
        at = f"{self.path}:{line}" if line is not None else self.path
        return f"{at}: {'.'.join(key)}" if key else at

    def key(self, place: Place) -> Place | None:
        """The key of the file that a field of the configuration comes from; None where the file does not say."""
        for length in range(len(place), 0, -1):
            if (found := self._keys.get(place[:length])) is not None:
                return found
        return None

    def names(self, place: Place) -> bool:
        """Whether the file has a key for this very field, or for one within."""
        return any(known[: len(place)] == place for known in self._keys)

    def told(self) -> Model:
        """The configuration.

        Raises:
            ConfigError: when anything is wrong; it has all of it.
        """
        if self.config is not None:
            return self.config
        message = "; ".join(f"{self.where(fault.place)}: {fault.message}" for fault in self.faults)
        fix = self.faults[0].fix
        if len(self.faults) > 1:
            fix = f"{fix}; gpupipe config validate {self.path} says it of each"
        raise ConfigError(message, fix=fix, faults=self.faults)


def read(path: PathLike, model: type[Model]) -> Document[Model]:
    """Reads a file in one of the layouts and checks it.

    Raises:
        ConfigError: when it cannot be read or is no YAML mapping. What else is wrong is in ``faults``.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"the path of a configuration is {path!r:.60}", fix="give the name of a YAML file")
    name = os.fspath(path)
    try:
        loader = DistinctLoader(Path(path).read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            values = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}", fix="give a readable YAML file") from error
    except RecursionError:
        raise ConfigError(f"cannot read the configuration {path}: it is nested too deep", fix="give a flat YAML file") from None
    if not isinstance(values, dict | None):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, not a mapping of stage names", fix="see samples/loader.yaml"
        )
    values = names_only(values or {}, name)
    roots = [root for root in ROOTS if root in values]
    root = roots[0] if roots else ""
    inner = values if not root else {} if values[root] is None else values[root]
    others = tuple(key for key in values if key not in ROOTS) if root else ()
    faults = _beside(roots, others)
    layout: Literal["gpupipe", "tele_tron"] = "gpupipe"
    if not isinstance(inner, dict):
        faults += [Fault((root,), f"{root} takes a mapping, not {inner!r}", "write the settings below it, indented")]
    else:
        inner = names_only(inner, f"{name}: {root}" if root else name)
        layout, mixed = _layout(inner, root)
        faults += mixed
    config: Model | None = None
    training = TrainingConfig()
    keys: dict[Place, Place] = {}
    if not faults:
        step = {key: value for key, value in inner.items() if key in TRAINING_KEYS}
        config, keys, faults = _made({key: value for key, value in inner.items() if key not in step}, layout, model)
        training, wrong = _step(step)
        faults = [*faults, *wrong]
        config = None if wrong else config
        keys |= dict(_places(step, TrainingConfig, ()))
        under = (root,) if root else ()
        keys = {place: under + key for place, key in keys.items()}
        faults = [Fault(under + fault.place, fault.message, fault.fix) for fault in faults]
    document = Document(name, layout, root, config, tuple(faults), others, training, keys, node)
    return replace(document, faults=tuple(sorted(faults, key=lambda fault: document.line(fault.place) or 0)))


def _beside(roots: Sequence[str], others: Sequence[str]) -> list[Fault]:
    """What may not stand together at the top of a file."""
    if len(roots) > 1:
        return [Fault((roots[1],), f"the file has two roots, {' and '.join(roots)}", "keep one of them")]
    return [
        Fault((key,), f"{key!r} stands beside {roots[0]!r}, where it would not be read", f"move it below {roots[0]}:")
        for key in others
        if key in OWN_KEYS | TELETRON_KEYS | TRAINING_KEYS | frozenset(SHARED) | frozenset(UNBUILT)
    ]


def _layout(values: dict[str, Any], root: str) -> tuple[Literal["gpupipe", "tele_tron"], list[Fault]]:
    """Which layout it is, by the keys that only one of them has."""
    own = [key for key in values if key in OWN_KEYS]
    theirs = [key for key in values if key in TELETRON_KEYS] if root else []
    if root and not own and not theirs:  # what is misspelt decides, too
        theirs = [key for key in values if difflib.get_close_matches(key, TELETRON_KEYS, n=1, cutoff=0.8)]
    if own and (theirs or root == "tele_tron"):
        fix = "write all of it in one layout: batch: {size: …}, clip: {…}, transform: {…}, or batch_size: …, data_pipeline: {…}"
        what = f"{theirs[0]!r} of the other" if theirs else "the other under tele_tron:"
        return "gpupipe", [Fault((root, key), f"mixes two layouts: {key!r} of gpupipe's own with {what}", fix) for key in own]
    return ("tele_tron" if theirs or root == "tele_tron" else "gpupipe"), []


def _step(values: dict[str, Any]) -> tuple[TrainingConfig, list[Fault]]:
    """What is said of the training step, and what is wrong with it."""
    try:
        return TrainingConfig(**values), []
    except ConfigError as error:
        return TrainingConfig(), list(error.faults or (Fault((), error.message, error.fix),))


def _made(values: dict[str, Any], layout: str, model: type[Model]) -> tuple[Model | None, dict[Place, Place], list[Fault]]:
    """The configuration, where its fields come from, and what is wrong."""
    found: list[Fault] = []
    if layout == "tele_tron":
        fields, keys, faults = translate(values)
        found += faults
        stages: dict[Place, Place] = STAGES
    else:
        fields, keys, stages = values, dict(_places(values, LoaderConfig, ())), {}
    partly = bool(found)
    try:
        config = model(**fields)
    except ConfigError as error:
        for fault in error.faults or (Fault((), error.message, error.fix),):
            if not partly or len(fault.place) > 1:  # with a part of the fields, those that are left may not fit each other
                found.append(Fault(_back(fault.place, stages | keys), fault.message, fault.fix))
        return None, keys, found
    return (None if found else config), keys, found


def _places(values: dict[str, Any], model: type[BaseModel], above: Place) -> Iterator[tuple[Place, Place]]:
    """Places in a file that has gpupipe's layout: each is its own key."""
    for name, value in values.items():
        inner = stage_at(model, (name,))
        if isinstance(value, dict) and value and inner is not None:
            yield from _places(value, inner, (*above, name))
        else:
            yield (*above, name), (*above, name)


def _back(place: Place, keys: dict[Place, Place]) -> Place:
    """The key that stands for a place of gpupipe's layout, with what follows below it."""
    for length in range(len(place), 0, -1):
        if (key := keys.get(place[:length])) is not None:
            return key + place[length:]
    return place


def origin(config: StageConfig, place: Place, document: Document[Any] | None) -> str:
    """Where the value of a field comes from: ``file``, ``preset`` or ``default``."""
    part: Any = config
    for depth, name in enumerate(place):
        if name not in part.model_fields_set:
            return "default"
        presets = isinstance(part, TransformConfig) and part.preset is not None and name != "preset"
        if presets and (document is None or not document.names(place[: depth + 1])):
            return "preset"
        part = getattr(part, name)
    return "file" if document is not None else "default"
