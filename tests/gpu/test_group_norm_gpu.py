"""Group norm on a GPU: at the sizes of video autoencoders, with every tile, beyond 2**31 elements, in graphs and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact import hold

from gpupipe import ops
from gpupipe.ops import activations
from gpupipe.ops.planes import map_candidates, sum_candidates

pytestmark = pytest.mark.gpu

FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last_3d}
ORDERS = pytest.mark.parametrize("order", FORMATS)


def check(shape: tuple[int, ...], groups: int, act: str | None, dtype: torch.dtype, order: str, mean: float = 0.5) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * 2 + mean).contiguous(memory_format=FORMATS[order])
    inputs = {"x": x, "weight": torch.randn(shape[1], device="cuda"), "bias": torch.randn(shape[1], device="cuda")}
    hold(
        lambda x, weight, bias: ops.group_norm_act(x, groups, weight, bias, activation=act),  # type: ignore[arg-type]
        lambda x, weight, bias: activations.apply(torch.group_norm(x, groups, weight, bias), act or "none"),
        inputs, [torch.randn(shape, device="cuda", dtype=torch.float64)], dtype,
    )  # fmt: skip


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", [None, "silu", "gelu", "gelu_tanh"])
def test_as_exact_as_torch(act: str | None, dtype: torch.dtype, order: str) -> None:
    check((3, 96, 5, 17, 23), 32, act, dtype, order)


@ORDERS
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 128, 16, 128, 128), 32), ((1, 256, 16, 64, 64), 32), ((1, 512, 8, 32, 32), 32), ((2, 320, 8, 20, 32), 32),
        ((1, 1152, 4, 16, 16), 1), ((1, 17, 3, 9, 11), 17), ((5, 64, 1, 1, 1), 8), ((70000, 4, 1, 1, 3), 2),
    ],
)  # fmt: skip
def test_model_shapes_and_odd_ones(shape: tuple[int, ...], groups: int, order: str) -> None:
    check(shape, groups, "silu", torch.bfloat16, order)


@ORDERS
def test_large_means(order: str) -> None:
    x = (torch.randn(1, 128, 4, 64, 64, device="cuda") + 3000).contiguous(memory_format=FORMATS[order])
    right = torch.group_norm(x.double(), 32)
    # a mean in float32 is off by up to half an ulp of 3000, so is each difference from it
    assert (ops.group_norm_act(x, 32).double() - right).abs().max() < 4 * 3000 * torch.finfo(torch.float32).eps


@ORDERS
def test_every_tile_is_right(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for channels in (96, 160):
        shape = (2, channels, 3, 13, 17)
        last, size = order == "last", 3 * 13 * 17
        maps, sums = map_candidates(channels, size, 2, last), sum_candidates(channels, size, 2, last, unrolls=(1, 2, 4, 8))
        for turn in range(max(len(maps), len(sums))):
            for room in ("forward", "backward"):
                monkeypatch.setattr(
                    f"gpupipe.ops.group_norm.{room}.choose",
                    lambda op, *_, turn=turn, maps=maps, sums=sums: (
                        maps[turn % len(maps)] if op in ("group_norm_apply", "group_norm_dx") else sums[turn % len(sums)]
                    ),
                )
            check(shape, 32, "silu", torch.bfloat16, order)


@ORDERS
def test_beyond_two_to_the_31_elements(order: str) -> None:
    x = torch.randn(1, 32, 68, 1000, 1000, dtype=torch.bfloat16, device="cuda")
    x = x.contiguous(memory_format=FORMATS[order]).requires_grad_()
    y = ops.group_norm_act(x, 16, activation="silu")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    for part in (slice(0, 2), slice(-2, None)):  # two channels, a group
        leaf = x.detach()[:, part].double().contiguous().requires_grad_()
        right = torch.nn.functional.silu(torch.group_norm(leaf, 1))
        assert (y[:, part].double() - right).abs().max() < 0.03
        (gradient,) = torch.autograd.grad(right, leaf, y[:, part].detach().double())
        assert (dx[:, part].double() - gradient).abs().max() < 0.1
        del leaf, right, gradient


def leaves(order: str = "last", frames: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 128, frames, 32, 32, dtype=torch.bfloat16, device="cuda").contiguous(memory_format=FORMATS[order])
    return [x.requires_grad_(), *(torch.randn(128, device="cuda", requires_grad=True) for _ in range(2))]


def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    y = ops.group_norm_act(inputs[0], 32, *inputs[1:], activation="silu")
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)]


@ORDERS
def test_repeats_bit_for_bit(order: str) -> None:
    inputs = leaves(order)
    first = step(inputs)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(inputs), strict=True))


def test_a_captured_graph_gives_the_same() -> None:
    inputs = leaves()
    expected = step(inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_it_whole(dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ops.group_norm_act(x.sin(), 32, weight, bias, activation="silu") + 1

    compiled: Callable[..., torch.Tensor] = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for frames in (4, 6) if dynamic else (4,):
        inputs = leaves(frames=frames)
        found, expected = compiled(*inputs), block(*inputs)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        weight = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad(made, inputs, weight) for made in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
