"""Which parameters of a module are split, and how: by the module's own plan, or by what is found in it.

A module over :mod:`gpupipe.ops` says it itself, as ``split_plan``: names within it, and for each

- ``"rows"``: the layer's result is split; ``"rows*3"`` for queries, keys and values in one layer, ``"rows*2"`` for a gated
  activation's two halves;
- ``"columns"``: the layer takes what is split, and its result is whole;
- ``"heads"``: a parameter that all ranks have, used on each rank's heads: a norm's over each head;
- ``"norm"``: the weight of an RMS norm over all heads, of which each rank has those of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.ops import activations
from gpupipe.train.fused import Fused, Left, is_fused
from gpupipe.train.modules import GridAttention, Mlp
from gpupipe.train.parts.mlps import FusedGatedMLP, FusedMLP
from gpupipe.train.parts.probe import plain
from gpupipe.train.parts.processed import FusedProcessed
from gpupipe.train.parts.self_attention import FusedSelfAttention

HOWS = ("rows", "rows*2", "rows*3", "columns", "heads", "norm")
HEADS = ("heads", "num_heads", "num_attention_heads")
"""What modules call how many they have."""
_KINDS: tuple[type[Fused], ...] = (FusedProcessed, FusedSelfAttention, FusedGatedMLP, FusedMLP)


@dataclass
class Plan:
    """How one module is split.

    Attributes:
        hows: by the names of layers and parameters within it.
        heads: how many it has; None for no attention.
        kind: how somebody else's module runs on its shards; None for one over our ops, which take them as they are.
        settings: what the recogniser of ``kind`` found.
    """

    hows: dict[str, str] = field(default_factory=dict)
    heads: int | None = None
    kind: type[Fused] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def plan_of(module: nn.Module) -> Plan | None:
    """The plan of a module; None for one that is no attention and no MLP.

    Raises:
        Left: for one that would be split but for a detail.
        ConfigError: for a ``split_plan`` with a word that does not exist.
    """
    own = _own(module)
    if own is not None:
        for name, how in own.items():
            if how not in HOWS:
                raise ConfigError(
                    f"split_plan of {type(module).__name__} says {how!r} of {name}", fix=f"one of {', '.join(HOWS)}"
                )
        attends = any(how in ("rows*3", "heads", "norm") for how in own.values())
        heads = next((getattr(module, name) for name in HEADS if isinstance(getattr(module, name, None), int)), None)
        return Plan(dict(own), heads if attends else None)
    for kind in _KINDS:
        settings = _settings(module, kind)
        if settings is not None:
            return _found(module, kind, settings)
    return None


def attends(module: nn.Module) -> bool:
    """True for a module that is known as attention."""
    try:
        plan = plan_of(module)
    except Left:
        return any(isinstance(getattr(module, name, None), int) for name in HEADS)
    return plan is not None and plan.heads is not None


def _own(module: nn.Module) -> dict[str, str] | None:
    if isinstance(module, Mlp):
        gated = activations.split(activations.known(module.activation, gated=True))[1]
        return {"fc1": "rows*2" if gated else "rows", "fc2": "columns"}
    if isinstance(module, GridAttention):
        norms = {f"{name}.weight": "heads" for name in ("q_norm", "k_norm") if getattr(module, name) is not None}
        return {"qkv": "rows*3", "proj": "columns", **norms}
    found: dict[str, str] | None = getattr(module, "split_plan", None)
    return found if isinstance(found, dict) and found else None


def _settings(module: Any, kind: type[Fused]) -> dict[str, Any] | None:
    if is_fused(module):
        return module.settings if isinstance(module, kind) else None
    return kind.recognise(module)


def _found(module: nn.Module, kind: type[Fused], settings: dict[str, Any]) -> Plan:
    if kind is FusedGatedMLP:
        raise Left("it is a gated MLP of three layers, which are not split")
    if kind is FusedMLP:
        one, two = (".".join(settings[name]) for name in ("linear1", "linear2"))
        gated = activations.split(settings["activation"])[1]
        plan = Plan({one: "rows*2" if gated else "rows", two: "columns"}, None, kind, settings)
    elif kind is FusedProcessed:
        plan = _processed(module, settings)
    else:
        layers = dict.fromkeys(settings["inside"], "rows*3" if len(settings["inside"]) == 1 else "rows")
        norms = _norms(module, settings["norm"], *settings["norms"])
        hows = {**layers, **dict.fromkeys(settings["behind"], "columns"), **norms}
        plan = Plan(hows, settings["heads"], kind, settings)
    odd = [name for name, how in plan.hows.items() if how != "norm" and not plain(module.get_submodule(name))]
    if odd:
        raise Left(f"its layer {odd[0]} is no plain Linear")
    return plan


def _norms(module: Any, norm: str, *names: str) -> dict[str, str]:
    """Norms over all heads, which are split with them."""
    if not norm.endswith("full"):
        return {}
    if norm != "rms full" or any(getattr(module, name).weight is None for name in names):
        raise Left("its norms of queries and keys go over all heads, and are no RMS norms with weights")
    return dict.fromkeys(names, "norm")


def _processed(module: Any, settings: dict[str, Any]) -> Plan:
    hows = _norms(module, settings["norm"], "norm_q", "norm_k")
    hows |= _norms(module, settings["text norm"], "norm_added_q", "norm_added_k")
    for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
        if getattr(module, name, None) is not None:
            hows[name] = "rows"
    out = getattr(module, "to_out", None)
    if isinstance(out, nn.ModuleList):
        if not isinstance(out[0], nn.Linear) or any(True for one in out[1:] for _ in one.parameters()):
            raise Left("behind its attention is more than one layer")
        hows["to_out.0"] = "columns"
    if getattr(module, "to_add_out", None) is not None:
        hows["to_add_out"] = "columns"
    return Plan(hows, module.heads, FusedProcessed, settings)
