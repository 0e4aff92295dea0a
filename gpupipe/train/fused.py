"""A module that someone else wrote, with another way through it: its class becomes a subclass whose forward uses our ops.

The module itself stays: its parameters, names, hooks, mode and place. So state_dict, optimizers, ``isinstance``, wrapping rules
by class and whoever else holds it see what they saw before, and the way as written is always there to fall back to.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gpupipe.train import statistics, switches
from gpupipe.train.made import MADE, reduced
from gpupipe.train.report import Entry
from gpupipe.train.switches import STATE
from gpupipe.train.verify import decide, signature

_classes: dict[tuple[type, type], type[torch.nn.Module]] = {}


class Left(Exception):
    """Why a module that looks like one to be fused is left as it is."""


@dataclass
class State:
    """What belongs to the fused form of one module.

    Attributes:
        name: of the module in its model.
        verify: whether each new signature is checked.
        bound: the relative error allowed; None: by type.
        settings: what its recogniser found.
        on: False: it runs as written.
        decided: for each signature, whether the fused way runs.
        passed: how many signatures passed the check, by all but their sizes.
        unserved: signatures that the fused way did not serve, for arguments or a state that they do not show.
    """

    name: str
    verify: bool
    bound: float | None
    settings: dict[str, Any]
    on: bool = True
    decided: dict[Hashable, bool] = field(default_factory=dict)
    passed: dict[Hashable, int] = field(default_factory=dict)
    unserved: set[Hashable] = field(default_factory=set)
    within: list[tuple[dict[str, Any], tuple[Any, ...]]] = field(default_factory=list)
    """The children of each module inside, as they were, where the fused way goes by them: with another one in the place of one
    it is not what was recognised."""

    @property
    def unchanged(self) -> bool:
        """Whether all of them are still there, and no others."""
        for children, were in self.within:
            if len(children) != len(were):
                return False
            for child, was in zip(children.values(), were, strict=True):
                if child is not was:
                    return False
        return True


class Fused(torch.nn.Module):
    """A way through modules of one kind. Subclasses say which modules they serve, and how."""

    kind: ClassVar[str]
    whole: ClassVar[bool] = True
    """Nothing in it is fused by itself: the fused way takes what it needs from the modules within."""
    reads_layers: ClassVar[bool] = False
    """The fused way goes by which layers were there when it was recognised, and calls none of them."""

    @classmethod
    def recognise(cls, module: torch.nn.Module) -> dict[str, Any] | None:
        """What the fused way needs to know of this module; None for one that it does not serve.

        Raises:
            Left: for one that it would serve but for a detail.
        """
        raise NotImplementedError

    @classmethod
    def said(cls, settings: dict[str, Any]) -> str:
        """How a module with these settings runs, for the report."""
        shown = [value for value in settings.values() if isinstance(value, str)]
        return f"{cls.kind}{f' ({chr(44).join(shown)})' if shown else ''}"

    @classmethod
    def layouts(cls, module: torch.nn.Module, name: str) -> list[Entry]:
        """How tensors lie on its edges, and why."""
        return []

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The fused way; ``NotImplemented`` for arguments, or in a state, that it does not serve."""
        raise NotImplementedError

    def written_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The way as written, for all that is within too."""
        with switches.as_written():
            return super().forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: State = self.__dict__[STATE]
        if torch.compiler.is_compiling():
            if not state.on or not switches.wanted(self.kind) or not all(state.decided.values()):
                return super().forward(*args, **kwargs)
            made = self.fused_forward(*args, **kwargs)
            return super().forward(*args, **kwargs) if made is NotImplemented else made
        if switches.as_written_here():
            return super().forward(*args, **kwargs)
        if not state.unchanged:
            statistics.written[self.kind, "a layer in it was replaced"] += 1
            return super().forward(*args, **kwargs)
        if not state.on or not switches.wanted(self.kind):
            statistics.written[self.kind, "switched off"] += 1
            return super().forward(*args, **kwargs)
        key = signature(args, kwargs) if state.verify else None
        unknown = state.verify and key not in state.decided
        if unknown and key not in state.unserved:
            decide(self, state, key, args, kwargs)
        if state.verify and not state.decided.get(key, True):
            statistics.written[self.kind, "did not pass the check"] += 1
            return super().forward(*args, **kwargs)
        made = self.fused_forward(*args, **kwargs)
        if made is NotImplemented:
            statistics.written[self.kind, "arguments not served"] += 1
            return super().forward(*args, **kwargs)
        if unknown and key in state.unserved:  # what was not served before is now: hooks have gone, say
            state.unserved.discard(key)
            if not decide(self, state, key, args, kwargs):
                statistics.written[self.kind, "did not pass the check"] += 1
                return super().forward(*args, **kwargs)
        statistics.fused[self.kind] += 1
        return made

    @property
    def settings(self) -> dict[str, Any]:
        """What the recogniser found."""
        found: dict[str, Any] = self.__dict__[STATE].settings
        return found

    def _get_name(self) -> str:
        return f"Fused{type(self).__name__}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made here have no place that pickle could name."""
        return reduced(super().__reduce_ex__(max(2, int(protocol))), type(self))


def install(module: torch.nn.Module, mixin: type[Fused], state: State) -> None:
    """Gives a module the fused way."""
    module.__class__ = _fused_class(mixin, type(module))
    if mixin.reads_layers:
        state.within = [(part._modules, tuple(part._modules.values())) for part in module.modules() if part._modules]
    module.__dict__[STATE] = state


def remove(module: torch.nn.Module) -> None:
    """Gives a fused module its class back, also under wrappers that made a subclass of it since, as ``fully_shard`` does."""
    module.__class__ = _without(type(module))
    module.__dict__.pop(STATE, None)


def is_fused(module: torch.nn.Module) -> bool:
    """True for a module that has the fused way."""
    return STATE in module.__dict__


def _fused_class(mixin: type, written: type) -> type[torch.nn.Module]:
    made = _classes.get((mixin, written))
    if made is None:
        names = {"__module__": written.__module__, "__qualname__": written.__qualname__, "__doc__": written.__doc__}
        made = type(written)(written.__name__, (mixin, written), {**names, MADE: (_fused_class, (mixin, written))})
        _classes[mixin, written] = made
    return made


def _without(cls: type) -> Any:
    maker, parts = vars(cls).get(MADE, (None, ()))
    if maker is _fused_class:
        return parts[1]
    if maker is not None:  # of another part of gpupipe, round the fused class
        return maker(*(_without(part) if isinstance(part, type) else part for part in parts))
    bases = tuple(_without(base) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, names)
