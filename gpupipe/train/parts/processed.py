"""Attention whose mathematics are in a processor beside the layers, as diffusers has it: self, cross and joint with text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gpupipe.ops.packed import unpack
from gpupipe.ops.rope import Rope
from gpupipe.ops.rotary.reference import norm_rope
from gpupipe.train.fused import Fused, Left
from gpupipe.train.layout import joining_said
from gpupipe.train.parts.attention import attended, fits, headed, norm_over, normed_and_turned, one_norm, project
from gpupipe.train.parts.positions import rope_of
from gpupipe.train.parts.probe import Stub, attempt, passed, plain, same, takes
from gpupipe.train.report import Entry

_ROTARY = ("image_rotary_emb", "rotary_emb")
_LAYERS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_STRANGE = ("group_norm", "spatial_norm", "norm_cross")
_VIDEO, _TEXT = 5, 3
"""Tokens of a trial."""


def _linear(module: Any) -> bool:
    """True for a linear layer, also one with an addition for fine-tuning round it."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return isinstance(module, nn.Module) and all(isinstance(size, int) for size in sizes)


class FusedProcessed(Fused):
    """to_q, to_k, to_v, norms of queries and keys, rotary tables, to_out; and the same for text beside the video."""

    kind = "attention"
    heads: int
    processor: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        layers: Any = module
        if not all(_linear(getattr(module, name, None)) for name in ("to_q", "to_k", "to_v")):
            return None
        if not isinstance(getattr(module, "heads", None), int) or not callable(getattr(module, "processor", None)):
            return None
        for name in _STRANGE:
            if getattr(module, name, None) is not None:
                raise Left(f"it has a {name} within")
        width = layers.to_q.out_features
        if any(layer.in_features != width or layer.out_features != width for layer in (layers.to_q, layers.to_k, layers.to_v)):
            raise Left("its queries, keys and values have not one width with what comes in")
        joint = _linear(getattr(module, "add_q_proj", None))
        if not joint and getattr(module, "add_k_proj", None) is not None:
            raise Left("it also attends to a picture")
        dim = width // layers.heads
        norms = {name: norm_over(getattr(module, name, None), layers.heads, dim) for name in _NORMS}
        if None in norms.values() or norms["norm_q"] != norms["norm_k"] or norms["norm_added_q"] != norms["norm_added_k"]:
            raise Left("its norms of queries and keys are none of ours")
        processor = type(layers.processor)
        rotary = next((name for name in _ROTARY if takes(processor.__call__, name)), None)
        masked = cls._forms(module, width, layers.heads, rotary, masked=True)
        found = masked or cls._forms(module, width, layers.heads, rotary, masked=False)
        if not found or {"text first", "text last"} <= found:
            raise Left(f"its {processor.__name__} does something else than attention of ours")
        return {
            "forms": sorted(found), "masked": bool(masked), "joint": joint, "norm": norms["norm_q"],
            "text norm": norms["norm_added_q"], "rotary": rotary, "processor": processor,
        }  # fmt: skip

    @classmethod
    def said(cls, settings: dict[str, Any]) -> str:
        rotary = ", rotary" if settings["rotary"] else ""
        return f"{cls.kind} ({' or '.join(settings['forms'])}; norm {settings['norm']}{rotary})"

    @classmethod
    def _forms(cls, module: nn.Module, width: int, heads: int, rotary: str | None, *, masked: bool) -> set[str]:
        """What it is found to do: attend to itself, to other tokens, to both with the text last or first.

        All with the first key masked, by which the order of video and text shows, or without a mask.
        """
        stubs: dict[str, Stub] = {
            name: passed for name in (*_LAYERS, *_NORMS) if isinstance(getattr(module, name, None), nn.Module)
        }
        if isinstance(getattr(module, "to_out", None), nn.ModuleList):
            stubs |= {f"to_out.{number}": passed for number in range(len(module.to_out))}  # type: ignore[arg-type]
        video = torch.linspace(-2, 2, _VIDEO * width).view(1, _VIDEO, width).mul(7).sin()
        text = torch.linspace(-1, 2, _TEXT * width).view(1, _TEXT, width).mul(9).cos()
        angles = torch.linspace(0, 3, _VIDEO * width // heads).view(_VIDEO, -1)[:, ::2].repeat_interleave(2, 1)
        tables = (angles.cos(), angles.sin())
        if rotary == "rotary_emb":
            tables = (tables[0][None, :, None], tables[1][None, :, None])
        found = set()
        for given, form in ((None, "self"), (text, "cross"), (text, "text last"), (text, "text first")):
            named: dict[str, Any] = {} if given is None else {"encoder_hidden_states": given}
            if rotary is not None and form != "cross":
                named[rotary] = tables
            keys = {"self": _VIDEO, "cross": _TEXT}.get(form, _VIDEO + _TEXT)
            mask = (torch.arange(keys) > 0).view(1, 1, 1, keys).expand(1, 1, keys if form == "self" else 1, keys)
            if masked:
                named["attention_mask"] = mask
            trial = attempt(module, video, without=stubs, **named)
            turn = tables if rotary in named else None
            if trial is not None and cls._is(trial.result, form, video, text, heads, turn, mask if masked else None):
                found.add(form)
        return found

    @staticmethod
    def _is(
        result: Any, form: str, video: torch.Tensor, text: torch.Tensor, heads: int, tables: Any, mask: torch.Tensor | None
    ) -> bool:  # fmt: skip
        def of(x: torch.Tensor, turn: bool) -> torch.Tensor:
            x = headed(x, heads)
            if tables is None or not turn:
                return x
            rope, _ = rope_of(tables, x) or (None, None)
            assert rope is not None
            return norm_rope(
                x, None, rope.table, rope.lengths, rope.pairs, [1, 1, x.shape[1]], 0, 0, True, 0, 0.0, False
            )  # fmt: skip

        v_video, v_text = of(video, False), of(text, False)
        q_video, q_text = of(video, True), of(text, False)
        order = {"self": (0,), "cross": (0,), "text last": (0, 1), "text first": (1, 0)}[form]
        q = torch.cat([(q_video, q_text)[one] for one in order], 1)
        k = v_text if form == "cross" else q
        v = v_text if form == "cross" else torch.cat([(v_video, v_text)[one] for one in order], 1)
        q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        made = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        if len(order) == 1:
            return same(result, made)
        first = (_VIDEO, _TEXT)[order[0]]
        parts = {order[0]: made[:, :first], order[1]: made[:, first:]}
        return isinstance(result, tuple) and len(result) == 2 and same(result[0], parts[0]) and same(result[1], parts[1])

    @classmethod
    def layouts(cls, module: nn.Module, name: str) -> list[Entry]:
        layers: list[Any] = [module.to_q, module.to_k, module.to_v]
        if not all(plain(layer) for layer in layers):
            return [Entry(name, "q, k, v", "split: not all of their layers are plain ones")]
        return [Entry(name, "q, k, v", joining_said(layers[0].out_features, layers[0].weight.element_size()))]

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        tables: Any = None,
        **others: Any,
    ) -> Any:
        settings = self.settings
        tables = others.pop(settings["rotary"], tables) if settings["rotary"] else tables
        if any(value is not None for value in others.values()) or hidden_states.dim() != 3 or not self._as_found():
            return NotImplemented
        if attention_mask is not None and not settings["masked"]:
            return NotImplemented
        forms = settings["forms"]
        text = encoder_hidden_states
        rope = rope_of(tables, hidden_states) if tables is not None else None
        if (tables is not None and rope is None) or (text is None and "self" not in forms):
            return NotImplemented
        turn, grid = (None, None) if rope is None else rope
        layers: Any = self
        if text is None or "cross" in forms:
            keys = hidden_states if text is None else text
            if not fits(attention_mask, keys.shape[0], keys.shape[1]) or (text is not None and turn is not None):
                return NotImplemented
            q, k, v = self._sides(hidden_states, turn, grid) if text is None else self._crossed(hidden_states, text)
            return self._out(attended(q, k, v, attention_mask))
        video, count = hidden_states.shape[1], text.shape[1]
        if not fits(attention_mask, text.shape[0], video + count) or (settings["joint"] and "text last" not in forms):
            return NotImplemented
        if settings["joint"]:
            q, k, v = self._joint(hidden_states, text, turn, grid)
        else:
            both = (hidden_states, text) if "text last" in forms else (text, hidden_states)
            q, k, v = self._sides(torch.cat(both, 1), turn, grid, (0, count) if "text last" in forms else (count, 0))
        made = attended(q, k, v, attention_mask)
        if "text last" in forms:
            made, beside = self._out(made[:, :video]), made[:, video:]
            add = getattr(layers, "to_add_out", None)
            return made, beside if add is None else add(beside)
        made = self._out(made)
        return made[:, count:], made[:, :count]

    def _as_found(self) -> bool:
        """Nobody has put another processor, backend or joined layers in its place since."""
        processor = self.processor
        return (
            type(processor) is self.settings["processor"]
            and getattr(processor, "_attention_backend", None) is None
            and getattr(processor, "_parallel_config", None) is None
            and not getattr(self, "fused_projections", False)
        )

    def _sides(
        self, x: torch.Tensor, rope: Rope | None, grid: tuple[int, ...] | None, text: tuple[int, int] = (0, 0)
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own: Any = self
        norm = self.settings["norm"]
        packed = norm.startswith("rms") or (norm == "none" and rope is not None)
        qkv = project(x, (own.to_q, own.to_k, own.to_v), self.heads, packed=packed)
        return normed_and_turned(qkv, norm, own.norm_q, own.norm_k, rope, grid, text)

    def _crossed(self, x: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own: Any = self
        q, k, v = (headed(layer(side), self.heads) for layer, side in ((own.to_q, x), (own.to_k, text), (own.to_v, text)))
        norm = self.settings["norm"]
        return one_norm(q, norm, own.norm_q), one_norm(k, norm, own.norm_k), v

    def _joint(
        self, x: torch.Tensor, text: torch.Tensor, rope: Rope | None, grid: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own: Any = self
        norm = self.settings["text norm"]
        layers = (own.add_q_proj, own.add_k_proj, own.add_v_proj)
        beside = project(text, layers, self.heads, packed=norm.startswith("rms"))
        sides = normed_and_turned(beside, norm, own.norm_added_q, own.norm_added_k, None, None)
        q, k, v = (torch.cat(pair, 1) for pair in zip(self._sides(x, rope, grid), unpack(sides), strict=True))
        return q, k, v

    def _out(self, made: torch.Tensor) -> torch.Tensor:
        for layer in getattr(self, "to_out", None) or ():  # type: ignore[union-attr]
            made = layer(made)
        return made
