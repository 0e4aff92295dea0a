"""Convolution with bias, activation and residual: the pass after it under Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import hold
from torch.nn import functional

from gpupipe import ops
from gpupipe.device import jit
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import activations
from gpupipe.ops.conv3d import finish_backward_op, finish_op

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="needs TRITON_INTERPRET=1")

LAST = torch.channels_last_3d
ORDERS = pytest.mark.parametrize("last", [False, True], ids=["first", "last"])


def eager(act: str | None, **how: Any) -> Callable[..., torch.Tensor]:
    def body(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = activations.apply(functional.conv3d(x, weight, bias, **how), act or "none")
        return y if residual is None else y + residual

    return body


def fused(act: str | None, **how: Any) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias=None, residual=None: ops.conv3d_act(x, weight, bias, residual, activation=act, **how)


def made(
    *, last: bool = False, kernel: tuple[int, ...] = (3, 3, 3), shape: tuple[int, ...] = (2, 6, 4, 5, 6)
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(8, shape[1], *kernel) / 8
    if last:
        x, weight = (value.contiguous(memory_format=LAST) for value in (x, weight))
    return {"x": x, "weight": weight, "bias": torch.randn(8)}


def weights_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


@ORDERS
@pytest.mark.parametrize(
    ("act", "names", "dtype"),
    [
        ("silu", ("bias", "residual"), torch.bfloat16),
        ("gelu", ("bias", "residual"), torch.float32),
        ("gelu_tanh", ("bias",), torch.float16),
        ("silu", ("residual",), torch.float32),
        ("silu", (), torch.float32),
        (None, ("bias", "residual"), torch.float32),
        (None, ("residual",), torch.float16),
        (None, ("bias",), torch.float32),
    ],
)
def test_values_and_gradients(act: str | None, names: tuple[str, ...], dtype: torch.dtype, last: bool) -> None:
    given = made(last=last)
    shape = (2, 8, 4, 5, 6)
    residual = torch.randn(shape)
    given["residual"] = residual.contiguous(memory_format=LAST) if last else residual
    given = {name: value for name, value in given.items() if name in ("x", "weight", *names)}
    hold(fused(act, padding=1), eager(act, padding=1), given, weights_of(shape), dtype)


@pytest.mark.parametrize(
    "how", [{"stride": (1, 2, 2)}, {"padding": (1, 0, 2)}, {"dilation": 2, "padding": 2}, {"groups": 2}], ids=str
)
def test_what_the_convolution_may_do(how: dict[str, Any]) -> None:
    given = made()
    given["weight"] = given["weight"][:, : 6 // how.get("groups", 1)].contiguous()
    shape = tuple(functional.conv3d(**given, **how).shape)
    hold(fused("silu", **how), eager("silu", **how), given, weights_of(shape), torch.float32)


@ORDERS
@pytest.mark.parametrize("kernel", [(1, 1, 1), (2, 2, 3), (1, 2, 2), (4, 5, 6)])
def test_a_kernel_that_equals_its_stride_is_a_product(
    kernel: tuple[int, int, int], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = made(kernel=kernel, last=last)
    how = {"stride": kernel}
    shape = tuple(functional.conv3d(**given, **how).shape)
    theirs = [eager(act, **how) for act in (None, "silu")]
    for act, other in zip((None, "silu"), theirs, strict=True):
        hold(fused(act, **how), other, given, weights_of(shape), torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr("gpupipe.ops.conv3d.functional.conv3d", None)
        fused("silu", **how)(**given)


def padded(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return torch.cat([before, x], 2)


@ORDERS
@pytest.mark.parametrize("kept", [None, 0, 1, 2, 4])
@pytest.mark.parametrize("causal", ["zeros", "first"])
def test_causal_padding(causal: str, kept: int | None, last: bool) -> None:
    """Kernel 3 with dilation 2 sees four frames back; what was not kept of them is filled."""
    given = made(last=last)
    how: dict[str, Any] = {"dilation": (2, 1, 1)}
    x, past = given["x"], None if kept is None else torch.randn(2, 6, kept, 5, 6)
    known = x if past is None else padded(x, past)
    fill = torch.zeros(2, 6, 1, 5, 6) if causal == "zeros" else known[:, :, :1]
    whole = padded(known, fill.expand(-1, -1, 4 - (kept or 0), -1, -1))
    y = fused("silu", causal=causal, past=past, padding=1, **how)(**given)
    torch.testing.assert_close(
        y, eager("silu", padding=(0, 1, 1), **how)(whole, given["weight"], given["bias"]), rtol=1e-4, atol=1e-5
    )
    assert y.shape[2] == x.shape[2]


def test_streaming_frame_by_frame_equals_the_whole() -> None:
    given = made()
    leaf = given["x"].requires_grad_()
    whole = fused("silu", causal="zeros", padding=1)(**given)
    pieces = []
    for frame in range(4):
        past = given["x"][:, :, max(0, frame - 2) : frame]
        now = {**given, "x": given["x"][:, :, frame : frame + 1]}
        pieces.append(fused("silu", causal="zeros", padding=1, past=past)(**now))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), leaf)[0] for y in (torch.cat(pieces, 2), whole)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@ORDERS
def test_without_gradients_nothing_is_changed_but_the_convolutions_own_output(last: bool) -> None:
    given = made(last=last)
    residual = torch.randn(2, 8, 4, 5, 6)  # in one order for both
    before = {name: value.clone() for name, value in given.items()}
    with torch.no_grad():
        y = fused("silu", padding=1)(**given, residual=residual)
    z = fused("silu", padding=1)(**{name: value.requires_grad_() for name, value in given.items()}, residual=residual)
    assert torch.equal(y, z.detach())
    assert all(torch.equal(given[name], value) for name, value in before.items())


def test_mixed_types() -> None:
    given = {name: value.bfloat16() for name, value in made().items()}
    residual = torch.randn(2, 8, 4, 5, 6)
    y = fused("silu", padding=1)(**given, residual=residual)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, eager("silu", padding=1)(**given, residual=residual), rtol=2**-6, atol=2**-6)
    given["bias"] = given["bias"].float()
    torch.testing.assert_close(
        fused(None, padding=1)(**given), eager(None, padding=1)(given["x"], given["weight"], given["bias"].bfloat16()),
        rtol=2**-6, atol=2**-6,
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        assert fused("silu", padding=1)(**made()).dtype == torch.bfloat16


def test_conservative_rounds_as_torch_does() -> None:
    given = {name: value.half() for name, value in made().items()}
    residual = torch.randn(2, 8, 4, 5, 6).half()
    c = functional.conv3d(given["x"], given["weight"], padding=1)
    right = functional.silu(c + given["bias"].view(-1, 1, 1, 1)) + residual
    ours = fused("silu", padding=1, precision="conservative")(**given, residual=residual)
    assert (ours == right).double().mean() > 0.98
    with ops.use("reference", "conv3d_act"):
        twin = fused("silu", padding=1, precision="conservative")(**given, residual=residual)
    assert torch.equal(twin, right)


@ORDERS
def test_repeats_bit_for_bit_and_some_gradients(last: bool) -> None:
    given = made(last=last, shape=(1, 6, 9, 8, 8))
    found = []
    for _ in range(2):
        leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
        y = fused("silu", padding=1)(**leaves)
        found.append([y, *torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y) * torch.arange(8))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    bias = given["bias"].detach().requires_grad_()
    y = fused("silu", padding=1)(**{**given, "bias": bias})
    assert torch.equal(torch.autograd.grad(y, bias, torch.ones_like(y) * torch.arange(8))[0], found[0][3])


def test_a_strided_bias() -> None:
    c, bias = torch.randn(1, 4, 2, 3, 5, requires_grad=True), torch.randn(8)[::2]
    y = finish_op(c, bias, None, "silu", False, False)
    right = functional.silu(c + bias.view(-1, 1, 1, 1))
    torch.testing.assert_close(y, right)
    for got, want in zip(*(torch.autograd.grad(made.sum(), c) for made in (y, right)), strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_not_finite_stays_where_it_is() -> None:
    c = torch.randn(1, 4, 2, 3, 5)
    c[0, 1, 1, 2, 3], c[0, 2, 0, 0, 0] = torch.nan, torch.inf
    residual = torch.randn(c.shape)
    y = finish_op(c, torch.randn(4), residual, "silu", False, False)
    assert y.isnan().sum() == 1
    assert y.isinf().sum() == 1


def test_opcheck() -> None:
    last = True
    c = torch.randn(2, 5, 2, 3, 4).contiguous(memory_format=LAST).requires_grad_()
    bias, residual = torch.randn(5, requires_grad=True), torch.randn(2, 5, 2, 3, 4, requires_grad=True)
    torch.library.opcheck(finish_op.library_op, (c, bias, residual, "silu", last, False))
    torch.library.opcheck(finish_op.library_op, (c, None, None, "gelu", last, False))
    for asked in ([True, True], [False, True]):
        given = (residual.detach(), c.detach(), bias.detach(), "silu", last, False, asked)
        torch.library.opcheck(finish_backward_op.library_op, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    body = fused("silu", padding=1, causal="first")
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for frames in (2, 3) if dynamic else (2,):
        found = []
        for call in (compiled, body):
            leaves = {name: value.requires_grad_() for name, value in made(shape=(1, 6, frames, 4, 4), last=True).items()}
            y = call(**leaves, residual=torch.ones(1, 8, frames, 4, 4))
            found.append([y, *torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_errors_name_what_came() -> None:
    x, weight = torch.zeros(2, 6, 4, 5, 6), torch.zeros(8, 6, 3, 3, 3)
    with pytest.raises(ShapeError, match=r"x is float32 \(6, 4, 5, 6\)"):
        ops.conv3d_act(x[0], weight)
    with pytest.raises(ShapeError, match=r"weight is float32 \(8, 6, 3, 3, 3\)(.|\n)*groups=2"):
        ops.conv3d_act(x, weight, groups=2)
    with pytest.raises(ShapeError, match=r"weight is float64(.|\n)*float32, as x is"):
        ops.conv3d_act(x, weight.double())
    with pytest.raises(ShapeError, match=r"bias is float32 \(7,\)"):
        ops.conv3d_act(x, weight, torch.zeros(7))
    with pytest.raises(ShapeError, match=r"residual is float32 \(2, 6, 4, 5, 6\)(.|\n)*\(2, 8, 2, 3, 4\)"):
        ops.conv3d_act(x, weight, residual=x)
    with pytest.raises(ShapeError, match=r"past is float32 \(2, 6, 3, 5, 6\)(.|\n)*k at most 2"):
        ops.conv3d_act(x, weight, causal="zeros", past=x[:, :, :3])
    with pytest.raises(ConfigError, match="past is given without causal"):
        ops.conv3d_act(x, weight, past=x)
    with pytest.raises(ConfigError, match="causal is 'future'"):
        ops.conv3d_act(x, weight, causal="future")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="activation is 'relu'"):
        ops.conv3d_act(x, weight, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stride is \(1, 0, 1\)"):
        ops.conv3d_act(x, weight, stride=(1, 0, 1))
