"""Classes made as a program runs: no module has their names, so that pickle is told what made them instead."""

from __future__ import annotations

from typing import Any

import torch

MADE = "_gpupipe_made"
"""The attribute of such a class: (the function that makes it, its arguments)."""


def recipe(cls: type) -> Any:
    """A class as pickle can write it: itself, or what made it. Wrappers that made a subclass of it since are left out."""
    for one in cls.__mro__:
        made = vars(one).get(MADE)
        if made is not None:
            return made[0], tuple(recipe(part) if isinstance(part, type) else part for part in made[1])
    return cls


def reduced(made: Any, cls: type) -> Any:
    """What ``__reduce_ex__`` gave of an object of such a class, with its class as a recipe."""
    return (_blank, (recipe(cls),), *made[2:])


def _blank(found: Any) -> torch.nn.Module:
    cls = _class(found)
    made: torch.nn.Module = cls.__new__(cls)
    return made


def _class(found: Any) -> Any:
    if not isinstance(found, tuple):
        return found
    maker, parts = found
    return maker(*(_class(part) for part in parts))
