"""The activation pass and the linear ops on a GPU: at model sizes, beyond 2**31 elements, inside graphs, under the compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exact import compilations, hold
from linear_cases import (
    ACTS,
    act_case,
    arguments,
    eager_act,
    linear_act,
    mlp,
    mlp_case,
    named,
    norm_case,
    norm_linear,
    upstream,
)
from torch.nn import functional

from gpupipe import ops
from gpupipe.device import autotune
from gpupipe.ops.activation.backward import launch_act_backward
from gpupipe.ops.activation.tiles import backward_candidates, forward_candidates

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def on_gpu(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in given.items()}


def check_act(shape: tuple[int, ...], act: Any, gate: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    hold(
        lambda **kw: ops.bias_act_dropout_add(**kw, activation=named(act)), lambda **kw: eager_act(**kw, act=act),
        on_gpu(arguments(shape, act, gate)), [upstream(*shape).cuda()], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_the_pass_is_as_exact_as_torch(act: str, dtype: torch.dtype) -> None:
    for gate in (None, (3, 1152), (3, 257, 1152)):
        check_act((3, 257, 1152), act, gate, dtype)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 3072, 12288])
@pytest.mark.parametrize("rows", [1, 17, 3000])
def test_any_size(size: int, rows: int) -> None:
    check_act((1, rows, size), "gelu_tanh", (1, size), torch.bfloat16)


def test_every_tile_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = autotune.machine(torch.device("cuda", 0))
    lists = {
        "act_forward": forward_candidates(1152),
        "act_backward": compilations(backward_candidates(gpu, 1152, 257, 3, True)),
    }
    for turn in range(max(map(len, lists.values()))):
        for room in ("forward", "backward"):
            monkeypatch.setattr(
                f"gpupipe.ops.activation.{room}.choose", lambda op, *_, turn=turn: lists[op][turn % len(lists[op])]
            )
        check_act((3, 257, 1152), "swiglu", (3, 1152), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu", "swiglu"])
def test_linear_ops_are_as_exact_as_torch(act: Any, dtype: torch.dtype) -> None:
    leading = (3, 257)
    hold(
        lambda **kw: ops.linear_act(**kw, activation=named(act)),
        lambda **kw: linear_act(**kw, act=act), on_gpu(act_case(act, leading)),
        [upstream(*leading, 40).cuda()], dtype,
    )  # fmt: skip
    for recompute in (False, True):
        hold(
            lambda recompute=recompute, **kw: ops.mlp(**kw, activation=named(act), recompute=recompute),
            lambda **kw: mlp(**kw, act=act),
            on_gpu(mlp_case(act, leading)), [upstream(*leading, 16).cuda()], dtype,
        )  # fmt: skip
    hold(ops.norm_linear, norm_linear, on_gpu(norm_case(leading)), [upstream(*leading, 16).cuda()], dtype)


def test_the_epilogue_is_tanh_gelu() -> None:
    """What cuBLASLt makes where nothing is kept equals torch's own tanh GELU to a rounding of bf16 or two."""
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((2048, 3072), (12288, 3072), (12288,))
    )
    weight /= 3072**0.5
    found = ops.linear_act(x, weight, bias)
    exact = functional.gelu(functional.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    assert (found - exact).abs().max() <= 2.0**-8 * exact.abs().max() + 1e-3
    assert torch.equal(ops.linear_act(x, weight), ops.linear_act(x, weight, torch.zeros_like(bias)))


def test_model_shapes_come_near_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 32768, 3072, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 55 for shape in ((12288, 3072), (3072, 12288))]
    gate = torch.randn(1, 3072, device="cuda", dtype=torch.bfloat16)
    leaves = [value.requires_grad_() for value in (x, *weights, gate)]

    def loss(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], rows: slice) -> list[torch.Tensor]:
        x, first, second, gate = leaves
        y = function(x[:, rows], first, None, second, gate=gate, residual=x[:, rows])
        return [y, torch.autograd.grad(y.float().sum(), x)[0][:, rows]]

    found = loss(partial(ops.mlp, activation="gelu_tanh"), leaves, slice(None))
    part = slice(-64, None)
    exact = loss(partial(mlp, act="gelu_tanh"), [value.detach().double().requires_grad_() for value in leaves], part)
    for a, b in zip(found, exact, strict=True):
        assert (a[:, part] - b).abs().max() < 0.02 * b.abs().max()


def test_beyond_two_to_the_31_elements() -> None:
    rows, size = 2**31 // 4096 + 5, 4096
    x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
    y = ops.bias_act_dropout_add(x, activation="silu")
    assert (y[-4:].double() - functional.silu(x[-4:].double())).abs().max() < 0.05
    dx, *_ = launch_act_backward(y, x, None, None, None, 0.0, "silu", torch.bfloat16, False)
    last = x[-4:].double().requires_grad_()
    (expected,) = torch.autograd.grad(functional.silu(last), last, y[-4:].double())
    assert dx is not None
    assert (dx[-4:] - expected).abs().max() < 0.1
    del y, dx
    z = ops.scale_cast(x, 2.0, torch.float16)
    assert torch.equal(z[-4:], (x[-4:].float() * 2).half())


def step(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    y = ops.mlp(**inputs, activation="gelu_tanh")
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(inputs.values()))]


def leaves(rows: int = 512) -> dict[str, torch.Tensor]:
    return {name: value.cuda().bfloat16().requires_grad_() for name, value in mlp_case("gelu_tanh", (2, rows)).items()}


def test_repeats_bit_for_bit() -> None:
    inputs = leaves()
    first = step(inputs)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(inputs), strict=True))


def test_a_captured_graph_gives_the_same_and_drops_anew() -> None:
    inputs = leaves()
    expected = step(inputs)
    x = torch.ones(512, 256, device="cuda")
    ops.bias_act_dropout_add(x, p=0.5)
    times = torch.rand(16, device="cuda")
    ops.timestep_embedding(times, 256)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs)
        dropped = ops.bias_act_dropout_add(x, p=0.5)
        embedded = ops.timestep_embedding(times, 256)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(embedded, ops.timestep_embedding(times, 256))
    first = dropped.clone()
    graph.replay()
    assert not torch.equal(first, dropped)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_it_whole(dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(**inputs: torch.Tensor) -> torch.Tensor:
        y = ops.mlp(**inputs, activation="gelu_tanh")
        return ops.bias_act_dropout_add(y.sin(), activation="silu", residual=y)

    compiled: Callable[..., torch.Tensor] = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (64, 96) if dynamic else (64,):
        inputs = leaves(rows)
        found, expected = compiled(**inputs), block(**inputs)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        weight = torch.randn_like(expected)
        given = list(inputs.values())
        for a, b in zip(*(torch.autograd.grad(made, given, weight) for made in (found, expected)), strict=True):
            assert (a - b).float().norm() < 0.02 * b.float().norm()  # a sine of large values turns one rounding into much


def test_autocast_works_in_its_type() -> None:
    inputs = {name: value.cuda().float().requires_grad_() for name, value in mlp_case("gelu", (2, 64)).items()}
    found = []
    for function in (partial(ops.mlp, activation="gelu"), partial(mlp, act="gelu")):
        with torch.autocast("cuda", torch.bfloat16):
            y = function(**inputs)
        found.append([y, *torch.autograd.grad(y.float().sin().sum(), list(inputs.values()))])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() < 0.05 * b.abs().max()
    for name, gradient in zip(inputs, found[0][1:], strict=True):  # sums in float32 that no narrower type has rounded
        assert not name.startswith("weight") or (gradient != gradient.bfloat16()).any()


def test_gradients_of_weights_in_one_half_type_under_autocast_to_the_other() -> None:
    """Sums in float32 are rounded once, and no rows at all give zeros."""
    given = torch.randn(256, 64, device="cuda").half()
    for rows in (0, 1, 300):
        x = torch.randn(rows, 64, device="cuda")
        leaves = [given.to(kind, copy=True).requires_grad_() for kind in (torch.float16, torch.float32)]
        for leaf in leaves:
            with torch.autocast("cuda", torch.bfloat16):
                y = ops.linear_act(x, leaf, activation=None)
            y.backward(torch.full_like(y, 2.0**-14) * torch.arange(rows, device="cuda")[:, None])
        assert torch.equal(leaves[0].grad, leaves[1].grad.half())


def test_the_gradient_of_one_row_is_exact() -> None:
    x, weight, dy = (torch.randn(size, device="cuda").bfloat16() for size in ((1, 768), (3072, 768), (1, 3072)))
    leaf = weight.float().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        ops.linear_act(x, leaf, activation=None).backward(dy)
    assert torch.equal(leaf.grad, dy.float().T * x.float())


def test_timesteps_are_exact_to_a_rounding_of_the_phase() -> None:
    t = torch.linspace(0, 1000, 4096, device="cuda")
    with ops.use("reference"):
        exact = ops.timestep_embedding(t.double(), 256, flip_sin_to_cos=True, downscale_freq_shift=0.0, dtype=torch.float64)
    found = ops.timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0.0)
    assert (found - exact).abs().max() < 1000 * 2.0**-23
