"""A fused model and the same as written, side by side over some steps of training: errors by module, and both loss curves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from gpupipe.errors import ConfigError
from gpupipe.train.arguments import a_function, a_model, a_tensor, of, several, whole
from gpupipe.train.fused import is_fused
from gpupipe.train.fusing import unfuse
from gpupipe.train.parts.probe import OBSERVES
from gpupipe.train.verify import relative_error

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass
class ModuleErrors:
    """How far one fused module's outputs and gradients were from those as written, as relative errors (root mean square).

    Attributes:
        name: in the model.
        first: of its outputs in the first step, where both models have the same parameters.
        worst: of its outputs in all steps: later ones also have what training made of earlier differences.
        gradient: of all its own parameters' gradients in the first step; None where it has none.
    """

    name: str
    first: float = 0.0
    worst: float = 0.0
    gradient: float | None = None


@dataclass
class Comparison:
    """What :func:`compare` found. ``print`` shows it as a table.

    Attributes:
        fused: the loss of each step.
        written: the same as written.
        modules: errors by module, in the order in which they were called; those that a fused block does the work of are not.
    """

    fused: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    modules: dict[str, ModuleErrors] = field(default_factory=dict)

    @property
    def loss_error(self) -> float:
        """The largest difference of losses, in parts of the larger one."""
        pairs = zip(self.fused, self.written, strict=True)
        return max((abs(one - other) / max(abs(one), abs(other), 1e-30) for one, other in pairs), default=0.0)

    def __str__(self) -> str:
        width = max([len("module"), *map(len, self.modules)])
        lines = [f"{'module':<{width}}  {'first step':>10}  {'all steps':>10}  {'gradients':>10}"]
        for name, entry in self.modules.items():
            gradient = "-" if entry.gradient is None else f"{entry.gradient:.1e}"
            lines.append(f"{name:<{width}}  {entry.first:>10.1e}  {entry.worst:>10.1e}  {gradient:>10}")
        lines.append(f"{'step':<{width}}  {'fused':>10}  {'as written':>10}")
        for number, (one, other) in enumerate(zip(self.fused, self.written, strict=True)):
            lines.append(f"{number:<{width}}  {one:>10.5g}  {other:>10.5g}")
        lines.append(f"largest difference of losses: {self.loss_error:.1e} of the loss")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draws the two loss curves, and the errors by module below, into a picture file (PNG, SVG or PDF by its name)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1)
        above.plot(self.written, label="as written", linewidth=3, color="0.7")
        above.plot(self.fused, label="fused", linewidth=1, color="C0")
        above.set(xlabel="step", ylabel="loss")
        above.legend()
        below.semilogy([max(one.first, 1e-12) for one in self.modules.values()], ".", label="outputs, first step")
        below.semilogy([max(one.worst, 1e-12) for one in self.modules.values()], "_", label="outputs, all steps")
        below.set(xlabel="module, in order of calls", ylabel="relative error")
        below.legend()
        figure.savefig(path)


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    seed: int = 0,
) -> Comparison:
    """Trains a fused model and the same as written on the same batches, and compares them step by step.

    It works on copies: the model is as it was afterwards. Dropout draws from generators seeded alike before each step, which
    gives the same masks where both ways draw alike (on the CPU they do); otherwise set dropout to 0 before.

    Args:
        model: a fused model; two copies of it are trained, so it takes three times its memory.
        batches: one step each; all are used.
        loss: of the model and a batch: a tensor of one element.
        optimizer: made of the parameters.
        seed: of torch's generators before each step, with the step's number added.

    Returns:
        Errors and curves.

    Raises:
        ConfigError: for arguments of the wrong kind, when nothing is fused in the model, or there is no batch.
    """
    a_function(loss, "loss", "works out the loss of (model, batch)")
    whole(seed, "seed", 0)
    a_function(optimizer, "optimizer", "makes an optimizer of parameters, such as torch.optim.AdamW")
    several(batches, "batches", "something to go through, such as a list")
    if not any(is_fused(module) for module in a_model(model).modules()):
        raise ConfigError("nothing is fused in this model", fix="fuse it first: gpupipe.train.fuse")
    sides = [copy.deepcopy(model), unfuse(copy.deepcopy(model))]
    names = [name for name, module in sides[0].named_modules() if is_fused(module)]
    seen: list[dict[str, list[list[torch.Tensor]]]] = [{}, {}]
    for side, outputs in zip(sides, seen, strict=True):
        for name in names:
            side.get_submodule(name).register_forward_hook(_keeper(outputs, name))
    fix = "give a function that makes an optimizer of parameters, such as torch.optim.AdamW"
    optimizers = [of(torch.optim.Optimizer, optimizer(side.parameters()), "what optimizer makes", fix) for side in sides]
    found = Comparison()
    with torch.random.fork_rng(list(range(torch.cuda.device_count()))):
        for number, batch in enumerate(batches):
            values = []
            for side, one, outputs in zip(sides, optimizers, seen, strict=True):
                outputs.clear()
                torch.manual_seed(seed + number)
                value = loss(side, batch)
                if a_tensor(value, "what loss returns").numel() != 1:
                    raise ConfigError(f"loss returns a tensor {tuple(value.shape)}", fix="return one number: loss.mean()")
                one.zero_grad()
                value.backward()  # type: ignore[no-untyped-call]
                values.append(value.detach())
            _note(found, names, seen, sides if number == 0 else None)
            for one in optimizers:
                one.step()
            found.fused.append(float(values[0]))
            found.written.append(float(values[1]))
    if not found.fused:
        raise ConfigError("there is no batch to compare with", fix="give at least one")
    return found


def _keeper(outputs: dict[str, list[list[torch.Tensor]]], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        leaves = [leaf.detach() for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        outputs.setdefault(name, []).append([leaf for leaf in leaves if leaf.is_floating_point()])

    setattr(keep, OBSERVES, True)
    return keep


def _note(
    found: Comparison, names: list[str], seen: list[dict[str, list[list[torch.Tensor]]]], first: list[nn.Module] | None
) -> None:  # fmt: skip
    """Writes a step's errors down; of modules that both sides called as often."""
    made, expected = seen
    for name in made:
        if len(made[name]) != len(expected.get(name, ())):
            continue
        pairs = [
            pair
            for one, other in zip(made[name], expected[name], strict=True)
            for pair in zip(one, other, strict=True)
        ]  # fmt: skip
        error = max((relative_error(one, other) for one, other in pairs), default=0.0)
        entry = found.modules.setdefault(name, ModuleErrors(name))
        entry.worst = max(entry.worst, error)
        if first is not None:
            entry.first = error
            entry.gradient = _gradient_error(*(side.get_submodule(name) for side in first))


def _gradient_error(one: nn.Module, other: nn.Module) -> float | None:
    sides = [
        [parameter.grad.flatten().float() for parameter in side.parameters() if parameter.grad is not None]
        for side in (one, other)
    ]  # fmt: skip
    return relative_error(torch.cat(sides[0]), torch.cat(sides[1])) if sides[0] and len(sides[0]) == len(sides[1]) else None
