"""A model's attention and MLPs split between the ranks of a mesh (tensor parallelism, Shoeybi et al. 2019)."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded
from gpupipe.train import arguments, fused
from gpupipe.train.fused import Left, is_fused
from gpupipe.train.parallel import checks
from gpupipe.train.parallel.modules import SplitAttention, SplitMlp, State, install, is_split
from gpupipe.train.parallel.plans import Plan, plan_of
from gpupipe.train.parallel.sequence import group_of
from gpupipe.train.parallel.weights import kept_within, line, split_columns, split_rows
from gpupipe.train.parts.mlps import FusedMLP
from gpupipe.train.report import Entry, as_lines
from gpupipe.train.shards import local


@dataclass
class SplitReport:
    """What :func:`tensor_parallel` did to a model, and why. ``print`` shows modules that are alike as one line.

    Attributes:
        ranks: that share the model.
        split: the modules that are split, each with its layers and how.
        left: attention and MLPs that each rank has whole, and why.
        local, total: parameters that a rank has, and the whole model.
    """

    ranks: int
    split: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    local: int = 0
    total: int = 0

    def __str__(self) -> str:
        lines = [f"{self.local:,} of {self.total:,} parameters on each of {self.ranks} ranks"]
        for title, entries in (("split", self.split), ("whole on each rank", self.left)):
            if entries:
                lines += [f"{title} ({len(entries)})", *as_lines(entries)]
        return "\n".join(lines)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, skip: Collection[str] = ()) -> SplitReport:
    """Splits attention by heads and MLPs by hidden columns between ranks, in place: their parameters become DTensors.

    Names and keys of state_dict stay; ``full_tensor()`` of each gives what was there. All else each rank has whole and works
    out alike, from inputs that must be the same on all of them. Split are modules with a ``split_plan`` (see
    :mod:`gpupipe.train.parallel.plans`), :class:`gpupipe.train.Mlp` and :class:`gpupipe.train.GridAttention`, and what
    :func:`gpupipe.train.fuse` knows as attention or MLP, which runs fused from then on. Call it after ``fuse`` and before
    optimizers, :meth:`Precision.prepare`, ``Ema``, graphs and ``fully_shard``: what took the parameters that were there before
    would train nothing that is split. Optimizers of others cannot be seen from here; :meth:`Precision.step` refuses them.

    Args:
        model: the same on all ranks, parameters included, which is checked by sums.
        mesh: of one dimension, such as ``mesh["tp"]``; one rank changes nothing.
        skip: names of modules, with ``*`` and ``?``, that stay whole, with all that is in them.

    Returns:
        What was split, what was left, and why.

    Raises:
        ConfigError: for heads or sizes that the ranks do not divide, a model that is split already, prepared, averaged, in
            DistributedDataParallel or with graphs installed, parameters that differ between ranks, tokens that are split
            between the same ranks, names in ``skip`` that no module has, a parameter that several modules share and that would
            not be split alike in all, or a model in which nothing can be split. The model is then as it was.
    """
    arguments.a_model(model)
    skip = arguments.names(skip, "skip")
    ranks = line(mesh).size()
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"skip names {pattern!r}, which no module matches", fix="write it as named_modules() does")
    odd = next((name for name, value in model.named_parameters() if is_sharded(value)), None)
    if odd is not None:
        raise ConfigError(f"the parameter {odd!r} is a DTensor already", fix="split a model once, before fully_shard")
    checks.untouched(model)
    if ranks > 1:
        _not_tokens_too(model, mesh)
        checks.same_on_all(model, mesh)
    report, plans = SplitReport(ranks), dict[str, Plan]()
    for name, module in model.named_modules():
        if any(fnmatch.fnmatchcase(name, one) for pattern in skip for one in (pattern, f"{pattern}.*")):
            continue
        if any(name == done or name.startswith(f"{done}.") for done, plan in plans.items() if plan.kind is not None):
            continue
        try:
            plan = plan_of(module)
        except Left as left:
            report.left.append(Entry(name, type(module).__name__, str(left)))
            continue
        if plan is not None:
            _fits(name or "the model", module, plan, ranks)
            plans[name] = plan
    if not plans:
        why = report.left[0].said if report.left else "it has no attention and no MLP that is known"
        raise ConfigError(
            f"nothing in this {type(model).__name__} can be split: {why}",
            fix="give its classes a split_plan, or use gpupipe.train.Mlp and GridAttention",
        )
    if ranks > 1:
        _alike(model, plans)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, plan in plans.items() if ranks > 1 else ():
        module = model.get_submodule(name)
        said = ", ".join(f"{layer} by {how}" for layer, how in plan.hows.items())
        report.split.append(Entry(name, type(module).__name__, said))
        _split(name, module, plan, mesh, made)
    if ranks > 1:
        model.register_load_state_dict_pre_hook(checks.refuse_plain)  # type: ignore[no-untyped-call]
    for value in model.parameters():
        report.total += value.numel()
        report.local += local(value).numel()
    return report


def _not_tokens_too(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuses a model whose tokens are split between these ranks: all need the same inputs here, and other ones there."""
    for name, module in model.named_modules():
        group = group_of(module)
        if group is not None and not checks.other_ranks(group, mesh.get_group()):
            raise ConfigError(
                f"sequence_parallel has split the tokens of {name or 'the model'} between the same ranks",
                fix='give each a dimension of its own, mesh["tp"] and mesh["sp"]',
            )


def _fits(name: str, module: nn.Module, plan: Plan, ranks: int) -> None:
    """Checks all sizes before anything is changed."""
    if plan.heads is not None and plan.heads % ranks:
        raise ConfigError(
            f"{name} has {plan.heads} heads for {ranks} ranks",
            fix=f"heads must be a multiple of the ranks; or leave it whole: skip=[{name!r}]",
        )
    for inner, how in plan.hows.items():
        found = _at(module, inner)
        if found is None:
            raise ConfigError(f"split_plan of {name} names {inner!r}, which it does not have", fix="name layers and parameters")
        if how == "heads":
            continue
        weight: Any = getattr(found, "weight", found)
        dim, parts = (1, 1) if how == "columns" else (0, _layers(how))
        if weight.shape[dim] % (ranks * parts):
            raise ConfigError(
                f"{name}.{inner} has {weight.shape[dim]} {'columns' if dim else 'rows'} for {ranks} ranks",
                fix=f"a multiple of {ranks * parts}; or leave it whole: skip=[{name!r}]",
            )


def _at(module: nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _layers(how: str) -> int:
    """How many layers lie one after the other in the rows."""
    return int(how.partition("*")[2] or 1)


def _targets(module: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, str, str]]:
    """Whose parameters are split, by which name, and how."""
    for inner, how in plan.hows.items():
        found = _at(module, inner)
        if isinstance(found, nn.Parameter):
            holder, _, last = inner.rpartition(".")
            yield module.get_submodule(holder), last, how
            continue
        yield found, "weight", how
        # packed biases stay whole: fully_shard could not put them together again
        if how == "rows" and found.bias is not None:
            yield found, "bias", how


def _alike(model: nn.Module, plans: dict[str, Plan]) -> None:
    """Checks that a parameter of several modules is split in all of them, and in one way."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for last, value in module._parameters.items():
            users.setdefault(id(value), []).append(f"{name}.{last}" if name else last)
    hows: dict[int, list[str]] = {}
    for name, plan in plans.items():
        for holder, last, how in _targets(model.get_submodule(name), plan):
            hows.setdefault(id(holder._parameters[last]), []).append(how)
    for key, ways in hows.items():
        if len(ways) != len(users[key]) or len(set(ways)) > 1:
            raise ConfigError(
                f"{' and '.join(users[key])} are one parameter, which would not be split alike in all of these",
                fix="leave the modules whole that share it, by skip=[…], or give each its own",
            )


def _split(
    name: str, module: nn.Module, plan: Plan, mesh: DeviceMesh, made: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Splits one module; ``made``: what there was, by its id, and what it became: modules may share it."""
    for holder, last, how in list(_targets(module, plan)):
        value: Any = holder._parameters[last]
        if id(value) not in made:
            if how == "heads":
                split = kept_within(value, mesh)
            elif how == "columns":
                split = split_columns(value, mesh)
            else:
                split = split_rows(value, mesh, parts=_layers(how))
            made[id(value)] = value, split
        holder._parameters[last] = made[id(value)][1]
    if plan.kind is None:
        return
    if not is_fused(module):
        fused.install(module, plan.kind, fused.State(name, False, None, plan.settings))
    if not is_split(module):
        mixin = SplitMlp if plan.kind is FusedMLP else SplitAttention
        install(module, mixin, State(name, plan, mesh.get_group(), mesh.size()))
