"""The pass after a convolution on a GPU: at the sizes of video autoencoders, with every tile, in graphs and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import hold
from torch.nn import functional

from gpupipe import ops
from gpupipe.ops import activations
from gpupipe.ops.conv3d import finish_op
from gpupipe.ops.planes import map_candidates, sum_candidates

pytestmark = pytest.mark.gpu

FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last_3d}
ORDERS = pytest.mark.parametrize("order", FORMATS)


def check_finish(shape: tuple[int, ...], act: str, dtype: torch.dtype, order: str) -> None:
    """The pass alone, with no convolution's own error before it."""
    torch.manual_seed(0)
    c, residual = (torch.randn(shape, device="cuda").contiguous(memory_format=FORMATS[order]) for _ in range(2))
    hold(
        lambda c, bias, residual: finish_op(c, bias, residual, act, order == "last", False),
        lambda c, bias, residual: activations.apply(c + bias.view(-1, 1, 1, 1), act) + residual,
        {"c": c, "bias": torch.randn(shape[1], device="cuda"), "residual": residual},
        [torch.randn(shape, device="cuda", dtype=torch.float64)], dtype,
    )  # fmt: skip


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh"])
def test_as_exact_as_torch(act: str, dtype: torch.dtype, order: str) -> None:
    check_finish((2, 96, 5, 17, 23), act, dtype, order)


@ORDERS
@pytest.mark.parametrize("shape", [(1, 128, 16, 128, 128), (1, 512, 8, 32, 32), (3, 17, 1, 3, 5), (2, 3, 4, 64, 64)])
def test_model_shapes_and_odd_ones(shape: tuple[int, ...], order: str) -> None:
    check_finish(shape, "silu", torch.bfloat16, order)


@ORDERS
def test_every_tile_is_right(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, last = 3 * 13 * 17, order == "last"
    maps, sums = map_candidates(96, size, 2, last), sum_candidates(96, size, 2, last, unrolls=(1, 2, 4))
    for turn in range(max(len(maps), len(sums))):
        monkeypatch.setattr(
            "gpupipe.ops.conv3d.kernels.choose",
            lambda op, *_, turn=turn: maps[turn % len(maps)] if op == "conv_finish" else sums[turn % len(sums)],
        )
        check_finish((2, 96, 3, 13, 17), "silu", torch.bfloat16, order)


def given(
    order: str = "last", kernel: tuple[int, ...] = (3, 3, 3), dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 64, 6, 24, 32, device="cuda", dtype=dtype).contiguous(memory_format=FORMATS[order])
    weight = (torch.randn(96, 64, *kernel, device="cuda") / 40).to(dtype)
    return {"x": x, "weight": weight, "bias": torch.randn(96, device="cuda", dtype=dtype)}


@ORDERS
@pytest.mark.parametrize(
    ("kernel", "how"),
    [((3, 3, 3), {"padding": 1}), ((1, 1, 1), {}), ((1, 2, 2), {"stride": (1, 2, 2)}), ((2, 4, 4), {"stride": (2, 4, 4)})],
    ids=str,
)
@pytest.mark.parametrize("act", [None, "silu"])
def test_the_whole_op(act: str | None, kernel: tuple[int, ...], how: dict[str, Any], order: str) -> None:
    inputs = given(order, kernel)
    shape = functional.conv3d(**inputs, **how).shape
    hold(
        lambda x, weight, bias: ops.conv3d_act(x, weight, bias, activation=act, **how),  # type: ignore[arg-type]
        lambda x, weight, bias: activations.apply(functional.conv3d(x, weight, bias, **how), act or "none"),
        inputs, [torch.randn(shape, device="cuda", dtype=torch.float64)], torch.bfloat16,
    )  # fmt: skip


@ORDERS
@pytest.mark.parametrize("causal", ["zeros", "first"])
def test_causal_padding_keeps_the_memory_order(causal: Any, order: str) -> None:
    inputs = given(order)
    fill = inputs["x"][:, :, :1] * (causal == "first")
    whole = torch.cat([fill, fill, inputs["x"]], 2)
    y = ops.conv3d_act(**inputs, activation="silu", padding=1, causal=causal)
    right = functional.silu(functional.conv3d(whole, inputs["weight"], inputs["bias"], padding=(0, 1, 1)))
    torch.testing.assert_close(y, right, rtol=0.02, atol=0.02)
    plain = functional.conv3d(inputs["x"], inputs["weight"], padding=1)
    assert y.is_contiguous(memory_format=torch.channels_last_3d) == plain.is_contiguous(memory_format=torch.channels_last_3d)


def test_without_gradients_no_second_activation_is_made() -> None:
    inputs = given()
    with torch.no_grad():
        ops.conv3d_act(**inputs, activation="silu", padding=1)
        torch.cuda.synchronize()
        functional.conv3d(inputs["x"], inputs["weight"], padding=1)
        peaks = []
        for call in (
            lambda: functional.conv3d(inputs["x"], inputs["weight"], padding=1),
            lambda: ops.conv3d_act(**inputs, activation="silu", padding=1),
        ):
            torch.cuda.reset_peak_memory_stats()
            call()
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0] + 2**16


def test_the_pass_repeats_and_can_be_captured() -> None:
    torch.manual_seed(0)
    c = torch.randn(2, 128, 4, 32, 32, dtype=torch.bfloat16, device="cuda").contiguous(memory_format=torch.channels_last_3d)
    inputs = [c.requires_grad_(), torch.randn(128, device="cuda", requires_grad=True), torch.randn_like(c).requires_grad_()]

    def step() -> list[torch.Tensor]:
        y = finish_op(*inputs, "silu", True, False)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)]

    expected = step()
    assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_beyond_two_to_the_31_elements() -> None:
    c = torch.randn(1, 32, 68, 1000, 1000, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(32, device="cuda")
    y = finish_op(c, bias, None, "silu", False, False)
    right = functional.silu(c[:, -1, -1].double() + bias[-1].double())
    assert (y[:, -1, -1].double() - right).abs().max() < 0.03


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_it_whole(dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ops.conv3d_act(x.sin(), weight, bias, x.new_ones(()).expand(1, 96, *x.shape[2:]), activation="silu", padding=1)

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    inputs = [value.requires_grad_() for value in given().values()]
    for frames in (6, 4) if dynamic else (6,):
        now = [inputs[0].detach()[:, :, :frames].requires_grad_(), *inputs[1:]]
        found, expected = compiled(*now), block(*now)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        weight = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad(made, now, weight) for made in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()))
