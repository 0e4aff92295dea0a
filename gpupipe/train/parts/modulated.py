"""Norms whose scale and shift a linear layer makes of an embedding, as diffusion transformers have them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.ops import activations
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.norms import eps_for, norm_kind, norm_size, promoted
from gpupipe.train.parts.probe import activation_of, attempt, passed, same, silent

_CALLS = (("x", "emb"), ("x", "*emb"), ("x", "*temb"), ("x", "y", "emb"))
"""Ways to call such a module: an embedding after one or two inputs, by position or, with a star, by name."""
_BATCH, _TOKENS = 2, 3


class FusedModulatedNorm(Fused):
    """norm(x) * (1 + scale) + shift, for one input or two, and what else the linear layer makes handed back."""

    kind = "modulated_norm"
    linear: Any
    norm: Any

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        children: dict[str, Any] = dict(module.named_children())
        linear, norm = children.get("linear"), children.get("norm")
        kind = norm_kind(norm)
        if not isinstance(linear, nn.Linear) or kind is None or any(True for _ in module.parameters(recurse=False)):
            return None
        rest = [one for name, one in children.items() if name not in ("linear", "norm")]
        acts = [activation_of(one) for one in rest]
        size = norm_size(norm) or 0
        if len(rest) != 1 or acts[0] not in activations.PLAIN or linear.out_features % max(size, 1):
            raise Left("it holds more than an activation, a linear layer and a norm")
        count = linear.out_features // size
        values = torch.linspace(0, 4, _BATCH * count * size).view(_BATCH, -1).mul(11).cos()
        emb = torch.linspace(-1, 1, _BATCH * linear.in_features).view(_BATCH, -1)
        x = torch.linspace(-1, 2, _BATCH * _TOKENS * size).view(_BATCH, _TOKENS, size).mul(5).sin()
        for call in _CALLS:
            inputs = {"x": x, "y": x.flip(1) + 0.3}
            given = [inputs[name] for name in call if name in inputs]
            last = call[-1]
            named: dict[str, Any] = {last[1:]: emb} if last.startswith("*") else {}
            trial = attempt(
                module, *given, *([] if named else [emb]), without={"linear": lambda _: values, "norm": passed}, **named
            )  # fmt: skip
            if trial is None:
                continue
            behind = trial.events[0][1] if trial.order[:1] == ["linear"] else None
            if behind is None or not same(behind, activations.apply(emb, acts[0])):
                raise Left("its linear layer is given something else than an activation of the embedding")
            found = cls._explained(trial.result, given, values.chunk(count, 1))
            if found is None:
                raise Left("it makes something else than modulated norms of its linear layer's values")
            return {"norm": kind, "activation": acts[0], "inputs": len(given), "count": count, "results": found}
        raise Left("it is called in a way of its own")

    @staticmethod
    def _explained(result: Any, given: list[torch.Tensor], chunks: tuple[torch.Tensor, ...]) -> list[tuple[int, ...]] | None:
        """For each result: which input, and which chunks scale and shift it; or which chunk, whether it has a token axis."""
        found: list[tuple[int, ...]] = []
        for value in result if isinstance(result, tuple) else (result,):
            kinds: list[tuple[int, ...]] = [
                (number, int(spread))
                for number, chunk in enumerate(chunks)
                for spread in (False, True)
                if same(value, chunk[:, None] if spread else chunk)
            ]
            kinds += [
                (number, scale, shift)
                for number, x in enumerate(given)
                for scale, shift in permutations(range(len(chunks)), 2)
                if same(value, x * (1 + chunks[scale][:, None]) + chunks[shift][:, None])
            ]
            if len(kinds) != 1:
                return None
            found.append(kinds[0])
        return found

    def chunks(self, emb: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scales, shifts and gates (B, H), in the order in which the linear layer has them."""
        hidden = activations.apply(emb, self.settings["activation"])
        if hidden.dtype != self.linear.weight.dtype:
            hidden = hidden.to(like.dtype)
        made: tuple[torch.Tensor, ...] = self.linear(hidden).chunk(self.settings["count"], 1)
        return made

    def modulation(self, place: int, chunks: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and shift of the result at a place, which is a modulated norm."""
        _, scale, shift = self.settings["results"][place]
        return chunks[scale], chunks[shift]

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.settings
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != settings["inputs"] + 1 or not silent(self.norm):
            return NotImplemented
        *inputs, emb = given
        if not all(isinstance(value, torch.Tensor) for value in given) or emb.dim() != 2:
            return NotImplemented
        chunks = self.chunks(emb, inputs[0])
        results = []
        for told in settings["results"]:
            if len(told) == 2:
                results.append(chunks[told[0]][:, None] if told[1] else chunks[told[0]])
                continue
            x = promoted(inputs[told[0]])
            results.append(
                ops.modulate_norm(
                    x, chunks[told[1]], chunks[told[2]], self.norm.weight, getattr(self.norm, "bias", None),
                    kind=settings["norm"], eps=eps_for(self.norm, x),
                )
            )  # fmt: skip
        return tuple(results) if len(results) > 1 else results[0]
