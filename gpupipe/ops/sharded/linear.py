"""The linear ops on weights that are split between ranks: the plain ops on local shards, with one collective where they begin
or end."""

from __future__ import annotations

from typing import Any

import torch

from gpupipe.errors import ShapeError
from gpupipe.ops import activations
from gpupipe.ops.activations import AnyActivation
from gpupipe.ops.dropout import own_draws
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import Cut, cut, is_sharded, replicated
from gpupipe.ops.sharded.collectives import all_copied, copied, picked, summed


def linear_act(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    activation: AnyActivation | None,
    residual: torch.Tensor | None,
    p: float,
    training: bool,
    recompute: bool,
    precision: Precision | None,
) -> torch.Tensor:
    """By rows: x is whole, the result this rank's columns of it. By columns: x is this rank's columns, the result whole."""
    from gpupipe.ops import activation as passes
    from gpupipe.ops import linear

    own = cut("weight", weight)
    settings: dict[str, Any] = {"activation": activation, "training": training, "precision": precision}
    if own.by == "columns":
        partial = linear.linear_act(x, own.local, None, activation=None, precision=precision)
        return passes.bias_act_dropout_add(
            summed(partial, own.group), replicated("bias", bias), residual, p=p, **settings
        )  # fmt: skip
    _parts("weight", own, 1 + activations.split(activations.known(activation, gated=True))[1])
    rows = _rows("bias", bias, own)
    with own_draws(own.rank, x.device, when=p > 0 and training and own.by == "rows"):
        return linear.linear_act(
            _into(x, own), own.local, rows, residual=residual, p=p, recompute=recompute, **settings
        )  # fmt: skip


def mlp(
    x: torch.Tensor,
    weight1: Any,
    bias1: torch.Tensor | None,
    weight2: Any,
    bias2: torch.Tensor | None,
    activation: AnyActivation,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    recompute: bool,
    precision: Precision | None,
) -> torch.Tensor:
    """The first layer by rows, the second by columns: one sum behind it, then bias, gate and residual on all ranks alike.

    Raises:
        ShapeError: for layers that are split otherwise.
    """
    from gpupipe.ops import activation as passes
    from gpupipe.ops import linear

    if not (is_sharded(weight1) and is_sharded(weight2)):
        raise ShapeError("of weight1 and weight2 one alone is split", fix="split weight1 by rows and weight2 by columns")
    one, two = cut("weight1", weight1), cut("weight2", weight2)
    if one.by != "rows" or two.by != "columns":
        raise ShapeError(
            f"weight1 is split by {one.by}, weight2 by {two.by}", fix="split weight1 by rows and weight2 by columns"
        )
    _parts("weight1", one, 1 + activations.split(activations.known(activation, gated=True))[1])
    partial = linear.mlp(
        _into(x, one), one.local, _rows("bias1", bias1, one), two.local, None, activation=activation, recompute=recompute,
        precision=precision,
    )  # fmt: skip
    return passes.bias_act_dropout_add(
        summed(partial, two.group), replicated("bias2", bias2), residual, gate=gate, precision=precision
    )  # fmt: skip


def norm_linear(
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    factor: float | torch.Tensor,
    kind: Any,
    eps: float,
    precision: Precision | None,
) -> torch.Tensor:
    """The norm on all ranks alike, the layer by rows. The normalised rows are kept: the sum of gradients goes between both.

    Raises:
        ShapeError: for a layer by columns, whose ranks do not have the rows to normalise.
    """
    from gpupipe.ops import activation as passes
    from gpupipe.ops import linear, norms

    own = cut("weight", weight)
    if own.by == "columns":
        raise ShapeError("weight is split by columns, so that no rank has whole rows to normalise", fix="split it by rows")
    weights = [replicated(name, value) for name, value in (("norm_weight", norm_weight), ("norm_bias", norm_bias))]
    settings: dict[str, Any] = {"eps": eps, "precision": precision}
    if scale is None and shift is not None:
        scale = torch.zeros_like(shift)
    if scale is not None:
        y = norms.modulate_norm(x, scale, shift, weights[0], weights[1], kind=kind, **settings)
    elif kind == "layer":
        y = norms.layer_norm(x, weights[0], weights[1], **settings)
    else:
        y = norms.rms_norm(x, weights[0], **settings)
    made = linear.linear_act(
        _into(y, own), own.local, _rows("bias", bias, own), activation=None, precision=precision
    )  # fmt: skip
    if isinstance(factor, torch.Tensor):
        return passes.bias_act_dropout_add(made, gate=factor, precision=precision)
    return made if factor == 1 else made * factor


def qkv_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    heads: int | None,
    packed: bool,
    precision: Precision | None,
) -> Any:
    """By rows, queries, keys and values each for itself: this rank's heads of each.

    Raises:
        ShapeError: for weights that are split otherwise, or heads that the ranks do not divide.
    """
    from gpupipe.ops import linear

    together = isinstance(weight, torch.Tensor)
    weights = [weight] if together else list(weight)
    if not all(is_sharded(value) for value in weights):
        raise ShapeError("of three weights not all are split", fix="split all by rows, or none")
    cuts = [cut("weight" if together else f"weight[{number}]", value) for number, value in enumerate(weights)]
    own = cuts[0]
    for number, each in enumerate(cuts):
        _parts("weight" if together else f"weight[{number}]", each, 3 if together else 1)
        if each.by != own.by or each.by == "columns":
            raise ShapeError(f"weight is split by {each.by}", fix="split queries, keys and values by rows")
    if heads is not None and own.by == "rows":
        if heads % own.ranks:
            raise ShapeError(f"heads is {heads} for {own.ranks} ranks", fix=f"heads must be a multiple of {own.ranks}")
        heads //= own.ranks
    if together:
        rows: Any = _rows("bias", bias, own)
    elif bias is None:
        rows = None
    else:
        pairs = zip(list(bias), cuts, strict=True)
        rows = [_rows(f"bias[{number}]", value, each) for number, (value, each) in enumerate(pairs)]
    shards = own.local if together else [each.local for each in cuts]
    return linear.qkv_linear(_into(x, own), shards, rows, heads=heads, packed=packed, precision=precision)


def within(*weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Weights of norms of queries and keys, for heads that are split: of replicated DTensors the local value, with one sum of
    their gradients; others as they are."""
    found = [(place, cut("a weight", value)) for place, value in enumerate(weights) if is_sharded(value)]
    if not found:
        return weights
    made = list(weights)
    inside = [(place, each) for place, each in found if each.by == "nothing"]
    for place, each in found:
        made[place] = each.local
    if inside:
        for (place, _), value in zip(inside, all_copied([each.local for _, each in inside], inside[0][1].group), strict=True):
            made[place] = value
    return tuple(made)


def _into(x: torch.Tensor, own: Cut) -> torch.Tensor:
    return copied(x, own.group) if own.by == "rows" else x


def _parts(name: str, own: Cut, parts: int) -> None:
    if own.by == "rows" and own.parts != parts:
        raise ShapeError(
            f"{name} holds {parts} layers one after the other, and is split as if it were {own.parts}",
            fix="split it by gpupipe.train.parallel.split_rows(…, parts=…)",
        )


def _rows(name: str, bias: Any, own: Cut) -> torch.Tensor | None:
    """This rank's values of a bias, which is split as the weight's rows are, or not at all."""
    if bias is None or own.by == "nothing":
        return replicated(name, bias)
    if not is_sharded(bias):
        return picked(bias, own.parts, own.group)
    found = cut(name, bias)
    if found.by == "nothing":
        return picked(found.local, own.parts, own.group)
    _parts(name, found, own.parts)
    return found.local
