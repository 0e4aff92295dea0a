"""The pass of bias, activation, dropout, gate and residual: kernel, gradients, and the ways in which torch may call it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from activation_cases import check_everywhere
from exact import hold
from linear_cases import ACTS, arguments, eager_act, named
from torch.nn import functional

from gpupipe import ops
from gpupipe.device import jit
from gpupipe.device.autotune import Machine
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import bias_act_dropout_add
from gpupipe.ops.activation.op import act_backward_op, act_op
from gpupipe.ops.activation.tiles import backward_candidates, forward_candidates

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="kernels run on the CPU only under Triton's interpreter")


def check(
    shape: tuple[int, ...], act: str, gate: tuple[int, ...] | None, dtype: torch.dtype, precision: str | None = None
) -> None:
    given = arguments(shape, act, gate)
    hold(
        lambda **kw: bias_act_dropout_add(**kw, activation=named(act), precision=precision),
        lambda **kw: eager_act(**kw, act=act),
        given, [(torch.arange(given["residual"].numel()) % 9 / 4 - 1).double().view(shape)], dtype,
    )  # fmt: skip


def results(given: dict[str, Any], **rest: Any) -> list[torch.Tensor]:
    leaves = {name: value.float().requires_grad_() for name, value in given.items()}
    y = bias_act_dropout_add(**leaves, **rest)
    return [y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_as_exact_as_torch(act: str, dtype: torch.dtype) -> None:
    for gate in (None, (40,), (3, 40), (3, 5, 40)) if dtype == torch.bfloat16 else ((3, 40),):
        check((3, 5, 40), act, gate, dtype)
    check((3, 5, 40), act, (3, 1, 40), dtype, "conservative")


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("columns", [7, 129])
def test_any_number_of_rows_and_columns(rows: int, columns: int) -> None:
    check((rows, columns), "gelu_tanh", (columns,), torch.float16)
    check((1, rows, columns), "swiglu", (1, columns), torch.float16)


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_few_columns(columns: int) -> None:
    check((5, columns), "silu", None, torch.float16)
    check((5, columns), "geglu", (columns,), torch.float16)


def test_every_tile_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine("some", 3)
    forward, backward = forward_candidates(200), backward_candidates(gpu, 200, 40, 1, True)
    assert min(len(forward), len(backward)) > 5
    for turn in range(0, max(len(forward), len(backward)), 3):
        monkeypatch.setattr("gpupipe.ops.activation.forward.choose", lambda *_, turn=turn: forward[turn % len(forward)])
        monkeypatch.setattr("gpupipe.ops.activation.backward.choose", lambda *_, turn=turn: backward[turn % len(backward)])
        check((1, 40, 200), "gelu_tanh", (200,), torch.float32)


def test_conservative_rounds_where_torch_does() -> None:
    given = {name: value.half() for name, value in arguments((2, 9, 64), "swiglu", (2, 64)).items()}
    exact = eager_act(**given, act="swiglu")
    assert (bias_act_dropout_add(**given, activation="swiglu", precision="conservative") != exact).float().mean() < 0.01
    with ops.use("reference"):
        assert torch.equal(bias_act_dropout_add(**given, activation="swiglu", precision="conservative"), exact)
    assert (bias_act_dropout_add(**given, activation="swiglu") != exact).float().mean() > 0.1


def test_strides_are_followed() -> None:
    base = arguments((3, 8, 48), "silu", (3, 48))
    for cut in (
        lambda t: t[:, ::2, :32],
        lambda t: t[:, :, 1:33],
        lambda t: t.transpose(1, 2),
        lambda t: t[:1].expand(3, 8, 48),
        lambda t: t[0, 0],
    ):
        found = []
        for dtype in (torch.float32, torch.float64):
            x, residual = (base[name].to(dtype, copy=True).requires_grad_() for name in ("x", "residual"))
            bias = torch.linspace(-1, 1, cut(x).shape[-1], dtype=dtype)
            y = bias_act_dropout_add(cut(x), bias, cut(residual), activation="silu")
            y.backward(cut(base["residual"].to(dtype)))
            found.append([y.detach(), x.grad, residual.grad])
        for value, truth in zip(*found, strict=True):
            torch.testing.assert_close(value.double(), truth, atol=1e-5, rtol=1e-5)  # float32


def test_a_bias_may_be_a_column() -> None:
    x, bias = torch.randn(3, 8), torch.randn(8, 2).requires_grad_()
    y = bias_act_dropout_add(x, bias[:, 1], activation="silu")
    expected = functional.silu(x + bias[:, 1])
    torch.testing.assert_close(y, expected)
    (found,), (exact,) = (torch.autograd.grad(made.sum(), bias) for made in (y, expected))
    torch.testing.assert_close(found, exact)


def test_dropout_repeats_in_the_backward_and_drops_its_share() -> None:
    x = torch.ones(64, 100, requires_grad=True)
    gate = torch.full((100,), 2.0, requires_grad=True)
    torch.manual_seed(3)
    y = bias_act_dropout_add(x, gate=gate, p=0.25)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert gate.grad is not None
    assert torch.equal(x.grad, y.detach())  # both are gate / (1 - p) where kept, else 0
    assert torch.allclose(y[y != 0], torch.tensor(8 / 3))
    share = float((y == 0).float().mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / y.numel()) ** 0.5  # five deviations of a binomial
    torch.testing.assert_close(gate.grad, (y.detach() / 2).sum(0))
    torch.manual_seed(3)
    assert torch.equal(bias_act_dropout_add(x, gate=gate, p=0.25), y)
    assert torch.equal(bias_act_dropout_add(x, p=0.25, training=False), x)
    assert not bias_act_dropout_add(x, p=1.0).any()


def test_a_gradient_alone_is_the_same() -> None:
    given = arguments((2, 5, 16), "geglu", (2, 16))
    together = dict(zip(given, results(given, activation="geglu")[1:], strict=True))
    for wanted in itertools.combinations(given, 2):
        leaves = {name: value.float().requires_grad_(name in wanted) for name, value in given.items()}
        bias_act_dropout_add(**leaves, activation="geglu").square().sum().backward()
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == (name in wanted)
            assert leaf.grad is None or torch.equal(leaf.grad, together[name])


def test_the_result_has_the_type_of_the_residual() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(4, 8, requires_grad=True)
    y = bias_act_dropout_add(x, residual=residual, activation="silu")
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None
    assert residual.grad is not None
    assert (x.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.zeros(4, 8)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    for act in ("gelu", "gelu_tanh", "silu"):
        y = bias_act_dropout_add(x, activation=named(act))  # type: ignore[arg-type]
        assert y[1, 2].isnan()
        assert y[2, 3].isinf()
        assert y.isfinite().sum() == 30


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_number_has_its_activation(act: str, dtype: torch.dtype) -> None:
    check_everywhere(act, dtype, "cpu")


def test_repeats_bit_for_bit() -> None:
    given = arguments((4, 33, 72), "gelu_tanh", (4, 72))
    assert all(torch.equal(a, b) for a, b in zip(*(results(given, activation="gelu_tanh") for _ in range(2)), strict=True))


def test_torch_accepts_the_ops() -> None:
    given = {name: v.float() for name, v in arguments((2, 3, 8), "swiglu", (2, 8)).items()}
    leaves = [given[name].requires_grad_() for name in ("x", "bias", "gate", "residual")]
    torch.library.opcheck(act_op.library_op, (*leaves, None, 0.0, "swiglu", False))
    torch.library.opcheck(act_op.library_op, (leaves[3], None, None, None, torch.tensor([5]), 0.5, "none", False))
    x, bias, gate, residual = (value.detach() for value in leaves)
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            act_backward_op.library_op, (residual, x, bias, gate, None, 0.0, "swiglu", torch.float32, False, needs)
        )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager_act(dynamic: bool) -> None:
    def step(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return bias_act_dropout_add(x * 1, bias, residual, gate=gate, activation="gelu_tanh")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (5, 6):
        given = arguments((2, rows, 24), "gelu_tanh", (2, 24))
        found = []
        for function in (step, compiled):
            leaves = {name: value.float().requires_grad_() for name, value in given.items()}
            y = function(**leaves)
            y.square().sum().backward()
            found.append([y.detach(), *(leaf.grad for leaf in leaves.values())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_errors_name_the_argument() -> None:
    x = torch.randn(2, 3, 8)
    for match, given in (
        ("x is int64", {"x": torch.ones(2, dtype=torch.int64)}),
        ("2C", {"x": torch.randn(2, 7), "activation": "swiglu"}),
        ("bias", {"x": x, "bias": torch.randn(7)}),
        ("residual", {"x": x, "residual": torch.randn(2, 3, 7)}),
        ("gate", {"x": x, "gate": torch.randn(3, 8)}),
    ):
        with pytest.raises(ShapeError, match=match):
            bias_act_dropout_add(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="activation is 'tanh'"):
        bias_act_dropout_add(x, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="p is"):
        bias_act_dropout_add(x, p=1.5)
