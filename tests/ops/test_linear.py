"""Linear layers with activation, gate, residual and norm: exact, whole in their gradients, however torch calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import hold
from linear_cases import F, K, N, act_case, linear_act, mlp, mlp_case, named, norm_case, norm_linear, upstream, values
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gpupipe import ops
from gpupipe.device.jit import interpreted
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.linear.act_op import linear_act_backward_op, linear_act_op
from gpupipe.ops.linear.mlp_op import mlp_backward_op, mlp_op
from gpupipe.ops.linear.norm_op import norm_linear_backward_op, norm_linear_op

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels run on the CPU only under Triton's interpreter")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SETTINGS: list[dict[str, Any]] = [{}, {"recompute": True}, {"precision": "conservative"}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "gelu", "gelu_tanh", "silu", "geglu", "swiglu"])
def test_linear_act_as_exact_as_torch(act: Any, dtype: torch.dtype) -> None:
    for settings in SETTINGS if dtype == torch.bfloat16 else SETTINGS[:1]:
        hold(
            lambda settings=settings, **kw: ops.linear_act(**kw, activation=named(act), **settings),
            lambda **kw: linear_act(**kw, act=act), act_case(act), [upstream(3, 5, F)], dtype,
        )  # fmt: skip
    plain = act_case(act, bias=True, residual=True)
    hold(
        lambda **kw: ops.linear_act(**kw, activation=named(act)),
        lambda **kw: linear_act(**kw, act=act), plain, [upstream(3, 5, F)], dtype
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu", "geglu_tanh"])
def test_mlp_as_exact_as_torch(act: Any, dtype: torch.dtype) -> None:
    for settings in SETTINGS if dtype == torch.bfloat16 else SETTINGS[:1]:
        hold(
            lambda settings=settings, **kw: ops.mlp(**kw, activation=named(act), **settings),
            lambda **kw: mlp(**kw, act=act), mlp_case(act), [upstream(3, 5, N)], dtype,
        )  # fmt: skip
    if dtype != torch.float32:
        return
    for left_out in ({"gate": True}, {"residual": True}, {"gate": True, "residual": True, "bias2": True}):
        hold(
            lambda **kw: ops.mlp(**kw, activation=named(act)), lambda **kw: mlp(**kw, act=act), mlp_case(act, **left_out),
            [upstream(3, 5, N)], dtype,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_linear_as_exact_as_torch(kind: Any, dtype: torch.dtype) -> None:
    given = norm_case()
    if kind == "rms":
        del given["norm_bias"]
    for factor in (1.0, 0.3):
        hold(
            lambda factor=factor, **kw: ops.norm_linear(**kw, kind=kind, factor=factor),
            lambda factor=factor, **kw: norm_linear(**kw, kind=kind, factor=factor), given, [upstream(3, 5, N)], dtype,
        )  # fmt: skip
    given = {name: given[name] for name in ("x", "weight")} | values({"factor": (N,)})
    hold(
        lambda **kw: ops.norm_linear(**kw, kind=kind), lambda **kw: norm_linear(**kw, kind=kind), given, [upstream(3, 5, N)],
        dtype,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_any_number_of_rows(rows: int) -> None:
    for leading in ((rows,), (2, rows)):
        hold(ops.linear_act, linear_act, act_case("gelu_tanh", leading), [upstream(*leading, F)], torch.float16)
    hold(
        lambda **kw: ops.mlp(**kw, activation="gelu"), mlp, mlp_case("gelu", (2, rows)), [upstream(2, rows, N)], torch.float16
    )  # fmt: skip
    hold(ops.norm_linear, norm_linear, norm_case((2, rows)), [upstream(2, rows, N)], torch.float16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("three", [False, True])
def test_qkv_are_views_of_one_product(packed: bool, three: bool) -> None:
    given = values({"x": (2, 5, K), "weight": (3 * N, K), "bias": (3 * N,)})

    def fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        weights, biases = (weight.split(N), bias.split(N)) if three else (weight, bias)
        return ops.qkv_linear(x, weights, biases, heads=4, packed=packed)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        y = functional.linear(x, weight, bias).unflatten(-1, (3, 4, N // 4))
        return y if packed else tuple(y.unbind(-3))

    weights = [upstream(2, 5, 3, 4, N // 4)] if packed else [upstream(2, 5, 4, N // 4)] * 3
    hold(fused, eager, given, weights, torch.float32)
    made = fused(**{name: value.float() for name, value in given.items()})
    if not packed:
        assert len({part.untyped_storage().data_ptr() for part in made}) == 1


def test_qkv_of_unlike_widths() -> None:
    x, weights = torch.randn(2, 5, K), [torch.randn(size, K) for size in (16, 8, 8)]
    q, k, v = ops.qkv_linear(x, weights, [torch.ones(16), None, None])
    assert [part.shape[-1] for part in (q, k, v)] == [16, 8, 8]
    torch.testing.assert_close(q, functional.linear(x, weights[0], torch.ones(16)))
    torch.testing.assert_close(v, functional.linear(x, weights[2]))


def test_strides_do_not_matter() -> None:
    given = {name: value.float() for name, value in mlp_case("gelu").items()}
    laid = dict(given)
    laid["x"] = torch.randn(5, 3, 2, K)[:, :, 1].transpose(0, 1)
    laid["residual"] = torch.randn(1, 5, N).expand(3, 5, N)
    laid["weight1"] = given["weight1"].t().contiguous().t()
    found = []
    for inputs in (laid, {name: value.contiguous() for name, value in laid.items()}):
        leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
        y = ops.mlp(**leaves, activation="gelu")
        found.append(
            [
                y,
                *torch.autograd.grad(
                    y, list(leaves.values()), torch.randn(5, 3, N, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
                ),
            ]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "linear_act": (ops.linear_act, linear_act, lambda: act_case("gelu_tanh")),
    "mlp": (lambda **kw: ops.mlp(**kw, activation="gelu"), mlp, lambda: mlp_case("gelu")),
    "norm_linear": (ops.norm_linear, norm_linear, norm_case),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_alone_is_the_same(call: str) -> None:
    fused, _, case = CALLS[call]
    given = {name: value.float() for name, value in case().items()}
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    together = dict(zip(leaves, torch.autograd.grad(fused(**leaves).sin().sum(), list(leaves.values())), strict=True))
    for wanted in given:
        leaves = {name: value.clone().requires_grad_(name == wanted) for name, value in given.items()}
        fused(**leaves).sin().sum().backward()
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name != wanted)
        torch.testing.assert_close(leaves[wanted].grad, together[wanted], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_autocast_works_in_its_type_and_gradients_in_that_of_the_weights(call: str) -> None:
    fused, eager, case = CALLS[call]
    found = []
    for function in (fused, eager):
        leaves = {name: value.float().requires_grad_() for name, value in case().items()}
        with torch.autocast("cpu", torch.bfloat16):
            y = function(**leaves)
        assert y.dtype == (torch.bfloat16 if call == "norm_linear" else torch.float32)  # that of the residual
        found.append([y, *torch.autograd.grad(y.float().sin().sum(), list(leaves.values()))])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() < 0.06 * b.abs().max()  # a few roundings to bf16, 2^-7 each under the interpreter
    for name, gradient in zip(leaves, found[0][1:], strict=True):  # sums in float32 that no narrower type has rounded
        assert not name.startswith("weight") or (gradient != gradient.bfloat16()).any()
    with torch.autocast("cpu", torch.bfloat16), ops.use("reference"):
        assert fused(**{name: value.float() for name, value in case().items()}).dtype == y.dtype


def test_the_gradient_of_one_row_is_exact() -> None:
    x, weight, dy = (torch.randn(size).bfloat16() for size in ((1, K), (F, K), (1, F)))
    leaf = weight.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ops.linear_act(x, leaf, activation=None).backward(dy)
    assert torch.equal(leaf.grad, dy.float().T * x.float())


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_of_weights_in_one_half_type_under_autocast_to_the_other(call: str, rows: int) -> None:
    """Sums alone are rounded, not what is summed: below 2^-14 float16 has fewer digits than bfloat16, above it more."""
    fused, _, case = CALLS[call]
    given = {name: value for name, value in case().items() if name == "x" or name.startswith(("weight", "bias"))}
    x = given.pop("x").flatten(0, 1).repeat(2, 1)[:rows]
    for dtype, cast, scale in ((torch.float16, torch.bfloat16, 2.0**-14), (torch.bfloat16, torch.float16, 1.0)):
        found = []
        for kind in (dtype, torch.float32):
            leaves = {name: value.to(dtype).to(kind).requires_grad_() for name, value in given.items()}
            with torch.autocast("cpu", cast):
                y = fused(x=x.float(), **leaves)
            y.backward(upstream(*y.shape).to(y.dtype) * scale)
            found.append({name: leaf.grad for name, leaf in leaves.items()})
        for name in filter(lambda name: name.startswith("weight"), given):  # the interpreter cuts a bias' gradient off
            assert torch.equal(found[0][name], found[1][name].to(dtype)), name


def test_x_is_not_cast_for_a_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(5, K), torch.randn(K, K)
    casts: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default:
                casts.append(tuple(args[0].shape))
            return func(*args, **kwargs or {})

    with torch.autocast("cpu", torch.bfloat16), Watch():
        ops.mlp(x, weight, None, weight)
        assert casts.count(x.shape) == 1
        casts.clear()
        ops.norm_linear(x, weight)
        assert casts.count(x.shape) == 0, "what is normalised has float32"


def test_what_is_kept_for_the_backward() -> None:
    """The pre-activation alone, or nothing; never the normalised rows."""

    def kept(function: Callable[..., Any], inputs: dict[str, torch.Tensor], **settings: Any) -> int:
        leaves = {name: value.float().requires_grad_() for name, value in inputs.items()}
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
        found: dict[int, int] = {}

        def pack(value: torch.Tensor) -> torch.Tensor:
            if value.untyped_storage().data_ptr() not in own:
                found[value.untyped_storage().data_ptr()] = value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            function(**leaves, **settings)
        return sum(found.values())

    assert kept(ops.linear_act, act_case("swiglu"), activation="swiglu") == 15 * 2 * F
    assert kept(ops.linear_act, act_case("swiglu"), activation="swiglu", recompute=True) == 0
    assert kept(ops.mlp, mlp_case("gelu", gate=True)) == 15 * F
    assert kept(ops.mlp, mlp_case("gelu", gate=True), recompute=True) == 0
    assert kept(ops.mlp, mlp_case("gelu"), recompute=True) == 15 * N
    assert kept(ops.norm_linear, norm_case()) == 2 * 15  # mean and deviation


def test_dropout_repeats_in_the_backward() -> None:
    x, weight = torch.randn(64, 8, requires_grad=True), torch.eye(8)
    torch.manual_seed(3)
    y = ops.linear_act(x, weight, activation=None, p=0.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, (y != 0) * 2.0)
    torch.manual_seed(3)
    assert torch.equal(ops.linear_act(x, weight, activation=None, p=0.5), y)
    assert torch.equal(ops.linear_act(x, weight, activation=None, p=0.5, training=False), functional.linear(x, weight))


def test_repeats_bit_for_bit() -> None:
    for fused, _, case in CALLS.values():
        leaves = [{name: value.float().requires_grad_() for name, value in case().items()} for _ in range(2)]
        found = [torch.autograd.grad(fused(**given).sin().sum(), list(given.values())) for given in leaves]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_library_ops_keep_their_contract() -> None:
    tests = ("test_schema", "test_faketensor")
    given = {name: value.float().requires_grad_() for name, value in act_case("swiglu", (2, 3)).items()}
    x, weight, bias, residual = given.values()
    torch.library.opcheck(
        linear_act_op.library_op, (x, weight, bias, None, residual, torch.tensor([5]), 0.3, "swiglu", True, False)
    )
    torch.library.opcheck(linear_act_op.library_op, (x, weight, None, None, None, None, 0.0, "none", False, False))
    pre = torch.randn(2, 3, 2 * F)
    x, weight, bias, residual = (value.detach() for value in given.values())
    for kept, needs in ((pre, [True] * 3), (None, [False, True, True])):
        torch.library.opcheck(
            linear_act_backward_op.library_op, (residual, x, weight, bias, kept, None, 0.0, "swiglu", False,
             x.dtype, needs),
            test_utils=tests,
        )  # fmt: skip
    given = {name: value.float().requires_grad_() for name, value in mlp_case("gelu", (2, 3)).items()}
    low = x.bfloat16().requires_grad_()  # the weights are of a wider type
    torch.library.opcheck(
        linear_act_op.library_op, (low, weight, bias, weight.bfloat16(), None, None, 0.0, "silu", True, False)
    )
    *layers, gate, residual = given.values()
    torch.library.opcheck(mlp_op.library_op, (*layers, None, None, gate, residual, "gelu", True, True, False))
    *first, gate, residual = (value.detach() for value in given.values())
    for needs in ([True] * 6, [False, False, False, True, False, False]):
        torch.library.opcheck(
            mlp_backward_op.library_op, (residual, *first, gate, None, residual, "gelu", False, *[x.dtype] * 2, needs),
            test_utils=tests,
        )  # fmt: skip
    given = {name: value.float().requires_grad_() for name, value in norm_case((2, 3)).items()}
    x, weight, bias, *norm = given.values()
    for narrow in (None, weight.detach().bfloat16()):
        torch.library.opcheck(norm_linear_op.library_op, (x, weight, bias, narrow, *norm, 1e-6, False, 0.5, False))
    inputs = [value.detach() for value in given.values()]
    for needs in ([True] * 7, [False, True, False, False, False, True, False]):
        torch.library.opcheck(
            norm_linear_backward_op.library_op,
            (torch.randn(2, 3, N), *inputs, torch.rand(6), torch.rand(6), 1e-6, False, 0.5, False, torch.float32, needs),
            test_utils=tests,
        )  # fmt: skip


@pytest.mark.parametrize(("dynamic", "autocast"), [(False, False), (True, True)])
def test_compiles_whole_and_gives_the_same(dynamic: bool, autocast: bool) -> None:
    weights = [value.float() for value in values({"w": (3 * N, K), "o": (K, N), "a": (F, K), "b": (K, F)}).values()]

    def block(x: torch.Tensor, gate: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            q, k, v = ops.qkv_linear(ops.norm_linear(x, torch.eye(K), scale=gate, shift=gate), weights[0])
            x = ops.linear_act(q * k + v, weights[1], activation="silu", residual=x)
            return ops.mlp(x, weights[2], None, weights[3], gate=gate, residual=x)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 6) if dynamic else (4,):
        found = []
        for function in (block, compiled):
            leaves = [
                value.clone().requires_grad_() for value in (upstream(2, rows, K).float(), upstream(2, K).float(), *weights)
            ]
            y = function(*leaves)
            found.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_errors_name_the_argument() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("weight is", lambda: ops.linear_act(x, weight[:, :7])),
        ("weight is bfloat16", lambda: ops.linear_act(x, weight.bfloat16())),
        ("bias is", lambda: ops.linear_act(x, weight, bias[:5])),
        ("even number", lambda: ops.linear_act(x, weight[:5], activation="swiglu")),
        ("residual is", lambda: ops.linear_act(x, weight, residual=x)),
        ("weight2 is", lambda: ops.mlp(x, weight, bias, weight)),
        ("bias1 is", lambda: ops.mlp(x, weight, bias[:5], weight.t())),
        ("gate is", lambda: ops.mlp(x, weight, bias, weight.t(), gate=bias)),
        ("norm_weight is", lambda: ops.norm_linear(x, weight, norm_weight=bias)),
        ("factor is", lambda: ops.norm_linear(x, weight, factor=torch.randn(5))),
        ("weight is", lambda: ops.qkv_linear(x, weight[:5])),
        ("weight is 2 tensors", lambda: ops.qkv_linear(x, [weight, weight])),
        (r"bias\[1\] is", lambda: ops.qkv_linear(x, [weight] * 3, [bias, bias[:5], bias])),
        ("do not pack", lambda: ops.qkv_linear(x, [weight, weight[:3], weight], packed=True)),
    ]
    for match, call in calls:
        with pytest.raises(ShapeError, match=match):
            call()
    with pytest.raises(ConfigError, match="activation is None"):
        ops.mlp(x, weight, bias, weight.t(), activation=None)
    with pytest.raises(ConfigError, match="heads is 4"):
        ops.qkv_linear(x, weight, heads=4)
    with pytest.raises(ConfigError, match="kind is"):
        ops.norm_linear(x, weight, kind="batch")  # type: ignore[arg-type]
