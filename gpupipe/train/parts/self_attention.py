"""Self-attention as vision transformers have it: one layer or three for queries, keys and values, and perhaps one behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gpupipe.train.fused import Fused, Left
from gpupipe.train.layout import joining_said
from gpupipe.train.parts.attention import attended, headed, norm_over, normed_and_turned, project
from gpupipe.train.parts.probe import Stub, Trial, attempt, passed, same, silent
from gpupipe.train.report import Entry

_HEADS = ("num_heads", "num_attention_heads")
"""What most call their number of heads: with one of these and the usual layers a module claims to be attention, so that the
report says why it is none of ours. Others are looked at all the same."""
_SIDES = (
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
_LAST_DROP = "proj_drop"
"""The dropout behind the last layer. Where any other drops something, the module runs as written."""
_TOKENS = 5


class _Attends(Left):
    """Why a module is left that is attention for certain, by what comes out."""


def _first(x: torch.Tensor) -> torch.Tensor:
    return x


def _second(x: torch.Tensor) -> torch.Tensor:
    return 0.7 * x.flip(-1)


def _third(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1) - 0.2


def _all(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((_first(x), _second(x), _third(x)), -1)


def _attention(x: torch.Tensor, heads: int) -> torch.Tensor:
    """What attention of so many heads makes of the stubs' queries, keys and values."""
    q, k, v = (headed(side(x), heads).transpose(1, 2) for side in (_first, _second, _third))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _projections(linears: dict[str, nn.Linear]) -> tuple[str, ...] | None:
    """The layer of queries, keys and values together, or those of each; None where there are none."""
    if "qkv" in linears:
        return ("qkv",)
    packed = [name for name, one in linears.items() if one.out_features == 3 * one.in_features]
    if len(packed) == 1:
        return (packed[0],)
    return next((names for names in _SIDES if set(names) <= set(linears)), None)


def _counts(module: nn.Module, width: int) -> list[int]:
    """What may be the number of heads: the module's whole numbers that divide its width, and the width by these, for a size of
    a head; those with the usual names first."""
    usual = [getattr(module, name, None) for name in _HEADS]
    found = [value for value in [*usual, *vars(module).values()] if type(value) is int and value > 0 and width % value == 0]
    return list(dict.fromkeys([*found, *(width // value for value in found)]))


def _tokens(width: int) -> torch.Tensor:
    """What a module is tried on."""
    return torch.linspace(-2, 2, _TOKENS * width).view(1, _TOKENS, width).mul(7).sin()


def _stubs(inside: tuple[str, ...]) -> dict[str, Stub]:
    return dict(zip(inside, (_all,) if len(inside) == 1 else (_first, _second, _third), strict=True))


def _between(trial: Trial, names: list[str]) -> tuple[str, ...]:
    """What queries go through, and what keys do, whatever the two are called; nothing where there is nothing between.

    Raises:
        Left: for anything else that the module holds.
    """
    x = trial.given[0]
    found: dict[int, str] = {}
    for name in names:
        inputs = [value for called, value in trial.events if called == name]
        sides = [number for number, side in enumerate((_first(x), _second(x))) if _same_values(inputs, side)]
        if len(sides) != 1 or sides[0] in found:
            raise _Attends(f"it holds {name}, which is neither projection nor norm of queries or of keys")
        found[sides[0]] = name
    if len(found) == 1:
        raise _Attends(f"it holds {names[0]}, which queries or keys alone go through")
    return tuple(found[number] for number in sorted(found))


def _same_values(inputs: list[torch.Tensor], side: torch.Tensor) -> bool:
    """Whether a layer was called once, on the values of a side, however they lay."""
    if len(inputs) != 1 or inputs[0].numel() != side.numel():
        return False
    return same(inputs[0].flatten().sort().values, side.flatten().sort().values)


def _drops_nothing_else(module: nn.Module, settings: dict[str, Any], width: int) -> bool:
    """Whether in training it does no more than otherwise but for what its ``Dropout`` layers do."""
    names = (*settings["behind"], *settings["norms"])
    others = [name for name, _ in module.named_children() if name in names]
    x = _tokens(width)
    with _nothing_dropped(module):
        trial = attempt(module, x, without=_stubs(settings["inside"]) | dict.fromkeys(others, passed), training=True)
    result = trial.result if trial is not None else None
    return same(result[0] if isinstance(result, tuple) else result, _attention(x, settings["heads"]))


@contextmanager
def _nothing_dropped(module: nn.Module) -> Iterator[None]:
    """With all that is known to drop at 0: each call looks at that by itself."""
    drops: list[tuple[Any, str, float]] = [(one, "p", one.p) for one in module.children() if isinstance(one, nn.Dropout)]
    if isinstance(found := getattr(module, "dropout_prob", None), float):
        drops.append((module, "dropout_prob", found))
    for one, name, _ in drops:
        setattr(one, name, 0.0)
    try:
        yield
    finally:
        for one, name, share in drops:
            setattr(one, name, share)


def _facts(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The module's own numbers and switches, which its forward may read."""
    kinds = (bool, int, float)
    return tuple(
        (name, value) for name, value in vars(module).items() if type(value) in kinds and name != "training" and name[0] != "_"
    )


class FusedSelfAttention(Fused):
    """qkv, or query, key and value; norms of queries and keys; attention; and a layer behind it."""

    kind = "attention"

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        children: dict[str, Any] = dict(module.named_children())
        linears = {name: one for name, one in children.items() if isinstance(one, nn.Linear)}
        inside = _projections(linears)
        if inside is None:
            return None
        width = linears[inside[0]].in_features
        claims = inside in (("qkv",), _SIDES[0]) and any(isinstance(getattr(module, name, None), int) for name in _HEADS)
        counts = _counts(module, width)
        if not counts or any(one.in_features != width for one in (linears[name] for name in inside)):
            return None
        try:
            settings = cls._settings(module, children, linears, inside, width, counts)
            if settings is not None and not _drops_nothing_else(module, settings, width):
                raise _Attends("in training it does more than otherwise, which no Dropout layer of its own does")
            return settings
        except Left as left:
            if claims or isinstance(left, _Attends):
                raise
            return None

    @classmethod
    def _settings(
        cls,
        module: nn.Module,
        children: dict[str, Any],
        linears: dict[str, nn.Linear],
        inside: tuple[str, ...],
        width: int,
        counts: list[int],
    ) -> dict[str, Any] | None:
        """What there is to know of it, if it is attention of so many heads as one of ``counts``.

        Raises:
            Left: why it is none of ours.
        """
        if "qkv" in linears and (between := [name for name in children if name.startswith("pool")]):
            raise Left(f"queries, keys and values go through {', '.join(between)} between their product and attention")
        if own := [name for name, _ in module.named_parameters(recurse=False)]:
            if "qkv" in linears:
                raise Left(f"it has {', '.join(own)} of its own, which take part in its scores")
            return None
        stubs = _stubs(inside)
        behind = [name for name in linears if name not in inside]
        between = [
            name for name, one in children.items() if name not in linears and not isinstance(one, nn.Dropout | nn.Identity)
        ]
        stubs |= dict.fromkeys((*behind, *between, *(name for name in (_LAST_DROP,) if name in children)), passed)
        if len(behind) > 1:
            raise Left("it holds more than projections, norms of queries and keys, and a layer behind")
        x = _tokens(width)
        trial = attempt(module, x, without=stubs)
        if trial is None:
            return None
        result = trial.result if isinstance(trial.result, tuple) else (trial.result,)
        heads = next((count for count in counts if same(result[0], _attention(x, count))), None)
        if heads is None:
            raise Left("it does something else than attention of ours")
        normed = _between(trial, between)
        norms = {norm_over(children[name], heads, width // heads) for name in normed} or {"none"}
        if len(norms) > 1 or None in norms:
            raise _Attends(
                f"its norms of queries and keys, {' and '.join(normed)}, are no two RMS norms or two layer norms over a head "
                "or all heads, with weight, bias and eps as attributes"
            )
        (norm,) = norms
        if len(result) > 2 or any(value is not None for value in result[1:]):
            raise _Attends("it gives its probabilities back, which ours do not keep")
        last = trial.order[-1:] == [_LAST_DROP]
        first, second = len(inside), len(inside) + len(normed)
        called = [name for name in trial.order if name in (*inside, *normed, *behind)]
        if (sorted(called[:first]), sorted(called[first:second]), called[second:]) != (sorted(inside), sorted(normed), behind):
            raise _Attends("its layers are called in another order than those of ours")
        return {
            "heads": heads, "inside": inside, "behind": behind, "norm": norm, "norms": normed,
            "gives": len(result) if isinstance(trial.result, tuple) else 0, "way": cls._way(module),
            "last_drop": last and bool(behind), "facts": _facts(module), "count": len(children),
            "widths": tuple(linears[name].out_features for name in inside),
            "others": tuple((name, type(one)) for name, one in children.items() if name not in (*inside, *behind)),
        }  # fmt: skip

    @staticmethod
    def _way(module: Any) -> str | None:
        """How transformers' configuration has it work out attention."""
        return getattr(getattr(module, "config", None), "_attn_implementation", None)

    @classmethod
    def said(cls, settings: dict[str, Any]) -> str:
        return f"{cls.kind} (self; norm {settings['norm']})"

    @classmethod
    def layouts(cls, module: nn.Module, name: str) -> list[Entry]:
        fused: Any = module
        inside = fused.settings["inside"]
        if len(inside) == 1:
            return [Entry(name, "q, k, v", "packed, as its one layer makes them")]
        layer: Any = getattr(fused, inside[0])
        return [Entry(name, "q, k, v", joining_said(layer.out_features, layer.weight.element_size()))]

    def fused_forward(self, *args: Any, **others: Any) -> Any:
        settings = self.settings
        given = [value for value in (*args[1:], *others.values()) if value is not None and value is not False]
        if not args or given or args[0].dim() != 3 or self._way(self) != settings["way"] or self._drops() or self._changed():
            return NotImplemented
        x: torch.Tensor = args[0]
        heads, norm = settings["heads"], settings["norm"]
        layers = [getattr(self, name) for name in settings["inside"]]
        if len(layers) == 3:
            qkv = project(x, (layers[0], layers[1], layers[2]), heads, packed=norm.startswith("rms"))
        else:
            qkv = layers[0](x).unflatten(-1, (3, heads, -1))  # no view(…, -1): there may be no clips
        q_norm, k_norm = (getattr(self, name) for name in settings["norms"]) if settings["norms"] else (None, None)
        made = attended(*normed_and_turned(qkv, norm, q_norm, k_norm, None, None))
        for name in settings["behind"]:
            made = getattr(self, name)(made)
        if settings["last_drop"]:
            made = getattr(self, _LAST_DROP)(made)
        return (made, *[None] * (settings["gives"] - 1)) if settings["gives"] else made

    def _drops(self) -> bool:
        """True where probabilities are dropped, which torch's attention would have to do."""
        if not self.training:
            return False
        last = _LAST_DROP if self.settings["last_drop"] else ""
        drops = (one.p for name, one in self.named_children() if isinstance(one, nn.Dropout) and name != last)
        return bool(getattr(self, "dropout_prob", 0.0) or any(drops))

    def _changed(self) -> bool:
        """True where it is no longer what was looked at: a number or a switch of its own, a layer's width, or a layer in it."""
        settings = self.settings
        if any(getattr(self, name, None) != value for name, value in settings["facts"]):
            return True
        widths = zip(settings["inside"], settings["widths"], strict=True)
        if any(getattr(getattr(self, name), "out_features", width) != width for name, width in widths):
            return True
        if len(self._modules) != settings["count"]:
            return True
        for name, kind in settings["others"]:
            one = getattr(self, name, None)
            if type(one) is not kind and not (isinstance(one, kind) and isinstance(one, Fused)):
                return True
        uncalled = (getattr(self, name) for name, kind in settings["others"] if not issubclass(kind, nn.Dropout))
        return not torch.compiler.is_compiling() and not silent(*uncalled)
