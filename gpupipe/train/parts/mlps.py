"""Two linear layers with an activation between them, and one with an activation behind it, whoever wrote them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from gpupipe import ops
from gpupipe.ops import activations
from gpupipe.ops.sharded import is_sharded
from gpupipe.train.fused import Fused, Left
from gpupipe.train.layout import joining_gated_pays, joining_gated_said
from gpupipe.train.parts.probe import Stub, Trial, at, attempt, passed, plain, same, silent, which_activation
from gpupipe.train.report import Entry

_MOST_LEAVES = 12
"""Modules without modules in them, at most, in what may be an MLP."""


def _layers(module: nn.Module, most: int = 2) -> tuple[dict[str, nn.Linear], dict[str, nn.Module]] | None:
    """Linear layers, at most so many, and dropouts within, by name; None where there are other parameters, or too much."""
    if type(module).forward is nn.Module.forward or isinstance(module, nn.Linear):
        return None
    leaves = {name: one for name, one in module.named_modules() if name and not any(True for _ in one.children())}
    linears = {name: one for name, one in leaves.items() if type(one) is nn.Linear}
    if not 1 <= len(linears) <= most or len(leaves) > _MOST_LEAVES:
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
    return {
        "linear1": tuple(first.split(".")),
        "linear2": tuple(second.split(".")),
        "activation": activation,
        **_dropouts(trial, order[1:], second),
    }


def _dropouts(trial: Trial, rest: list[str], last: str) -> dict[str, tuple[str, ...] | None]:
    """Those before and behind the last layer, among what is called behind the first."""
    between, behind = rest[: rest.index(last)], rest[rest.index(last) + 1 :]
    if len(between) > 1 or len(behind) > 1:
        raise Left("it has several dropouts in one place")
    calls = dict(trial.events)
    if between and not same(calls[between[0]], calls[last]):
        raise Left("its dropout is not behind the activation")
    return {
        "dropout1": tuple(between[0].split(".")) if between else None,
        "dropout2": tuple(behind[0].split(".")) if behind else None,
    }


def _other(x: torch.Tensor) -> torch.Tensor:
    """In the place of the second of two layers that get the same."""
    return 0.7 * x.flip(-1) + 0.1


def _recognise_gated(module: nn.Module) -> dict[str, Any] | None:
    """The layers of an MLP that multiplies one layer's result by the activation of another's; None for any other module.

    Raises:
        Left: for three layers of such shapes that do something else.
    """
    found = _layers(module, 3)
    if found is None or len(found[0]) != 3:
        return None
    linears, drops = found
    last = next((name for name in linears if _fits(name, linears)), None)
    if last is None:
        return None
    one, two = (name for name in linears if name != last)
    width = linears[last].in_features
    x = torch.linspace(-5, 5, 3 * width).view(width, 3).t().contiguous()
    without: dict[str, Stub] = dict.fromkeys((*linears, *drops), passed)
    without[two] = _other
    trial = attempt(module, x, without=without)
    order = [] if trial is None else trial.order
    if trial is None or sorted(order[:2]) != sorted((one, two)) or last not in order or len(order) != len(set(order)):
        raise Left(_NOT_GATED)
    calls = dict(trial.events)
    if not (same(calls[one], x) and same(calls[two], x) and same(trial.result, calls[last])):
        raise Left(_NOT_GATED)
    for value, gate, made, through in ((one, two, x, _other(x)), (two, one, _other(x), x)):
        for name, curve in activations.GATED.items():
            if same(trial.result, made * activations.apply(through, curve)):
                return {
                    "value": tuple(value.split(".")),
                    "gate": tuple(gate.split(".")),
                    "linear2": tuple(last.split(".")),
                    "activation": name,
                    **_dropouts(trial, order[2:], last),
                }
    raise Left(_NOT_GATED)


_NOT_GATED = "it is no down(up(x) * act(gate(x))) of three linear layers with an activation of ours: SiLU or GELU"


def _fits(last: str, linears: dict[str, nn.Linear]) -> bool:
    """Whether the two others are of one shape, lead to this one, and are no queries and keys beside it as values."""
    columns, size = linears[last].in_features, linears[last].out_features
    shapes = {(one.in_features, one.out_features) for name, one in linears.items() if name != last}
    return len(shapes) == 1 and shapes != {(columns, size)} and shapes.pop()[1] == columns


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
    return _through(module, settings, x, one.weight, one.bias, two, gate, residual)


def _through(
    module: nn.Module,
    settings: dict[str, Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    two: nn.Linear,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """residual + gate * mlp(x), with what the first layer is given as tensors."""
    activation = settings["activation"]
    p1, p2 = dropped(module, settings["dropout1"]), dropped(module, settings["dropout2"])
    if p1 == 0 and p2 == 0:
        return ops.mlp(
            x, weight, bias, two.weight, two.bias, activation=activation, gate=gate, residual=residual
        )  # fmt: skip
    hidden = ops.linear_act(x, weight, bias, activation=activation, p=p1)
    if gate is None:
        return ops.linear_act(hidden, two.weight, two.bias, activation=None, p=p2, residual=residual)
    branch = ops.linear_act(hidden, two.weight, two.bias, activation=None)
    return ops.bias_act_dropout_add(branch, residual=residual, gate=gate, p=p2)


class FusedMLP(Fused):
    """linear, activation, linear; with dropout behind either."""

    kind = "mlp"
    reads_layers = True
    layers: ClassVar[tuple[str, ...]] = ("linear1", "linear2")
    """What the settings call its linear layers."""

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        return recognise_mlp(module)

    def fused_forward(self, x: torch.Tensor, *rest: Any, **others: Any) -> Any:
        given = (*rest, *others.values())  # what a module may take but was not given, it is often given as None
        if any(value is not None for value in given) or not silent(*self.modules_within()):
            return NotImplemented
        return self.added(x)

    def added(self, x: torch.Tensor, gate: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> Any:
        """residual + gate * mlp(x); ``NotImplemented`` where it is not served."""
        return run_mlp(self, self.settings, x, gate, residual)

    def modules_within(self) -> list[nn.Module]:
        """Those between this one and its linear layers, which are not called."""
        paths = [self.settings[name] for name in self.layers]
        return [at(self, path) for path in {path[:depth] for path in paths for depth in range(1, len(path))}]


class FusedGatedMLP(FusedMLP):
    """down(up(x) * act(gate(x))), whose first two layers are separate; with dropout before and behind the last."""

    layers = ("value", "gate", "linear2")

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        return _recognise_gated(module)

    @classmethod
    def layouts(cls, module: nn.Module, name: str) -> list[Entry]:
        layer: nn.Linear = at(module, module.settings["value"])  # type: ignore[arg-type,index]
        said = joining_gated_said(layer.in_features, layer.out_features, layer.weight.element_size())
        return [Entry(name, "value, gate", said)]

    def added(self, x: torch.Tensor, gate: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> Any:
        settings = self.settings
        value, through, last = (at(self, settings[name]) for name in self.layers)
        if not (plain(value) and plain(through) and plain(last)) or value.weight.shape != through.weight.shape:
            return NotImplemented
        parameters = [value.weight, through.weight]
        gradients = torch.is_grad_enabled() and any(one.requires_grad for one in parameters)
        size, columns = value.weight.shape
        if not joining_gated_pays(x.shape[:-1].numel(), columns, size, gradients=gradients) or any(map(is_sharded, parameters)):
            return NotImplemented
        biases = [value.bias, through.bias]
        bias = None
        if any(one is not None for one in biases):
            bias = torch.cat([one.bias if one.bias is not None else one.weight.new_zeros(size) for one in (value, through)])
        return _through(self, settings, x, torch.cat(parameters), bias, last, gate, residual)


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
