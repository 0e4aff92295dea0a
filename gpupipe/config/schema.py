"""The JSON Schema of a configuration's file, for editors: every layout, with what each field is for."""

from __future__ import annotations

import re
from typing import Any

from gpupipe.config import PRESETS, LoaderConfig
from gpupipe.config.document import OWN_KEYS, ROOTS, TELETRON_KEYS
from gpupipe.config.teletron import SHARED, TeleTronConfig
from gpupipe.config.training import TRAINING_KEYS, TrainingConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROLE = re.compile(r":\w+:`~?([^`]*)`")
"""A cross-reference of reStructuredText."""


def schema() -> dict[str, Any]:
    """What a file may hold: gpupipe's own fields, alone or under ``gpupipe``, or TeleTron's under either root.

    A file that it takes may still be refused for fields that do not fit each other.
    """
    models: dict[str, Any] = {}
    for model in (LoaderConfig, TeleTronConfig):
        made = model.model_json_schema()
        models |= made.pop("$defs")
        models[model.__name__] = made
    step = TrainingConfig.model_json_schema()
    models |= step.pop("$defs")
    for model in (LoaderConfig, TeleTronConfig):  # a file has them side by side
        models[model.__name__]["properties"] |= step["properties"]
    own, teletron = {"$ref": "#/$defs/LoaderConfig"}, {"$ref": "#/$defs/TeleTronConfig"}
    presets = {"enum": list(PRESETS)}
    models["LoaderConfig"]["properties"]["transform"]["anyOf"] = [presets, {"$ref": "#/$defs/TransformConfig"}]
    models["LoaderConfig"]["properties"]["transform"].pop("$ref")
    models["TransformConfig"]["properties"]["preset"]["anyOf"] = [presets, {"type": "null"}]
    clips = models["CacheConfig"]["properties"]["clips"]
    clips["enum"] = [*clips["enum"], False]  # as YAML 1.1 reads the bare word off
    clips.pop("type")
    pipeline = models["DataPipelineConfig"]["properties"]["transform"]
    pipeline["anyOf"] = [presets, *(part for part in pipeline["anyOf"] if part.get("type") != "string")]
    roots = {"gpupipe": [own, teletron, {"type": "null"}], "tele_tron": [teletron, {"type": "null"}]}
    whole = {
        "$schema": _DIALECT,
        "title": "gpupipe",
        "description": "The configuration of a gpupipe.VideoLoader, and of the training step beside it.",
        "anyOf": [own, {"type": "null"}, *(_under(root, layouts) for root, layouts in roots.items())],
        "$defs": models,
    }
    plain = _plain(whole)
    assert isinstance(plain, dict)
    return plain


def _under(root: str, layouts: list[dict[str, str]]) -> dict[str, Any]:
    """A file with its settings below a root: beside it may stand what is nobody's here."""
    strangers = sorted((OWN_KEYS | TELETRON_KEYS | TRAINING_KEYS | set(SHARED) | set(ROOTS)) - {root})
    return {
        "type": "object",
        "properties": {root: {"anyOf": layouts}},
        "required": [root],
        "not": {"anyOf": [{"required": [name]} for name in strangers]},
    }


def _plain(part: Any) -> Any:
    """The same with descriptions as people read them."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {name: _plain(value) for name, value in part.items()}
    if isinstance(made.get("description"), str):
        made["description"] = _ROLE.sub(r"`\1`", " ".join(made["description"].replace("``", "`").split()))
    return made
