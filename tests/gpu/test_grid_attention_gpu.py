"""Norm and turning of queries and keys, and attention on a token grid, on a GPU: at model sizes, in graphs, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import compilations, hold
from torch.nn.attention import SDPBackend

from gpupipe import ops
from gpupipe.device import autotune
from gpupipe.ops import sdpa
from gpupipe.ops.rotary import tiles as rotary_tiles
from gpupipe.ops.temporal import tiles as temporal_tiles

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def turning(grid: tuple[int, ...], dim: int, layout: Any) -> ops.Rope:
    third = 2 * (dim // 6)
    return ops.Rope.of(grid, (dim - 2 * third, third, third), layout=layout, device="cuda")


def check(op: Any, dtype: torch.dtype, grid: tuple[int, ...], heads: int, dim: int, samples: int = 1, **settings: Any) -> None:
    """Holds an op with norm and turning to its reference, values and gradients."""
    torch.manual_seed(0)
    rope = turning(grid, dim, settings.pop("layout", "interleaved"))
    shape = (samples, grid[0] * grid[1] * grid[2], heads, dim)
    size = heads * dim if settings.get("norm") == "full" else dim
    inputs = {"qkv": torch.randn(*shape[:2], 3, *shape[2:], device="cuda")}
    inputs |= {f"{side}_weight": 1 + 0.3 * torch.randn(size, device="cuda") for side in "qk"}
    outputs = 3 if op is ops.qk_norm_rope else 1
    weights = [torch.randn(shape, dtype=torch.float64, device="cuda") for _ in range(outputs)]

    def run(**given: torch.Tensor) -> Any:
        return op(**given, rope=rope, grid=grid, **settings)

    def eager(**given: torch.Tensor) -> Any:
        with ops.use("reference"):
            return run(**given)

    hold(run, eager, inputs, weights, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("norm", ["head", "full"])
def test_norm_and_turning(dtype: torch.dtype, layout: str, norm: str) -> None:
    check(ops.qk_norm_rope, dtype, (4, 9, 11), 12, 128, samples=3, layout=layout, norm=norm)


@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (16, 72), (24, 96), (24, 128), (40, 128), (5, 80)])
def test_heads_of_every_size(heads: int, dim: int) -> None:
    check(ops.qk_norm_rope, torch.bfloat16, (4, 8, 8), heads, dim)
    check(ops.temporal_attention, torch.bfloat16, (8, 5, 7), heads, dim, norm="head")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frames", [2, 3, 8, 16, 24, 32, 33, 64, 128])
def test_attention_along_time(dtype: torch.dtype, frames: int) -> None:
    check(ops.temporal_attention, dtype, (frames, 5, 7), 4, 128, samples=2, norm="head", layout="half", causal=frames % 3 == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("op", [ops.qk_norm_rope, ops.temporal_attention])
def test_every_tile_is_right(op: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = autotune.machine(torch.device("cuda", 0))
    lists = {
        "qk_forward": rotary_tiles.forward_candidates(24, 128),
        "qk_backward": compilations(rotary_tiles.backward_candidates(gpu, 24, 128, 560)),
        "temporal_forward": temporal_tiles.forward_candidates(16, 128, 24),
        "temporal_backward": temporal_tiles.backward_candidates(16, 128),
    }
    room = "rotary" if op is ops.qk_norm_rope else "temporal"
    for turn in range(max(len(found) for name, found in lists.items() if name.startswith("qk") == (room == "rotary"))):
        for side in ("forward", "backward"):
            monkeypatch.setattr(f"gpupipe.ops.{room}.{side}.choose", lambda op, *_, turn=turn: lists[op][turn % len(lists[op])])
        check(op, torch.bfloat16, (16, 5, 7), 24, 128, norm="head", layout=layout)


@pytest.mark.parametrize("axis", ["spatial", "full"])
@pytest.mark.parametrize("window", [None, (3, 5, 5)])
def test_attention_in_space(axis: Any, window: Any) -> None:
    check(ops.attention, torch.bfloat16, (4, 16, 16), 8, 128, samples=2, axis=axis, window=window, norm="head")


def test_more_samples_than_a_launch_takes() -> None:
    qkv = torch.randn(1, 65540 * 4, 3, 1, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = ops.attention(qkv, grid=(65540, 2, 2), axis="spatial")
    out.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()
    exact = ops.attention(qkv.detach()[:, -8:], grid=(2, 2, 2), axis="spatial")
    torch.testing.assert_close(out[:, -8:], exact, rtol=2e-2, atol=2e-2)


def test_beyond_two_to_the_31_elements() -> None:
    tokens = 2**31 // (3 * 8 * 128) // 32 * 32 + 64
    qkv = torch.randn(1, tokens, 3, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grid = (2, tokens // 2, 1)
    found = {}
    q, k, v = ops.qk_norm_rope(qkv)
    (q.sum() + k.sum() + v.sum()).backward()
    assert qkv.grad is not None
    found["norm"] = q[:, -4:].detach(), qkv.grad[:, -4:].clone()
    qkv.grad = None
    del q, k, v
    out = ops.temporal_attention(qkv, grid=grid, norm="head")
    out.sum().backward()
    ends = torch.cat((qkv.detach()[:, tokens // 2 - 2 : tokens // 2], qkv.detach()[:, -2:]), 1).requires_grad_()
    small = ops.temporal_attention(ends, grid=(2, 2, 1), norm="head")
    small.sum().backward()
    torch.testing.assert_close(out[:, -2:], small[:, -2:])
    torch.testing.assert_close(qkv.grad[:, -2:], ends.grad[:, -2:])  # type: ignore[index]
    last = qkv.detach()[:, -4:].clone().requires_grad_()
    q, k, v = ops.qk_norm_rope(last)
    (q.sum() + k.sum() + v.sum()).backward()
    torch.testing.assert_close(found["norm"], (q[:, -4:], last.grad))


def work(qkv: torch.Tensor, weight: torch.Tensor, rope: ops.Rope) -> torch.Tensor:
    grid = (8, 4, 4)
    q, k, v = ops.qk_norm_rope(qkv, weight, weight, rope, grid=grid)
    out = ops.attention((q, k, v), grid=grid, axis="spatial")
    return out + ops.temporal_attention(qkv, weight, weight, rope, grid=grid, norm="head")


def given() -> tuple[torch.Tensor, torch.Tensor, ops.Rope]:
    torch.manual_seed(0)
    qkv = torch.randn(1, 128, 3, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return qkv, torch.ones(64, device="cuda", requires_grad=True), turning((8, 4, 4), 64, "half")


def test_captured_in_a_graph() -> None:
    qkv, weight, rope = given()
    expected = work(qkv, weight, rope)
    gradients = torch.autograd.grad(expected.sum(), (qkv, weight))
    expected = expected.detach()  # its graph would bind the leaves to the stream that it was made on
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(work(qkv, weight, rope).sum(), (qkv, weight))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work(qkv, weight, rope)
        made = torch.autograd.grad(out.sum(), (qkv, weight))
    graph.replay()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(made, gradients)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    qkv, weight, rope = given()
    compiled = torch.compile(work, fullgraph=True, dynamic=dynamic)
    expected, found = work(qkv, weight, rope), compiled(qkv, weight, rope)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    exact, made = (torch.autograd.grad(out.sum(), (qkv, weight)) for out in (expected, found))
    torch.testing.assert_close(made, exact, rtol=2e-2, atol=5e-2)


def test_repeats_bit_for_bit() -> None:
    qkv, weight, rope = given()
    runs = []
    for _ in range(3):
        q, k, _ = ops.qk_norm_rope(qkv, weight, weight, rope, grid=(8, 4, 4))
        out = ops.temporal_attention(qkv, weight, weight, rope, grid=(8, 4, 4), norm="head")
        runs.append([out, q, k, *torch.autograd.grad((out + q * k).sum(), (qkv, weight))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize(
    ("backend", "bias"),
    [
        *[(backend, "none") for backend in sdpa._BACKENDS],
        *[(backend, bias) for backend in sdpa._BACKENDS[2:] for bias in ("bool", "added", "unaligned")],
    ],
)
def test_each_backend_by_its_name_is_the_product(backend: SDPBackend, bias: str) -> None:
    """Forward and gradients, against the product in float64."""
    keys = 40 if bias != "unaligned" else 37
    q, k, v = (
        torch.randn(2, 3, rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for rows in (24, keys, keys)
    )
    added = None if bias == "none" else torch.randn(3, 24, keys, device="cuda", dtype=torch.bfloat16)
    if bias == "bool" and added is not None:
        added = added > -1
    found = sdpa.by_name(backend, q, k, v, added, False, 0.125)
    scores = q.double() @ k.double().mT * 0.125
    if added is not None:
        scores = scores.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else scores + added.double()
    exact = scores.softmax(-1) @ v.double()
    weights = torch.randn_like(exact)
    ours = torch.autograd.grad((found.double() * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((exact * weights).sum(), (q, k, v))
    for one, other in zip((found, *ours), (exact, *theirs), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05)
