"""Group norm with its activation: kernels under Triton's interpreter against float64, in both memory orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import hold
from torch.nn import functional

import gpupipe.ops as ops
from gpupipe.device import jit
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import activations
from gpupipe.ops.group_norm import forward, group_norm_backward_op, group_norm_op

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="needs TRITON_INTERPRET=1")

LAST = torch.channels_last_3d


def eager(groups: int, act: str | None) -> Callable[..., torch.Tensor]:
    def body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activations.apply(torch.group_norm(x, groups, weight, bias), act or "none")

    return body


def fused(groups: int, act: str | None) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: ops.group_norm_act(x, groups, weight, bias, activation=act)


def results(body: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of all inputs."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    y = body(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, weight_of(inputs[0]).to(y.dtype))]


def weight_of(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_close(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, act: str | None) -> None:
    inputs = {"x": x, "weight": weight, "bias": bias}
    hold(fused(groups, act), eager(groups, act), inputs, [weight_of(x)], x.dtype)


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, last: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2 + 1).to(dtype)
    return [x.contiguous(memory_format=LAST) if last else x, torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    ("shape", "groups", "act", "dtype"),
    [
        ((2, 16, 3, 5, 7), 4, "silu", torch.bfloat16),
        ((1, 24, 2, 4, 8), 4, "gelu_tanh", torch.float16),
        ((1, 48, 9, 8, 8), 3, "silu", torch.bfloat16),  # more than one chunk of positions
        ((3, 17, 2, 3, 1), 1, "gelu", torch.float32),
        ((1, 5, 1, 1, 1), 5, None, torch.float32),
    ],
)
def test_values_and_gradients(shape: tuple[int, ...], groups: int, act: str | None, dtype: torch.dtype, last: bool) -> None:
    x, weight, bias = made(shape, dtype, last)
    assert_close(x, weight, bias, groups, act)
    y = ops.group_norm_act(x, groups, weight, bias, activation=act)
    assert y.is_contiguous(memory_format=LAST if last else torch.contiguous_format)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_tiles_that_are_all_whole_and_those_that_are_not(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones are read without a mask."""
    whole: list[bool] = []
    launch = forward.launch

    def watched(kernel: object, *args: object, **options: object) -> None:
        whole.extend(bool(value) for name, value in options.items() if name == "WHOLE")
        launch(kernel, *args, **options)

    monkeypatch.setattr(forward, "launch", watched)
    for size in (8, 7):
        assert_close(*made((2, 64, 2, 8, size), torch.bfloat16, last), 4, "silu")
    assert whole == [True, False]


@pytest.mark.parametrize("size", [1, 15, 16, 17])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_any_number_of_positions(size: int, last: bool) -> None:
    assert_close(*made((1, 6, 1, 1, size), last=last), 2, "silu")


def test_other_ranks_and_no_positions() -> None:
    for shape in ((2, 8), (2, 8, 5), (2, 8, 3, 5)):
        assert_close(*made(shape), 2, "silu")
    assert_close(torch.randn(2, 5, 8).transpose(1, 2), torch.randn(8), torch.randn(8), 2, "silu")
    for shape in ((0, 8, 4), (2, 8, 0)):
        y, dx, dweight, dbias = results(lambda x, w, b: ops.group_norm_act(x, 2, w, b, activation="silu"), *made(shape))
        assert y.shape == dx.shape == shape
        assert not dweight.any()
        assert not dbias.any()


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_strided_inputs(last: bool) -> None:
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[:, :8], lambda x: x[:, 1:9], lambda x: x[:, :8, 1:3], lambda x: x[:, :8, :2, :, ::2],
        lambda x: x[:, :8].transpose(2, 4), lambda x: x[:1, :8].expand(3, -1, -1, -1, -1), lambda x: x[:, :8, :1, :1],
    ]  # fmt: skip
    x, weight, bias = made((1, 16, 3, 2, 6), last=last)
    for view in views:
        given = {"x": x, "weight": weight[:8], "bias": bias[:8]}
        weighs = [weight_of(view(x))]
        hold(
            lambda x, weight, bias, view=view: fused(2, "silu")(view(x), weight, bias),
            lambda x, weight, bias, view=view: eager(2, "silu")(view(x), weight, bias), given, weighs, x.dtype,
        )  # fmt: skip


def test_unaligned_inputs_and_strided_weights() -> None:
    _, weight, bias = (value[..., ::2] for value in made((1, 32, 1)))
    off = torch.randn(2 * 16 * 60 + 1)[1:].view(2, 16, 3, 4, 5)
    for got, right in zip(*(results(body(4, "silu"), off, weight, bias) for body in (fused, eager)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_large_means_keep_their_digits(last: bool) -> None:
    """At a mean of 3000 deviations, sums of squares in float32 would lose the variance altogether."""
    torch.manual_seed(0)
    x = (torch.randn(1, 16, 9, 8, 8) + 3000).contiguous(memory_format=LAST if last else torch.contiguous_format)
    right = functional.group_norm(x.double(), 2)
    # a mean in float32 is off by up to half an ulp of 3000, so is each difference from it
    assert (ops.group_norm_act(x, 2).double() - right).abs().max() < 4 * 3000 * torch.finfo(torch.float32).eps


def test_an_outlier_first_does_not_spoil_the_variance() -> None:
    x = torch.randn(1, 4, 8, 16, 16)
    x[:, :, 0, 0, 0] = 1e4
    right = functional.group_norm(x.double(), 2)
    assert (ops.group_norm_act(x, 2).double() - right).abs().max() <= 1e-5 * right.abs().max()


def test_conservative_rounds_before_the_activation() -> None:
    x, weight, bias = made((2, 32, 3, 4, 4), torch.float16)
    ours = ops.group_norm_act(x, 8, weight, bias, activation="silu", precision="conservative")
    theirs = eager(8, "silu")(x, weight, bias)
    assert (ours == theirs).double().mean() > 0.98  # only the order of sums differs


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_some_gradients_and_no_affine(last: bool) -> None:
    x, weight, bias = made((1, 8, 2, 4, 4), last=last)
    whole = results(lambda *given: ops.group_norm_act(given[0], 2, *given[1:], activation="silu"), x, weight, bias)
    weight.requires_grad_()
    (alone,) = torch.autograd.grad(
        ops.group_norm_act(x, 2, weight, bias, activation="silu"), weight,
        torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float(),
    )  # fmt: skip
    assert torch.equal(alone, whole[2])
    truth = results(lambda x: functional.silu(functional.group_norm(x, 2)), x.double())
    for got, right in zip(results(lambda x: ops.group_norm_act(x, 2, activation="silu"), x), truth, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


def test_repeats_bit_for_bit_and_leaves_inputs_alone() -> None:
    given = made((1, 48, 9, 8, 8), torch.bfloat16, last=True)
    before = [value.clone() for value in given]
    first, second = (results(lambda *t: ops.group_norm_act(t[0], 3, *t[1:], activation="silu"), *given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_over_its_group_alone(bad: float) -> None:
    x, weight, bias = made((2, 8, 2, 4, 4), last=True)
    x[1, 5, 1, 2, 3] = bad
    y, dx, dweight, _ = results(lambda *t: ops.group_norm_act(t[0], 2, *t[1:], activation="silu"), x, weight, bias)
    for value in (y, dx):
        assert value[1, 4:].isnan().all()
        assert value[1, :4].isfinite().all()
        assert value[0].isfinite().all()
    assert dweight[4:].isnan().all()
    assert dweight[:4].isfinite().all()


def test_opcheck() -> None:
    last = True
    x, weight, bias = (value.requires_grad_() for value in made((2, 8, 2, 3, 4), last=last))
    given: tuple[Any, ...] = (x, 2, weight, bias, 1e-5, "silu", last, False)
    torch.library.opcheck(group_norm_op.library_op, given)
    _, mean, rstd = group_norm_op(*given)
    args = (x.detach(), x.detach(), 2, weight.detach(), None, mean, rstd, "silu", last, False, [True, True, False])
    torch.library.opcheck(group_norm_backward_op.library_op, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    def body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ops.group_norm_act(x * 2, 2, weight, bias, activation="silu")

    compiled = torch.compile(body, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 8, 2, 3, 4), (2, 8, 3, 3, 4)) if dynamic else ((2, 8, 2, 3, 4),):
        given = made(shape, last=True)
        for got, right in zip(results(compiled, *given), results(body, *given), strict=True):
            assert torch.equal(got, right)
            assert got.stride() == right.stride()


def test_the_reference_is_the_twin() -> None:
    x, weight, bias = made((2, 8, 2, 3, 4), torch.bfloat16, last=True)
    with ops.use("reference", "group_norm_act"):
        twin = ops.group_norm_act(x, 2, weight, bias, activation="gelu")
    assert twin.stride() == x.stride()
    torch.testing.assert_close(twin, ops.group_norm_act(x, 2, weight, bias, activation="gelu"), rtol=2**-7, atol=1e-6)
    assert ops.group_norm_act(x.double(), 2).dtype == torch.float64


def test_errors_name_what_came() -> None:
    x = torch.zeros(2, 8, 3, 4, 5)
    with pytest.raises(ShapeError, match=r"x is int64 \(3,\)"):
        ops.group_norm_act(torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ShapeError, match=r"x is float32 \(3,\)"):
        ops.group_norm_act(torch.zeros(3), 1)
    with pytest.raises(ConfigError, match="groups is 3 for 8 channels"):
        ops.group_norm_act(x, 3)
    with pytest.raises(ShapeError, match=r"weight is float32 \(7,\)(.|\n)*one value a channel"):
        ops.group_norm_act(x, 2, torch.zeros(7))
    with pytest.raises(ShapeError, match=r"bias is float32 \(8, 1\)"):
        ops.group_norm_act(x, 2, None, torch.zeros(8, 1))
    with pytest.raises(ConfigError, match="activation is 'relu'"):
        ops.group_norm_act(x, 2, activation="relu")  # type: ignore[arg-type]
