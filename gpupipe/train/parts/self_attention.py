"""Self-attention as vision transformers have it: one layer or three for queries, keys and values, and perhaps one behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gpupipe.train.fused import Fused, Left
from gpupipe.train.layout import joining_said
from gpupipe.train.parts.attention import attended, headed, norm_over, normed_and_turned, project
from gpupipe.train.parts.probe import Stub, attempt, passed, same
from gpupipe.train.report import Entry

_HEADS = ("num_heads", "num_attention_heads")
_NORMS = ("q_norm", "k_norm")
_TOKENS = 5


def _first(x: torch.Tensor) -> torch.Tensor:
    return x


def _second(x: torch.Tensor) -> torch.Tensor:
    return 0.7 * x.flip(-1)


def _third(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1) - 0.2


def _all(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((_first(x), _second(x), _third(x)), -1)


class FusedSelfAttention(Fused):
    """qkv, or query, key and value; norms of queries and keys; attention; and a layer behind it."""

    kind = "attention"
    q_norm: Any
    k_norm: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        children: dict[str, Any] = dict(module.named_children())
        linears = {name: one for name, one in children.items() if isinstance(one, nn.Linear)}
        heads = next((getattr(module, name) for name in _HEADS if isinstance(getattr(module, name, None), int)), None)
        if not linears or heads is None:
            return None
        if "qkv" in linears and (between := [name for name in children if name.startswith("pool")]):
            raise Left(f"queries, keys and values go through {', '.join(between)} between their product and attention")
        if own := [name for name, _ in module.named_parameters(recurse=False)]:
            if "qkv" in linears:
                raise Left(f"it has {', '.join(own)} of its own, which take part in its scores")
            return None
        stubs: dict[str, Stub]
        if "qkv" in linears:
            inside: tuple[str, ...] = ("qkv",)
            width = linears["qkv"].out_features // 3
            stubs = {"qkv": _all}
        elif {"query", "key", "value"} <= set(linears):
            inside, width = ("query", "key", "value"), linears["query"].out_features
            stubs = {"query": _first, "key": _second, "value": _third}
        else:
            return None
        if any(linears[name].in_features != width for name in inside) or width % heads:
            return None
        behind = [name for name in linears if name not in inside]
        stubs |= dict.fromkeys((*behind, *(name for name in _NORMS if name in children)), passed)
        known = {*stubs, *(name for name, one in children.items() if isinstance(one, nn.Dropout | nn.Identity))}
        if len(behind) > 1 or not set(children) <= known:
            raise Left("it holds more than projections, norms of queries and keys, and a layer behind")
        norms = [norm_over(children.get(name), heads, width // heads) for name in _NORMS]
        if norms[0] is None or norms[0] != norms[1]:
            raise Left("its norms of queries and keys are none of ours")
        x = torch.linspace(-2, 2, _TOKENS * width).view(1, _TOKENS, width).mul(7).sin()
        trial = attempt(module, x, without=stubs)
        q, k, v = (headed(side(x), heads).transpose(1, 2) for side in (_first, _second, _third))
        made = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if trial is None:
            return None
        result = trial.result if isinstance(trial.result, tuple) else (trial.result,)
        if not same(result[0], made):
            raise Left("it does something else than attention of ours")
        if len(result) > 2 or any(value is not None for value in result[1:]):
            raise Left("it gives its probabilities back, which ours do not keep")
        return {
            "heads": heads, "inside": inside, "behind": behind, "norm": norms[0],
            "gives": len(result) if isinstance(trial.result, tuple) else 0, "way": cls._way(module),
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
        layer: Any = getattr(module, "query", None)
        if layer is None:
            return [Entry(name, "q, k, v", "packed, as its one layer makes them")]
        return [Entry(name, "q, k, v", joining_said(layer.out_features, layer.weight.element_size()))]

    def fused_forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        settings = self.settings
        given = [value for value in (*rest, *others.values()) if value is not None and value is not False]
        if given or x.dim() != 3 or self._way(self) != settings["way"] or self._drops():
            return NotImplemented
        heads, norm = settings["heads"], settings["norm"]
        layers = [getattr(self, name) for name in settings["inside"]]
        if len(layers) == 3:
            qkv = project(x, (layers[0], layers[1], layers[2]), heads, packed=norm.startswith("rms"))
        else:
            qkv = layers[0](x).unflatten(-1, (3, heads, -1))  # no view(…, -1): there may be no clips
        q_norm, k_norm = (getattr(self, name, None) for name in _NORMS)
        made = attended(*normed_and_turned(qkv, norm, q_norm, k_norm, None, None))
        for name in settings["behind"]:
            made = getattr(self, name)(made)
            made = self._dropped(made)
        return (made, *[None] * (settings["gives"] - 1)) if settings["gives"] else made

    def _drops(self) -> bool:
        """True where probabilities are dropped, which torch's attention would have to do."""
        if not self.training:
            return False
        return bool(getattr(self, "dropout_prob", 0.0) or getattr(getattr(self, "attn_drop", None), "p", 0.0))

    def _dropped(self, made: torch.Tensor) -> torch.Tensor:
        drop = getattr(self, "proj_drop", None)
        return made if drop is None else drop(made)  # type: ignore[no-any-return]
