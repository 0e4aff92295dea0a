"""The block of vision transformers: x + attention(norm(x)), then x + mlp(norm(x)), with layer scale and stochastic depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpupipe.train.fused import Left
from gpupipe.train.parts.blocks import FusedBlock, added, gated, mlp_added, normed, norms_of
from gpupipe.train.parts.norms import norm_size
from gpupipe.train.parts.probe import attempt, same, silent

_NAMES = (
    {"norm1": "norm1", "attention": "attn", "norm2": "norm2", "mlp": "mlp"},
    {"norm1": "layernorm_before", "attention": "attention", "norm2": "layernorm_after", "mlp": "intermediate", "out": "output"},
)
"""What such a block calls its parts; the second with an MLP in two halves, of which the latter adds the residual."""
_AFTER = (("ls1", "drop_path1", "stochastic_depth", "drop_path"), ("ls2", "drop_path2", "stochastic_depth", "drop_path"))
"""What may follow attention, and the MLP, in this order."""


class FusedPreNorm(FusedBlock):
    """norm, attention, residual, norm, MLP, residual."""

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        children = dict(module.named_children())
        if any(True for _ in module.parameters(recurse=False)):
            return None
        names = _NAMES[0]
        if not set(names.values()) <= set(children):
            return None
        kinds = norms_of(module, names["norm1"], names["norm2"])
        after = [[name for name in names_after if name in children] for names_after in _AFTER]
        rest = set(children) - set(names.values()) - {name for one in after for name in one}
        if kinds is None or any(True for name in rest for _ in children[name].parameters()):
            return None
        scales = [next((name for name in one if name.startswith("ls") and _scales(children[name])), None) for one in after]
        size = norm_size(children[names["norm1"]])
        x = torch.linspace(-2, 2, 24 * (size or 1)).view(2, 1, 2, 6, -1).mul(5).sin()
        stubs: dict[str, Any] = {names["norm1"]: lambda x: 2 * x + 0.1, names["norm2"]: lambda x: 0.5 * x - 0.2}
        stubs |= {names["attention"]: torch.sin, names["mlp"]: torch.cos}
        gammas = [_gamma(children[name]) if name else None for name in scales]
        if any(gamma is not None and gamma.is_meta for gamma in gammas):
            return None
        weights = [1.0 if gamma is None else gamma.detach().float().cpu() for gamma in gammas]
        stubs |= {name: _times(weight) for name, weight in zip(scales, weights, strict=True) if name}
        for trial in (attempt(module, value, without=stubs) for value in (x, x[:, 0, 0])):
            if trial is None or isinstance(trial.result, tuple):
                continue
            given = trial.given[0]
            middle = given + weights[0] * torch.sin(2 * given + 0.1)
            branch = torch.cos(0.5 * middle - 0.2)
            if same(trial.result, middle + weights[1] * branch):
                return {
                    **names, "kind1": kinds[names["norm1"]], "kind2": kinds[names["norm2"]], "scales": scales,
                    "after": [[name for name in one if not name.startswith("ls")] for one in after],
                }  # fmt: skip
        raise Left("it does something else with its norms, attention and MLP than the usual block")

    @classmethod
    def said(cls, settings: dict[str, Any]) -> str:
        return f"{cls.kind} (pre-norm)"

    def fused_forward(self, x: torch.Tensor, /, *rest: Any, **others: Any) -> Any:
        settings = self.settings
        parts: dict[str, Any] = {name: getattr(self, settings[name]) for name in ("norm1", "attention", "norm2", "mlp")}
        scales = [getattr(self, name) if name else None for name in settings["scales"]]
        if rest or not silent(parts["norm1"], parts["norm2"], *scales):
            return NotImplemented
        y = normed(parts["norm1"], settings["kind1"], x)
        branch = parts["attention"](y, **others)
        if not isinstance(branch, torch.Tensor):
            return NotImplemented
        branch = self._followed(branch, 0)
        y, x = added(parts["norm2"], settings["kind2"], x, branch, _gamma(scales[0]))
        if self.training and any(self._drops(name) for name in settings["after"][1]):
            return gated(x, self._followed(parts["mlp"](y), 1), _gamma(scales[1]))
        return mlp_added(parts["mlp"], y, x, _gamma(scales[1]))

    def _followed(self, branch: torch.Tensor, place: int) -> torch.Tensor:
        """Stochastic depth, which may as well come before a layer scale."""
        for name in self.settings["after"][place]:
            branch = getattr(self, name)(branch)
        return branch

    def _drops(self, name: str) -> bool:
        one = getattr(self, name)
        return not isinstance(one, nn.Identity) and any(getattr(one, rate, 0.0) for rate in ("drop_prob", "p"))


class FusedTwoHalves(FusedPreNorm):
    """The same with the MLP in two modules, of which the second adds the residual."""

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        children = dict(module.named_children())
        names = _NAMES[1]
        if set(children) != set(names.values()) or any(True for _ in module.parameters(recurse=False)):
            return None
        kinds = norms_of(module, names["norm1"], names["norm2"])
        if kinds is None:
            return None
        size = norm_size(children[names["norm1"]]) or 1
        x = torch.linspace(-2, 2, 12 * size).view(2, 6, size).mul(5).sin()
        stubs: dict[str, Any] = {names["norm1"]: lambda x: 2 * x + 0.1, names["norm2"]: lambda x: 0.5 * x - 0.2}
        stubs |= {names["attention"]: torch.sin, names["mlp"]: torch.cos}
        stubs[names["out"]] = lambda y: 3 * y
        trial = attempt(module, x, without=stubs)
        middle = x + torch.sin(2 * x + 0.1)
        if trial is None or not same(trial.result, 3 * torch.cos(0.5 * middle - 0.2)):
            raise Left("it does something else with its norms, attention and MLP than the usual block")
        return {**names, "kind1": kinds[names["norm1"]], "kind2": kinds[names["norm2"]]}

    def fused_forward(self, x: torch.Tensor, /, *rest: Any, **others: Any) -> Any:
        settings = self.settings
        parts: dict[str, Any] = {name: getattr(self, settings[name]) for name in _NAMES[1]}
        if rest or not silent(parts["norm1"], parts["norm2"]):
            return NotImplemented
        branch = parts["attention"](normed(parts["norm1"], settings["kind1"], x), **others)
        y, x = added(parts["norm2"], settings["kind2"], x, branch)
        return parts["out"](parts["mlp"](y), x)


def _scales(module: Any) -> bool:
    """True for a module that multiplies columns by its one parameter."""
    gamma = _gamma(module)
    if gamma is None or gamma.dim() != 1 or sum(1 for _ in module.parameters()) != 1:
        return False
    if gamma.is_meta:
        return True
    x = torch.linspace(-1, 1, 3 * gamma.numel(), device=gamma.device, dtype=gamma.dtype).view(3, -1)
    trial = attempt(module, x)
    return trial is not None and same(trial.result, x * gamma)


def _gamma(module: Any) -> torch.Tensor | None:
    return None if module is None else getattr(module, "gamma", None)


def _times(weight: Any) -> Any:
    return lambda x: x * weight
