"""Somebody else's attention and MLP on this rank's shards: the same code as unsplit, which sees local weights and heads.

What it does not serve runs whole on every rank, with gathered weights, and so does a first use of each signature, to which the
split way is held.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from gpupipe.ops.sharded import cut, is_sharded
from gpupipe.ops.sharded.collectives import all_copied, copied, gathered, picked, summed
from gpupipe.telemetry import log
from gpupipe.train import statistics, switches
from gpupipe.train.fused import is_fused
from gpupipe.train.made import MADE
from gpupipe.train.parallel.plans import HEADS, Plan
from gpupipe.train.switches import SPLIT as STATE
from gpupipe.train.switches import STATE as FUSED
from gpupipe.train.verify import BOUNDS, _narrowest, _quiet, _watched, relative_error, shown, signature

_classes: dict[tuple[type, type], type[nn.Module]] = {}


@dataclass
class State:
    """What belongs to the split form of one module.

    Attributes:
        name: of the module in its model.
        plan: how it is split.
        group: the ranks that share it.
        ranks: how many they are.
        decided: for each signature, whether it runs split.
    """

    name: str
    plan: Plan
    group: Any
    ranks: int
    decided: dict[Hashable, bool] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Self:
        return replace(self, decided=dict(self.decided))  # copies of a model are split between the same ranks


class Split(nn.Module):
    """A way through a module on its shards, or on what is gathered from all.

    ``torch.compile`` leaves it as it is and compiles what is around it: it cannot follow DTensors' placements.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: State = self.__dict__[STATE]
        own: Any = self
        if not is_fused(self) or switches.as_written_here() or not switches.wanted(own.kind) or self._drops():
            return self._whole(args, kwargs)
        key = signature(args, kwargs)
        if key not in state.decided and not _watched() and not _capturing():
            state.decided[key] = self._check(args, kwargs)
        if not state.decided.get(key, True):
            return self._whole(args, kwargs)
        made = self._split(args, kwargs)
        return self._whole(args, kwargs) if made is NotImplemented else made

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One sum of gradients for each tensor that comes in, one sum for each that goes out."""
        raise NotImplementedError

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [
            (module, name, value.full_tensor())
            for module in self.modules()
            for name, value in module._parameters.items()
            if value is not None and isinstance(value, DTensor)
        ]
        with standing_in(values):
            return super().forward(*args, **kwargs)

    def _drops(self) -> bool:
        """Whether something is dropped between a layer by columns and the sum behind it."""
        return False

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether both ways give the same, for all ranks alike."""
        state: State = self.__dict__[STATE]
        with torch.no_grad(), _quiet(self), statistics.apart():
            made = self._split(args, kwargs)
            if made is NotImplemented:
                return False
            expected = self._whole(args, kwargs)
        pairs = list(zip(tree_flatten(made)[0], tree_flatten(expected)[0], strict=True))
        pairs = [(one, other) for one, other in pairs if isinstance(other, torch.Tensor) and other.is_floating_point()]
        worst = max((relative_error(one, other) for one, other in pairs), default=0.0)
        bound = BOUNDS[_narrowest(self, args, kwargs)]
        passed = torch.tensor([worst <= bound], dtype=torch.int32, device=pairs[0][1].device if pairs else None)
        dist.all_reduce(passed, dist.ReduceOp.MIN, group=state.group)
        if not passed.item():
            log.warning(
                "%s runs whole on each rank for %s: split, it is off by %.1e of its size, where %.1e is allowed; "
                "inputs or weights may differ between the ranks, which must be the same on all of them",
                state.name or "the model", shown(args, kwargs), worst, bound,
            )  # fmt: skip
        return bool(passed.item())


class SplitAttention(Split):
    """Heads shared out, queries, keys and values by rows, the layer behind by columns."""

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state: State = self.__dict__[STATE]
        own: Any = self
        args, kwargs = tree_map(lambda value: _into(value, state.group), (args, kwargs))
        values: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        behind: list[torch.Tensor | None] = []
        taken: set[int] = set()
        for name, how in state.plan.hows.items():
            layer: Any = self.get_submodule(name)
            piece = cut(f"{state.name}.{name}.weight", layer.weight)
            taken |= {id(layer.weight), id(getattr(layer, "bias", None))}
            if how == "norm":  # our ops see that it is split
                continue
            values.append((layer, "weight", piece.local))
            if how == "columns":
                behind.append(layer.bias)
                values.append((layer, "bias", None))
            elif layer.bias is not None:
                bias = layer.bias
                own_bias = cut("bias", bias).local if is_sharded(bias) else picked(bias, piece.parts, state.group)
                values.append((layer, "bias", own_bias))
        small = [
            (module, name, value)
            for module in self.modules()
            for name, value in module._parameters.items()
            if value is not None and id(value) not in taken
        ]
        if small:
            alike = all_copied([value for *_, value in small], state.group)
            values += [(module, name, value) for (module, name, _), value in zip(small, alike, strict=True)]
        with standing_in(values), self._fewer_heads(state.ranks):
            made = own.fused_forward(*args, **kwargs)
        if made is NotImplemented:
            return made
        outputs = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
        if not behind:
            return tree_map(lambda value: gathered(value, state.group) if isinstance(value, torch.Tensor) else value, made)
        biases = iter(behind if len(behind) == len(outputs) else [behind[0]] * len(outputs))
        return tree_map(lambda value: _added(value, biases, state.group) if isinstance(value, torch.Tensor) else value, made)

    @contextmanager
    def _fewer_heads(self, ranks: int) -> Iterator[None]:
        """The module as one of this rank's heads alone."""
        own = {name: getattr(self, name) for name in HEADS if isinstance(self.__dict__.get(name), int)}
        settings: dict[str, Any] = self.__dict__[FUSED].settings
        known: dict[str, Any] = {name: settings[name] for name in ("heads", "facts") if name in settings}
        self.__dict__.update({name: value // ranks for name, value in own.items()})
        if "heads" in known:
            settings["heads"] = known["heads"] // ranks
        if "facts" in known:  # what the module's numbers must still be
            settings["facts"] = tuple((name, value // ranks if name in own else value) for name, value in known["facts"])
        try:
            yield
        finally:
            self.__dict__.update(own)
            settings.update(known)

    def _drops(self) -> bool:
        return any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in self.modules())


class SplitMlp(Split):
    """The first layer by rows, the second by columns: our ops take both as they are."""

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own: Any = self
        return own.fused_forward(*args, **kwargs)


def install(module: nn.Module, mixin: type[Split], state: State) -> None:
    """Gives a module the split way."""
    module.__class__ = _split_class(mixin, type(module))
    module.__dict__[STATE] = state


def _split_class(mixin: type[Split], written: Any) -> type[nn.Module]:
    made = _classes.get((mixin, written))
    if made is None:
        names = {"__module__": written.__module__, "__doc__": written.__doc__, MADE: (_split_class, (mixin, written))}
        made = type(written)(written.__name__, (mixin, written), names)
        _classes[mixin, written] = made
    return made


def is_split(module: nn.Module) -> bool:
    """True for a module that has the split way."""
    return STATE in module.__dict__


@contextmanager
def standing_in(values: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Other tensors in the place of modules' own parameters."""
    kept = [(module, name, module._parameters[name]) for module, name, _ in values]
    for module, name, value in values:
        module._parameters[name] = value
    try:
        yield
    finally:
        for module, name, value in kept:
            module._parameters[name] = value


def _into(value: Any, group: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        return copied(value, group)
    return value


def _added(value: torch.Tensor, biases: Iterator[torch.Tensor | None], group: Any) -> torch.Tensor:
    made, bias = summed(value, group), next(biases)
    return made if bias is None else made + bias.to(made.dtype)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
