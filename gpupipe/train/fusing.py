"""Fused ops into a model that someone else wrote, and out of it again."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train import defaults, parts, switches
from gpupipe.train.arguments import a_model, a_number, names
from gpupipe.train.fused import Fused, Left, State, install, is_fused, remove
from gpupipe.train.report import Entry, Report

_UNKNOWN = "it has parameters of its own, and nobody here knows it"
Verify = Literal["first-use", "off"]


def fuse(
    model: nn.Module,
    *,
    kinds: Collection[str] | None = None,
    skip: Collection[str] = (),
    verify: Verify = "first-use",
    bound: float | None = None,
) -> Report:
    """Gives every module that is recognised a way through :mod:`gpupipe.ops`, in place.

    Modules are recognised by what they hold and do, not by their names. They stay the objects that they were, with their
    parameters, buffers, hooks and places: state_dict, optimizers, DDP, FSDP2, checkpointing and ``torch.compile`` see what they
    saw before. A module whose layers others have replaced, wrapped or hooked since runs as written.

    Args:
        model: any module.
        kinds: which kinds of modules; None: all but those that measured slower on this machine's GPU, see
            :mod:`gpupipe.train.defaults`.
        skip: names of modules, with ``*`` and ``?``, that are left as they are, with all that is in them.
        verify: ``"first-use"`` runs each module both ways for each new signature of its arguments (shapes, types, gradients or
            not), compares outputs and gradients, and runs it as written for that signature if they differ by more than rounding
            explains. Inside a compiled graph there is no such check: run a step eagerly first. ``"off"`` trusts the recogniser.
        bound: the relative error (root mean square) that outputs may have; four times that for gradients. None: by type, see
            :data:`gpupipe.train.verify.BOUNDS`.

    Returns:
        What was replaced, what was left, and why.

    Raises:
        ConfigError: for arguments of the wrong kind, kinds or a ``verify`` that do not exist, or names in ``skip`` that no
            module has.
    """
    a_model(model)
    skip = names(skip, "skip")
    if verify not in ("first-use", "off"):
        raise ConfigError(f"verify is {verify!r}", fix="choose 'first-use' or 'off'")
    if bound is not None:
        a_number(bound, "bound", "a relative error such as 1e-2")
        if not bound > 0:
            raise ConfigError(f"bound is {bound!r}", fix="bound is a relative error such as 1e-2")
    off = defaults.slower()
    if kinds is not None:
        chosen = {switches.known(kind) for kind in names(kinds, "kinds")}
        off = dict.fromkeys(set(switches.KINDS) - chosen, "not among the kinds asked for")
    found = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in found):
            raise ConfigError(f"skip names {pattern!r}, which no module matches", fix="write it as named_modules() does")
    report = Report()
    covered: set[str] = set()
    for name, module in model.named_modules():
        if _within(name, covered):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            covered.add(name)
            report.left.append(Entry(name, type(module).__name__, "skipped, as asked"))
            continue
        if switches.SPLIT in module.__dict__:
            covered.add(name)
            report.left.append(Entry(name, type(module).__name__, "it is split between ranks: fuse before that"))
            continue
        if is_fused(module):
            report.left.append(Entry(name, type(module).__name__, "it is fused already"))
            if _mixin(module).whole:
                covered.add(name)
            continue
        if _take(module, name, off, verify == "first-use", bound, report):
            covered.add(name)
    return report


def unfuse(model: nn.Module) -> nn.Module:
    """Makes every fused module what it was before: the same objects, of the classes as they were written.

    Returns:
        The model.
    """
    for module in a_model(model).modules():
        if is_fused(module):
            remove(module)
    return model


def _take(module: nn.Module, name: str, off: dict[str, str], verify: bool, bound: float | None, report: Report) -> bool:
    """Fuses a module if one of ours serves it; True when nothing in it is to be looked at."""
    reasons = []
    written = type(module).__name__
    for mixin in parts.ALL:
        try:
            settings = mixin.recognise(module)
        except Left as left:
            reasons.append(str(left))
            continue
        if settings is None:
            continue
        if mixin.kind in off:
            reasons.append(f"{mixin.kind}: {off[mixin.kind]}")
            continue
        install(module, mixin, State(name, verify, bound, settings))
        report.replaced.append(Entry(name, written, mixin.said(settings)))
        report.layouts += mixin.layouts(module, name)
        return mixin.whole
    if reasons:
        report.left.append(Entry(name, written, "; ".join(reasons)))
    elif any(True for _ in module.parameters(recurse=False)):
        report.left.append(Entry(name, written, _plainly(module)))
    return False


def _plainly(module: nn.Module) -> str:
    if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
        return "by itself it is one call of torch, and ours would be the same"
    own = dict(module.named_parameters())
    if len(own) == 1 and not any(True for _ in module.children()) and next(iter(own.values())).dim() == 1:
        return f"{_UNKNOWN}; an RMS norm is known by a parameter weight and an attribute eps"
    return _UNKNOWN


def _within(name: str, covered: set[str]) -> bool:
    return any(name == one or one == "" or name.startswith(f"{one}.") for one in covered)


def _mixin(module: torch.nn.Module) -> type[Fused]:
    return type(module)  # type: ignore[return-value]
