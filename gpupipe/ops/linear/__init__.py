"""Linear layers with what stands around them: activation, gate, residual and norm.

Products are cuBLAS', under torch's own settings of precision and determinism; the rest is one pass of ours each. Weights are
kept as ``Linear`` keeps them. Under ``torch.autocast`` inputs, weights and biases are taken in its type, as ``linear`` takes
them; residuals, gates and norms keep theirs. Gradients of weights and biases are sums in float32, rounded to the type of the
parameter alone: those of float32 parameters under autocast are not rounded to its type on their way.
On the CPU and for float64 all is plain torch. Second derivatives are not offered.

Weights may be DTensors, split between ranks by rows or by columns: of those the local shard alone is read, and there is one
collective where a split part begins (by rows: of the gradient) or ends (by columns). See :mod:`gpupipe.train.parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import activations, checks, settings
from gpupipe.ops.activation import act_pass, served
from gpupipe.ops.activations import AnyActivation
from gpupipe.ops.dropout import drawn_seed
from gpupipe.ops.layout import MOST_ROWS
from gpupipe.ops.linear import reference
from gpupipe.ops.linear.act_op import linear_act_op
from gpupipe.ops.linear.autocast import cast_layer, type_of
from gpupipe.ops.linear.mlp_op import mlp_op
from gpupipe.ops.linear.norm_op import norm_linear_op
from gpupipe.ops.modulation import modulations
from gpupipe.ops.norms import Kind
from gpupipe.ops.norms.tiles import LARGEST
from gpupipe.ops.settings import Precision
from gpupipe.ops.sharded import is_sharded
from gpupipe.ops.sharded import linear as sharded


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: AnyActivation | None = "gelu_tanh",
    residual: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    recompute: bool = False,
    precision: Precision | None = None,
) -> torch.Tensor:
    """residual + dropout(act(x @ weight.T + bias)).

    Args:
        x: (..., K), float32, bfloat16, float16 or float64, any strides.
        weight: (N, K), of the type of x (autocast aside); N even for the gated activations, which multiply the first half of
            the N columns by the activation of the second.
        bias: (N,), of the type of x.
        activation: as in :func:`gpupipe.ops.bias_act_dropout_add`.
        residual: like the result; any floating type.
        p: the share that dropout drops, 0 to 1.
        training: False: nothing is dropped.
        recompute: keeps no pre-activation for the backward, which makes it again with one more product.
        precision: see :func:`gpupipe.ops.precision`. Outside conservative mode, tanh GELU that keeps no pre-activation (no
            gradient, or ``recompute``) is applied to the product before that is rounded. ``"fast"`` adds nothing.

    Returns:
        (..., N), or (..., N/2) for a gated activation, of the residual's type, else of that of x.

    Raises:
        ShapeError: when an argument does not fit.
        ConfigError: for another ``activation``, or a ``p`` that is no share.
    """
    act = activations.known(activation, gated=True)
    _, glu = activations.split(act)
    checks.share(p)
    if is_sharded(weight):
        return sharded.linear_act(x, weight, bias, activation, residual, p, training, recompute, precision)
    checks.floating("x", x)
    _layer(x, weight, bias, "x")
    if glu and weight.shape[0] % 2:
        raise checks.refuse("weight", weight, f"of an even number of rows, for {act}")
    size = weight.shape[0] // 2 if glu else weight.shape[0]
    if residual is not None:
        checks.same_shape("residual", residual, _shaped(x, size), "the result")
    x = x.to(_type(x, weight, bias))
    conservative = settings.mode(precision) == "conservative"
    p = p if training else 0.0
    if not served("linear_act", x):
        return reference.linear_act(x, *cast_layer(weight, bias), residual, p, act, conservative)
    seed = drawn_seed(x.device) if p > 0 else None
    keep = act != "none" and not recompute and _watched(x, weight, bias)
    return linear_act_op(x, weight, bias, _narrow(x, weight), residual, seed, p, act, keep, conservative)[0]  # type: ignore[no-any-return]


def mlp(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None = None,
    *,
    activation: AnyActivation = "gelu_tanh",
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    recompute: bool = False,
    precision: Precision | None = None,
) -> torch.Tensor:
    """residual + gate * (act(x @ weight1.T + bias1) @ weight2.T + bias2).

    Of what lies between, the pre-activation alone is kept for the backward, and for a gate's gradient what the gate multiplies.

    Args:
        x: (..., K), float32, bfloat16, float16 or float64, any strides.
        weight1: (F, K), of the type of x (autocast aside); (2F, K) for the gated activations.
        bias1: one value a row of weight1.
        weight2: (N, F).
        bias2: (N,).
        activation: as in :func:`gpupipe.ops.bias_act_dropout_add`, but not None.
        gate: (N,), one row a sample (B, N) or (B, 1, N), one a token, or for any other number of x's leading dimensions.
        residual: (..., N), any floating type.
        recompute: keeps no pre-activation either: one more product in the backward.
        precision: as in :func:`linear_act`.

    Returns:
        (..., N), of the residual's type, else of that of x.

    Raises:
        ShapeError: when an argument does not fit.
        ConfigError: for another ``activation``.
    """
    act = activations.known(activation, gated=True)
    _, glu = activations.split(act)
    if act == "none":
        raise ConfigError("activation is None", fix="two linear layers with nothing between them are one: choose an activation")
    if is_sharded(weight1) or is_sharded(weight2):
        return sharded.mlp(x, weight1, bias1, weight2, bias2, activation, gate, residual, recompute, precision)
    checks.floating("x", x)
    _layer(x, weight1, bias1, "x", "weight1", "bias1")
    if glu and weight1.shape[0] % 2:
        raise checks.refuse("weight1", weight1, f"of an even number of rows, for {act}")
    width = weight1.shape[0] // 2 if glu else weight1.shape[0]
    _layer(_shaped(x, width), weight2, bias2, "the activation", "weight2", "bias2")
    like = _shaped(x, weight2.shape[0])
    if residual is not None:
        checks.same_shape("residual", residual, like, "the result")
    if gate is not None:
        gate = modulations(like, gate=gate)[0]
    _type(x, weight2, bias2, "weight2", "bias2")
    x = x.to(_type(x, weight1, bias1, "weight1", "bias1"))
    conservative = settings.mode(precision) == "conservative"
    if not served("mlp", x):
        layers = *cast_layer(weight1, bias1), *cast_layer(weight2, bias2)
        return reference.mlp(x, *layers, gate, residual, act, conservative)
    keep = not recompute and _watched(x, weight1, bias1, weight2)
    narrow = _narrow(x, weight1), _narrow(x, weight2)
    return mlp_op(  # type: ignore[no-any-return]
        x, weight1, bias1, weight2, bias2, *narrow, gate, residual, act, keep, _watched(gate), conservative
    )[0]  # fmt: skip


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    factor: float | torch.Tensor = 1.0,
    kind: Kind = "layer",
    eps: float = 1e-6,
    precision: Precision | None = None,
) -> torch.Tensor:
    """factor * ((norm(x) * (1 + scale) + shift) @ weight.T + bias).

    The normalised rows are not kept for the backward: they are made again from x, in one pass.

    Args:
        x: (..., H), H up to 16 384 for the kernel. Under autocast its own type is normalised, and the result rounded.
        weight: (N, H), of the type of x (autocast aside).
        bias: (N,).
        norm_weight, norm_bias: (H,), of the norm; any floating type.
        scale, shift: as in :func:`gpupipe.ops.modulate_norm`.
        factor: a number; or a tensor (N,), (B, N) and so on, as the gate of :func:`mlp`: then one more pass.
        kind: ``"layer"`` or ``"rms"``.
        eps: added to the variance.
        precision: see :func:`gpupipe.ops.precision`. Outside conservative mode a number as factor is applied before rounding.

    Returns:
        (..., N), of the type of weight.

    Raises:
        ShapeError: when an argument does not fit.
        ConfigError: for another ``kind``.
    """
    checks.floating("x", x)
    if kind not in ("layer", "rms"):
        raise ConfigError(f"kind is {kind!r}", fix="choose 'layer' or 'rms'")
    eps = checks.epsilon(eps)
    if is_sharded(weight):
        return sharded.norm_linear(
            x, weight, bias, norm_weight, norm_bias, scale, shift, factor, kind, eps, precision
        )  # fmt: skip
    _layer(x, weight, bias, "x")
    checks.vector("norm_weight", norm_weight, x.shape[-1], x)
    checks.vector("norm_bias", norm_bias, x.shape[-1], x)
    norm_weight, norm_bias = (None if value is None else value.contiguous() for value in (norm_weight, norm_bias))
    if scale is not None or shift is not None:
        scale, shift = modulations(x, scale=scale, shift=shift)
    gate = modulations(_shaped(x, weight.shape[0]), factor=factor)[0] if isinstance(factor, torch.Tensor) else None
    number = 1.0 if isinstance(factor, torch.Tensor) else float(factor)
    _type(x, weight, bias)
    conservative = settings.mode(precision) == "conservative"
    rest: tuple[Any, ...] = (norm_weight, norm_bias, scale, shift, eps, kind == "rms", number, conservative)
    if served("norm_linear", x) and x.shape[-1] <= LARGEST and x.shape[:-1].numel() <= MOST_ROWS:
        y = norm_linear_op(x, weight, bias, _narrow(x, weight), *rest)[0]
    else:
        y = reference.norm_linear(x, *cast_layer(weight, bias), *rest)
    return y if gate is None else act_pass("norm_linear", y, None, gate, None, 0.0, "none", conservative)


def qkv_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    heads: int | None = None,
    packed: bool = False,
    precision: Precision | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Queries, keys and values by one product, as views of its result.

    The gradients of three separate views are put together by one copy; that of the packed result is used as it comes.

    Args:
        x: (..., K), float32, bfloat16, float16 or float64, any strides.
        weight: (3D, K): queries, keys, values one after the other; or three tensors (D, K), with as many rows as each needs,
            which are put together in each call.
        bias: (3D,), or three tensors (D,) or None where the weights are three.
        heads: splits D into (heads, D / heads).
        packed: returns the one result, for ops that take packed QKV.
        precision: see :func:`gpupipe.ops.precision`; all modes are alike.

    Returns:
        Three tensors (..., D), or (..., heads, D / heads). With ``packed``: (..., 3, D), or (..., 3, heads, D / heads).

    Raises:
        ShapeError: when an argument does not fit.
        ConfigError: for ``heads`` that do not divide D.
    """
    settings.mode(precision)
    checks.floating("x", x)
    if any(map(is_sharded, [weight] if isinstance(weight, torch.Tensor) else weight)):
        return sharded.qkv_linear(x, weight, bias, heads, packed, precision)  # type: ignore[no-any-return]
    if isinstance(weight, torch.Tensor):
        if weight.dim() != 2 or weight.shape[0] % 3:
            raise checks.refuse("weight", weight, f"(3D, {x.shape[-1] if x.dim() else 'K'}), or three tensors")
        sizes = [weight.shape[0] // 3] * 3
        if bias is not None and not isinstance(bias, torch.Tensor):
            raise checks.refuse("bias", bias, "one tensor, where weight is one")
    else:
        weight, bias, sizes = _together(x, weight, bias)
    _layer(x, weight, bias, "x")
    x = x.to(_type(x, weight, bias))
    if heads is not None and (heads < 1 or any(size % heads for size in sizes)):
        raise ConfigError(f"heads is {heads}", fix=f"it must divide {', '.join(str(size) for size in sorted(set(sizes)))}")
    if served("qkv_linear", x):
        y: torch.Tensor = linear_act_op(x, weight, bias, _narrow(x, weight), None, None, 0.0, "none", False, False)[0]
    else:
        y = reference.product(x, *cast_layer(weight, bias))
    if packed:
        if len(set(sizes)) > 1:
            raise ShapeError(
                f"weight has {sizes} rows, which do not pack", fix="packed needs as many for queries, keys and values"
            )
        y = y.unflatten(-1, (3, sizes[0]))
        return y if heads is None else y.unflatten(-1, (heads, sizes[0] // heads))
    parts = y.split(sizes, -1)
    return parts if heads is None else tuple(part.unflatten(-1, (heads, part.shape[-1] // heads)) for part in parts)


def _together(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: torch.Tensor | Sequence[torch.Tensor | None] | None
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Three weights as one, and their biases, zero where one has none."""
    if len(weights) != 3 or any(not isinstance(value, torch.Tensor) or value.dim() != 2 for value in weights):
        raise ShapeError(f"weight is {len(weights)} tensors", fix="weight must be one tensor (3D, K), or three (D, K)")
    given = [None] * 3 if biases is None else list(biases)
    if isinstance(biases, torch.Tensor) or len(given) != 3:
        raise checks.refuse("bias", biases, "three tensors or None, where weight is three")
    for number, (weight, bias) in enumerate(zip(weights, given, strict=True)):
        _layer(x, weight, bias, "x", f"weight[{number}]", f"bias[{number}]")
    whole, sizes = torch.cat(list(weights)), [weight.shape[0] for weight in weights]
    if all(bias is None for bias in given):
        return whole, None, sizes
    filled = [whole.new_zeros(size) if bias is None else bias for bias, size in zip(given, sizes, strict=True)]
    return whole, torch.cat(filled), sizes


def _layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, of: str, name: str = "weight", bias_name: str = "bias"
) -> None:
    """Checks the tensors of a linear layer against its input."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.refuse(of, x, "(..., K) with at least one column")
    checks.floating(name, weight, like=x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise checks.refuse(name, weight, f"(N, {x.shape[-1]}): a column for each of {of} {tuple(x.shape)}")
    if bias is not None:
        checks.floating(bias_name, bias, like=x)
        if bias.shape != weight.shape[:1]:
            raise checks.refuse(bias_name, bias, f"({weight.shape[0]},), one value a row of {name}")


def _type(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str = "weight", bias_name: str = "bias"
) -> torch.dtype:
    """The type of the product, which all three must come to. Weight and bias are left as they are by who calls, so that their
    gradients need not be rounded to it."""
    dtype = type_of(x, x.device)
    for value, called in ((weight, name), (bias, bias_name)):
        if value is not None and type_of(value, x.device) != dtype:
            raise checks.refuse(called, value, f"of the type of x, {dtype}; torch.autocast would see to it")
    return dtype


def _narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """A weight in the type of the product, out of autograd's sight; None where it has that type."""
    dtype = type_of(weight, x.device)
    return None if weight.dtype == dtype else weight.detach().to(dtype)


def _shaped(x: torch.Tensor, size: int) -> torch.Tensor:
    """Something with the shape (..., size) and no memory of its own, for checks."""
    return x[..., :1].expand(*x.shape[:-1], size)


def _watched(*tensors: torch.Tensor | None) -> bool:
    """True when a gradient will be asked for."""
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in tensors)
