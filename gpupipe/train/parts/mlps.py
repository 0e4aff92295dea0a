"""Two linear layers with an activation between them, and one with an activation behind it, whoever wrote them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.ops import activations
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.probe import Stub, Trial, at, attempt, passed, plain, same, silent, which_activation

_MOST_LEAVES = 12
"""Modules without modules in them, at most, in what may be an MLP."""


def _layers(module: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, nn.Module]] | None:
    """Linear layers and dropouts within, by name; None where there are other parameters, or too much."""
    if type(module).forward is nn.Module.forward or isinstance(module, nn.Linear):
        return None
    leaves = {name: one for name, one in module.named_modules() if name and not any(True for _ in one.children())}
    linears = {name: one for name, one in leaves.items() if type(one) is nn.Linear}
    if not 1 <= len(linears) <= 2 or len(leaves) > _MOST_LEAVES:
        return None
    own = sum(1 for _ in module.parameters())
    if own != sum(1 for one in linears.values() for _ in one.parameters()) or any(True for _ in module.buffers()):
        return None
    return linears, {name: one for name, one in leaves.items() if type(one) is nn.Dropout}


def _tried(module: nn.Module, width: int, *others: torch.Tensor) -> tuple[Trial, str] | None:
    """The module with linear layers and dropouts out of the way, and the activation that it then is."""
    found = _layers(module)
    if found is None:
        return None
    without: dict[str, Stub] = dict.fromkeys((*found[0], *found[1]), passed)
    kept: list[Trial] = []

    def call(x: torch.Tensor) -> Any:
        trial = attempt(module, x, *others, without=without)
        if trial is not None:
            kept.append(trial)
        return None if trial is None else trial.result

    activation = which_activation(call, width)
    return None if activation is None or not kept else (kept[-1], activation)


def recognise_mlp(module: nn.Module) -> dict[str, Any] | None:
    """The two layers, the activation and the dropouts of an MLP, by name; None for any other module.

    Raises:
        Left: for one between whose layers there is something else than an activation of ours.
    """
    found = _layers(module)
    if found is None or len(found[0]) != 2:
        return None
    linears = found[0]
    (first, one), (second, two) = linears.items()
    if one.out_features not in (two.in_features, 2 * two.in_features):
        return None
    tried = _tried(module, one.out_features)
    if tried is None:
        raise Left("it is no two linear layers with an activation of ours between them")
    trial, activation = tried
    gated = activations.split(activation)[1]
    if gated is not (one.out_features == 2 * two.in_features):
        return None
    order = trial.order
    layers = [name for name in order if name in linears]
    if layers != [first, second] or not same(trial.events[0][1], trial.given[0]) or order[0] != first:
        raise Left("it does more than two linear layers with an activation between them")
    if not same(trial.result, dict(trial.events)[second]) or len(order) != len(set(order)):
        raise Left("it does more than two linear layers with an activation between them")
    between, behind = order[1 : order.index(second)], order[order.index(second) + 1 :]
    if len(between) > 1 or len(behind) > 1 or len(between) + len(behind) != len(order) - 2:
        raise Left("it has several dropouts in one place")
    return {
        "linear1": tuple(first.split(".")),
        "linear2": tuple(second.split(".")),
        "activation": activation,
        "dropout1": tuple(between[0].split(".")) if between else None,
        "dropout2": tuple(behind[0].split(".")) if behind else None,
    }


def dropped(module: nn.Module, path: tuple[str, ...] | None) -> float:
    """The share that a dropout within drops now."""
    if path is None:
        return 0.0
    dropout = at(module, path)
    return float(dropout.p) if dropout.training else 0.0


def run_mlp(
    module: nn.Module,
    settings: dict[str, Any],
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Any:
    """residual + gate * mlp(x) for a recognised MLP; ``NotImplemented`` where its layers are no longer what they were."""
    one, two = at(module, settings["linear1"]), at(module, settings["linear2"])
    if not plain(one) or not plain(two):
        return NotImplemented
    activation = settings["activation"]
    p1, p2 = dropped(module, settings["dropout1"]), dropped(module, settings["dropout2"])
    if p1 == 0 and p2 == 0:
        return ops.mlp(
            x, one.weight, one.bias, two.weight, two.bias, activation=activation, gate=gate, residual=residual
        )  # fmt: skip
    hidden = ops.linear_act(x, one.weight, one.bias, activation=activation, p=p1)
    if gate is None:
        return ops.linear_act(hidden, two.weight, two.bias, activation=None, p=p2, residual=residual)
    branch = ops.linear_act(hidden, two.weight, two.bias, activation=None)
    return ops.bias_act_dropout_add(branch, residual=residual, gate=gate, p=p2)


class FusedMLP(Fused):
    """linear, activation, linear; with dropout behind either."""

    kind = "mlp"
    reads_layers = True

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        return recognise_mlp(module)

    def fused_forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        given = (*rest, *others.values())  # what a module may take but was not given, it is often given as None
        if any(value is not None for value in given) or not silent(*self.modules_within()):
            return NotImplemented
        return run_mlp(self, self.settings, x)

    def modules_within(self) -> list[nn.Module]:
        """Those between this one and its linear layers, which are not called."""
        settings = self.settings
        paths = {settings[name][:depth] for name in ("linear1", "linear2") for depth in range(1, len(settings[name]))}
        return [at(self, path) for path in paths]


class FusedLinearAct(Fused):
    """linear, activation, dropout; or linear, dropout and what the caller adds."""

    kind = "linear_act"
    reads_layers = True

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        found = _layers(module)
        if found is None or len(found[0]) != 1:
            return None
        (name, linear), *_ = found[0].items()
        tried = _tried(module, linear.out_features)
        if tried is not None:
            trial, activation = tried
            if trial.order[:1] != [name] or len(trial.order) > 2 or not same(trial.events[0][1], trial.given[0]):
                raise Left("it does more than a linear layer with an activation behind it")
            dropout = tuple(trial.order[1].split(".")) if len(trial.order) > 1 else None
            return {"linear": tuple(name.split(".")), "activation": activation, "dropout": dropout, "adds": False}
        return cls._adding(module, name, linear, dict.fromkeys((*found[0], *found[1]), passed))

    @classmethod
    def _adding(
        cls, module: nn.Module, name: str, linear: nn.Linear, without: dict[str, Stub]
    ) -> dict[str, Any] | None:  # fmt: skip
        x, residual = (torch.linspace(-1, low, 3 * linear.out_features).view(3, -1).cos() for low in (2, 7))
        trial = attempt(module, x, residual, without=without)
        if trial is None or trial.order[:1] != [name] or len(trial.order) > 2 or not same(trial.events[0][1], x):
            return None
        if not same(trial.result, x + residual):
            return None
        dropout = tuple(trial.order[1].split(".")) if len(trial.order) > 1 else None
        return {"linear": tuple(name.split(".")), "activation": None, "dropout": dropout, "adds": True}

    def fused_forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        settings = self.settings
        linear = at(self, settings["linear"])
        if others or len(rest) != settings["adds"] or not plain(linear):
            return NotImplemented
        residual = rest[0] if settings["adds"] else None
        return ops.linear_act(
            x, linear.weight, linear.bias, activation=settings["activation"], residual=residual,
            p=dropped(self, settings["dropout"]),
        )  # fmt: skip
