"""How this process deals with stores far away; handed to the processes that it starts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpupipe.errors import ConfigError

VARIABLE = "GPUPIPE_REMOTE"
"""Of the environment: a JSON object of the fields below, for what has no configuration of its own."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Settings of :class:`gpupipe.config.RemoteConfig`, which has their units and ranges."""

    cache_gib: float = 8.0
    attempts: int = 5
    timeout_seconds: float = 30.0
    connections: int = 16


_current: Remote | None = None


def current() -> Remote:
    """What was set last, else what the environment says, else the defaults."""
    return _current if _current is not None else _of_environment()


def _of_environment() -> Remote:
    kinds = {"cache_gib": float, "attempts": int, "timeout_seconds": float, "connections": int}
    text = os.environ.get(VARIABLE) or "{}"
    try:
        return Remote(**{field: kinds[field](value) for field, value in json.loads(text).items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        example = '{"cache_gib": 8}'
        raise ConfigError(
            f"{VARIABLE}={text!r} cannot be read ({error})", fix=f"write {example}; fields: {', '.join(kinds)}"
        ) from error


def use(**fields: Any) -> None:
    """Sets some of the fields, for the whole process."""
    global _current
    _current = replace(current(), **fields)


def environment() -> dict[str, str]:
    """The variables of a process that is to do as this one does."""
    return {VARIABLE: json.dumps(asdict(current()))}
