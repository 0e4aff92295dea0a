"""The norm family on a GPU: at model sizes, beyond 2**31 elements, inside graphs and under the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import compilations, hold
from norm_cases import CASES, eager, inputs_of, weights_of

from gpupipe import ops
from gpupipe.device import autotune
from gpupipe.ops.norms.backward import launch_backward
from gpupipe.ops.norms.tiles import backward_candidates, forward_candidates

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_norm_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of our kernels run them at any size."""
    monkeypatch.setattr("gpupipe.ops.norms.SMALL", -1)


def check(case: str, shape: tuple[int, ...], modulated: tuple[int, ...], dtype: torch.dtype) -> None:
    op, names, settings = CASES[case]
    named = {"kind": settings["kind"]} if op not in (ops.layer_norm, ops.rms_norm) and settings else {}
    inputs = {name: value.cuda() for name, value in inputs_of(names, shape, modulated).items()}
    hold(
        lambda **kw: op(**kw, eps=1e-6, **named), lambda **kw: eager(**kw, eps=1e-6, **settings),
        inputs, [weight.cuda() for weight in weights_of(names, shape)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_exact_as_torch(case: str, dtype: torch.dtype) -> None:
    check(case, (3, 257, 1152), (3, 1152), dtype)


@pytest.mark.parametrize("size", [64, 100, 1536, 2048, 3072, 5120, 8192, 16384])
def test_hidden_sizes(size: int) -> None:
    check("gate_add_modulate_affine_norm", (2, 33, size), (2, size), torch.bfloat16)


@pytest.mark.parametrize("modulated", [(96,), (2, 96), (2, 40, 96), (2, 40, 16, 96)])
def test_modulations_of_every_grain(modulated: tuple[int, ...]) -> None:
    check("gate_add_modulate_affine_norm", (2, 40, 16, 96), modulated, torch.float16)


def test_more_samples_than_a_grid_has_rows() -> None:
    """A launch has at most 65 535 programs along its second and third axis."""
    check("gate_add_modulate_norm", (70_000, 3, 32), (70_000, 32), torch.float32)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [96, 640, 1152])
def test_every_tile_is_right(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU a tile may also fail to fit, or lose a barrier: so all of them run, at a size of their kind."""
    gpu = autotune.machine(torch.device("cuda", 0))
    lists = {
        "norm_forward": forward_candidates(size), "norm_backward": compilations(backward_candidates(gpu, size, 257, 3))
    }  # fmt: skip
    for turn in range(max(map(len, lists.values()))):
        for room in ("forward", "backward"):
            monkeypatch.setattr(f"gpupipe.ops.norms.{room}.choose", lambda op, *_, turn=turn: lists[op][turn % len(lists[op])])
        check("gate_add_modulate_affine_norm", (3, 257, size), (3, size), torch.bfloat16)


def test_beyond_two_to_the_31_elements() -> None:
    rows, size = 2**31 // 2048 + 5, 2048
    x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
    y = ops.layer_norm(x)
    for part in (slice(0, 4), slice(-4, None)):
        expected = torch.nn.functional.layer_norm(x[part].double(), (size,))
        assert (y[part].double() - expected).abs().max() < 0.03
    statistics = torch.zeros(rows, device="cuda"), torch.ones(rows, device="cuda")
    dx, *_ = launch_backward(
        y, None, x, None, None, None, 0.0, None, None, None, None, *statistics, False, False, [True] + [False] * 6
    )  # fmt: skip
    u, n = y[-4:].double(), x[-4:].double()
    expected = u - u.mean(1, keepdim=True) - n * (u * n).mean(1, keepdim=True)
    assert (dx[-4:].double() - expected).abs().max() < 0.1


def leaves(rows: int = 512, size: int = 1152) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, rows, size, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(2)]
    return made + [torch.randn(2, size, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]


def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    y, h = ops.gate_add_modulate_norm(*inputs)
    return [y.detach(), h.detach(), *torch.autograd.grad((y.float() ** 2).sum() + h.float().sum(), inputs)]


def test_repeats_bit_for_bit() -> None:
    inputs = leaves()
    first = step(inputs)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(inputs), strict=True))


def test_a_captured_graph_gives_the_same_and_drops_anew() -> None:
    inputs = leaves()
    expected = step(inputs)
    x, branch = inputs[0].detach(), inputs[1].detach()
    ops.dropout_add_norm(x, branch, p=0.5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs)
        dropped = ops.dropout_add_norm(x, branch, p=0.5)[1]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    first = dropped.clone()
    graph.replay()
    assert not torch.equal(first, dropped)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_it_whole(dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(*inputs: torch.Tensor) -> Any:
        y, h = ops.gate_add_modulate_norm(*inputs)
        return ops.rms_norm(y.sin()), h

    compiled: Callable[..., Any] = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (64, 96) if dynamic else (64,):
        inputs = leaves(rows)
        found, expected = compiled(*inputs), block(*inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        weights = [torch.randn_like(value) for value in expected]
        for a, b in zip(*(torch.autograd.grad(made, inputs, weights) for made in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_on_another_stream_it_stays_there() -> None:
    x = torch.randn(4096, 3072, dtype=torch.bfloat16, device="cuda")
    ops.rms_norm(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.mul_(2)
        y = ops.rms_norm(x)
    stream.synchronize()
    assert torch.equal(y, ops.rms_norm(x))


def test_small_plain_norms_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr("gpupipe.ops.norms.SMALL", x.numel())
    weight, bias = torch.randn(2, 96, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(ops.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (96,), weight, bias))
    assert torch.equal(ops.rms_norm(x, weight, eps=1e-6), torch.nn.functional.rms_norm(x, (96,), weight, 1e-6))
    with torch.autocast("cuda", torch.bfloat16):
        assert ops.layer_norm(x, weight, bias).dtype == x.dtype
    mixed = ops.layer_norm(x, weight.float(), bias.float())
    assert mixed.dtype == x.dtype
    torch.testing.assert_close(mixed, ops.layer_norm(x, weight, bias), rtol=2e-2, atol=2e-2)
