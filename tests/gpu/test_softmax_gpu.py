"""Softmax on a GPU: at attention's sizes, with every tile, beyond 2**31 elements, in graphs and compiled."""

from __future__ import annotations

import pytest
import torch
from exact import hold

from gpupipe import ops
from gpupipe.ops.softmax.kernels import candidates

pytestmark = pytest.mark.gpu

SCALE = 0.3


def eager(scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return (scores * SCALE if mask is None else scores * SCALE + mask).softmax(-1)


def check(shape: tuple[int, ...], dtype: torch.dtype, mask: tuple[int, ...] | None = None) -> None:
    torch.manual_seed(0)
    inputs = {"scores": torch.randn(shape, device="cuda") * 3}
    if mask is not None:
        inputs["mask"] = torch.randn(mask, device="cuda")
    weights = [torch.randn(shape, device="cuda", dtype=torch.float64)]
    hold(lambda **kw: ops.scaled_softmax(**kw, scale=SCALE), lambda **kw: eager(**kw), inputs, weights, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 17, 77, 256, 1000, 1536, 2048, 5000, 16384])
def test_as_exact_as_torch(columns: int, dtype: torch.dtype) -> None:
    check((3, 2, 33, columns), dtype)


@pytest.mark.parametrize("mask", [(2, 4, 64, 256), (4, 64, 256), (2, 1, 1, 256), (64, 256), (256,)])
def test_masks_and_their_gradients(mask: tuple[int, ...]) -> None:
    check((2, 4, 64, 256), torch.bfloat16, mask)


@pytest.mark.parametrize("columns", [40, 384, 2048])
def test_every_tile_is_right(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"softmax_forward": candidates(columns, 64), "softmax_backward": candidates(columns, 32)}
    for turn in range(max(map(len, lists.values()))):
        monkeypatch.setattr(
            "gpupipe.ops.softmax.kernels.choose", lambda op, *_, turn=turn: lists[op][turn % len(lists[op])]
        )  # fmt: skip
        check((3, 67, columns), torch.bfloat16)


@pytest.mark.parametrize("columns", [200, 2048, 3000])
def test_dropout_and_its_gradient(columns: int) -> None:
    """What the forward dropped is read off its output; the gradient with that dropout in float64 is the truth."""
    torch.manual_seed(0)
    p = 0.25
    scores = torch.randn(2, 3, 65, columns, device="cuda", requires_grad=True)
    keep = torch.rand(65, columns, device="cuda") < 0.8
    y = ops.softmax_dropout(scores, keep, p=p, scale=SCALE)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, scores, dy)
    leaf = scores.detach().double().requires_grad_()
    truth = (leaf * SCALE).masked_fill(~keep, -torch.inf).softmax(-1)
    kept = y.detach() != 0
    right = torch.where(kept, truth / (1 - p), 0)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-7)
    (want,) = torch.autograd.grad(right, leaf, dy.double())
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-6)
    drawn = kept[truth.detach() > 0].double()
    # five standard deviations of the mean of as many draws
    assert abs(drawn.mean() - (1 - p)) < 5 * (p * (1 - p) / drawn.numel()) ** 0.5


def test_beyond_two_to_the_31_elements() -> None:
    rows = 2**31 // 2048 + 5
    scores = torch.randn(rows, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = ops.scaled_softmax(scores)
    (dx,) = torch.autograd.grad(y, scores, scores.detach())
    for part in (slice(0, 4), slice(-4, None)):
        leaf = scores.detach()[part].double().requires_grad_()
        right = leaf.softmax(-1)
        assert (y[part].double() - right).abs().max() < 2**-9
        (want,) = torch.autograd.grad(right, leaf, leaf.detach())
        assert (dx[part].double() - want).abs().max() < 2**-8


def test_repeats_bit_for_bit_and_a_graph_drops_anew() -> None:
    scores = torch.randn(2, 4, 128, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step() -> list[torch.Tensor]:
        y = ops.softmax_dropout(scores, p=0.5, scale=SCALE)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), scores)]

    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(step())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [value.clone() for value in captured]
    graph.replay()
    assert not torch.equal(first[0], captured[0])
    assert captured[1].isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_takes_it_whole(dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ops.scaled_softmax(scores.sin(), mask, scale=SCALE) + 1

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for rows in (64, 96) if dynamic else (64,):
        inputs = [
            torch.randn(2, rows, 256, device="cuda", requires_grad=True),
            torch.randn(256, device="cuda", requires_grad=True),
        ]
        found, expected = compiled(*inputs), block(*inputs)
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad(made, inputs, weight) for made in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
