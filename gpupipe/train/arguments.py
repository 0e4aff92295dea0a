"""One clear error for an argument of the wrong kind, naming it, what came and what fits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpupipe.config.ranges import gigabytes
from gpupipe.errors import ConfigError

T = TypeVar("T")


def of(kind: type[T], value: Any, name: str, fix: str) -> T:
    """A value of this class.

    Raises:
        ConfigError: for anything else.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {shown(value)}", fix=fix)
    return value


def a_model(value: Any, name: str = "model") -> torch.nn.Module:
    """A module."""
    return of(torch.nn.Module, value, name, f"give {name} a torch.nn.Module")


def a_tensor(value: Any, name: str) -> torch.Tensor:
    """A tensor."""
    return of(torch.Tensor, value, name, f"give {name} a tensor")


def a_function(value: Callable[..., Any], name: str, does: str) -> None:
    """What can be called."""
    if not callable(value):
        raise ConfigError(f"{name} is {shown(value)}, which cannot be called", fix=f"give {name} a function that {does}")


def a_mapping(value: Any, name: str, fix: str) -> Mapping[Any, Any]:
    """A mapping, as ``state_dict()`` gives it."""
    return of(Mapping, value, name, fix)  # type: ignore[type-abstract]


def whole(value: Any, name: str, least: int) -> None:
    """A whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {shown(value)}, no whole number", fix=f"give {name} a whole number from {least} on")
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}", fix=f"give {name} a whole number from {least} on")


def a_number(value: Any, name: str, fits: str) -> None:
    """A finite number; what else it must be, the caller says in ``fits`` and looks after."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {shown(value)}", fix=f"{name} is {fits}")


def a_budget(value: Any, name: str) -> int:
    """Bytes of a budget: a number of GB (10^9 bytes), or an amount with its unit such as ``"60GB"``."""
    fix = "give GB above 0, or an amount with its unit such as '60GB'"
    found = gigabytes(value)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ConfigError(f"{name}={shown(value)} is no budget", fix=fix)
    return round(found * 1e9)


def a_device(value: Any, name: str = "device") -> torch.device:
    """What torch takes for a device."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} is {shown(value)}", fix="give 'cpu', 'cuda', 'cuda:1' or a torch.device") from error


def a_path(value: Any, name: str = "path") -> Path:
    """A place in the file system."""
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ConfigError(f"{name} is {shown(value)}", fix=f"give {name} the name of a file")
    return Path(value)


def names(value: Any, name: str) -> tuple[str, ...]:
    """Several names; a single one is not taken apart into letters."""
    odd = isinstance(value, str | torch.Tensor) or not isinstance(value, Collection)
    if odd or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{name} is {shown(value)}", fix=f"give {name} a list of names, as {name}=['…']")
    return tuple(value)


def several(value: Any, name: str, what: str) -> Iterable[Any]:
    """What can be gone through."""
    if isinstance(value, str | bytes | type) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise ConfigError(f"{name} is {shown(value)}", fix=f"give {name} {what}")
    return value


def without_scale(**given: Any) -> None:
    """Nothing, where there is no scale beside it: it would be left out in silence."""
    for name, value in given.items():
        if value is not None:
            other = name.replace("shift", "scale")
            raise ConfigError(f"{name} without {other}", fix=f"give {other} too: zeros of the same shape change nothing")


def shown(value: Any) -> str:
    """A value as a message names it: short ones as they are, all others by their class."""
    if isinstance(value, str | int | float | bool | type(None)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"a {type(value).__name__}"
