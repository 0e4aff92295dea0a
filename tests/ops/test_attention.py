"""Attention on a token grid: each kind against one dense product, the choice of backends, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from gpupipe import ops
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.sdpa import _aligned, by_name, flash_samples, preferred

GRID = (3, 2, 4)
TOKENS, HEADS, DIM = 24, 2, 8


def dense(
    qkv: torch.Tensor, seen: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor] | None = None, bias: Any = None
) -> torch.Tensor:
    q, k, v = (side.transpose(1, 2) for side in qkv.unbind(2))
    if context is not None:
        k, v = (torch.cat((side, text.transpose(1, 2)), 2) for side, text in zip((k, v), context, strict=True))
        seen = torch.cat((seen, seen.new_ones(TOKENS, context[0].shape[1])), 1)
    scores = q @ k.transpose(-1, -2) * DIM**-0.5
    scores = scores if bias is None else scores + bias
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def seen_by(test: Any) -> torch.Tensor:
    """Which tokens see which, by a test of their distances in frames, lines and columns."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in GRID))
    return test(*(places[:, None] - places).abs().unbind(-1))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("settings", "test"),
    [
        ({}, lambda t, h, w: t >= 0),
        ({"axis": "spatial"}, lambda t, h, w: t == 0),
        ({"axis": "temporal"}, lambda t, h, w: (h == 0) & (w == 0)),
        ({"window": (3, 1, 3)}, lambda t, h, w: (t <= 1) & (h <= 0) & (w <= 1)),
        ({"window": (3, 3, 7)}, lambda t, h, w: t <= 1),
        ({"axis": "spatial", "window": (1, 3, 5)}, lambda t, h, w: (t == 0) & (h <= 1) & (w <= 2)),
    ],
)
def test_equals_a_dense_product(settings: dict[str, Any], test: Any, joint: bool) -> None:
    if joint and settings.get("axis") == "temporal":
        pytest.skip("no text along time")
    torch.manual_seed(0)
    qkv = torch.randn(2, TOKENS, 3, HEADS, DIM, requires_grad=True)
    context = (torch.randn(2, 5, HEADS, DIM), torch.randn(2, 5, HEADS, DIM)) if joint else None
    found = ops.attention(qkv, grid=GRID, context=context, **settings)
    exact = dense(qkv, seen_by(test), context)
    torch.testing.assert_close(found, exact)
    weights = torch.randn(found.shape)
    torch.testing.assert_close(
        *(torch.autograd.grad((out * weights).sum(), qkv) for out in (found, exact)), rtol=1e-4, atol=1e-5
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["added", "bool"])
def test_bias(kind: str) -> None:
    qkv = torch.randn(1, TOKENS, 3, HEADS, DIM)
    bias = torch.randn(HEADS, TOKENS, TOKENS)
    if kind == "added":
        torch.testing.assert_close(
            ops.attention(qkv, grid=GRID, bias=bias), dense(qkv, torch.ones(TOKENS, TOKENS, dtype=torch.bool), bias=bias)
        )
    else:
        torch.testing.assert_close(ops.attention(qkv, grid=GRID, bias=bias > -1), dense(qkv, bias > -1))


def test_norm_and_turning_come_first() -> None:
    grid = (2, 1, 2)
    qkv, weight = torch.randn(1, 4, 3, 1, DIM), torch.rand(DIM)
    rope = ops.Rope.of(grid, (4, 2, 2))
    parts = ops.qk_norm_rope(qkv, weight, weight, rope, grid=grid)
    for axis in ("spatial", "temporal", "full"):
        torch.testing.assert_close(
            ops.attention(qkv, weight, weight, rope, grid=grid, axis=axis, norm="head"),  # type: ignore[arg-type]
            ops.attention(parts, grid=grid, axis=axis),  # type: ignore[arg-type]
        )


def test_slices_and_the_reference_agree() -> None:
    qkv = torch.randn(2, 5 + TOKENS, 3, HEADS, DIM)[:, 5:]
    for axis in ("spatial", "full"):
        found = ops.attention(qkv, grid=GRID, axis=axis, window=(3, 1, 3))  # type: ignore[arg-type]
        with ops.use("reference", "attention"):
            torch.testing.assert_close(found, ops.attention(qkv, grid=GRID, axis=axis, window=(3, 1, 3)))  # type: ignore[arg-type]


def test_other_threads_attend_as_they_would_alone() -> None:
    """What torch's attention may use is a setting of the process: a step that changed it would change an encoder's results that
    works beside it, and no run would be like another."""
    qkv = torch.randn(1, TOKENS, 3, HEADS, DIM)
    asked = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
    seen: list[list[bool]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append([ask() for ask in asked])
            return func(*args, **(kwargs or {}))

    with ops.use("reference"), Look():
        ops.attention(qkv, grid=GRID, axis="spatial")
    assert len(seen) > 3
    assert all(all(each) for each in seen)


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_backends_with_a_bias_are_called_as_torch_calls_them(backend: SDPBackend, kind: torch.dtype) -> None:
    """On tensors without data, for there is no GPU: names, arguments and shapes."""
    q = torch.empty(2, HEADS, 7, DIM, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k = torch.empty(2, HEADS, 13, DIM, device="meta", dtype=torch.bfloat16)
    out = by_name(backend, q, k, k, torch.empty(HEADS, 7, 13, device="meta", dtype=kind), False, 0.5)
    assert (out.shape, out.dtype, out.requires_grad) == (q.shape, q.dtype, True)


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("causal", [False, True])
def test_backends_are_called_as_torch_calls_them(backend: SDPBackend, causal: bool) -> None:
    q = torch.empty(2, HEADS, 7, DIM, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = by_name(backend, q, q, q, None, causal, 0.5)
    assert (out.shape, out.dtype, out.requires_grad) == (q.shape, q.dtype, True)


def test_rows_of_a_bias_lie_where_a_kernel_can_load_them() -> None:
    for bias in (
        torch.randn(3, 5, 13),
        torch.randn(5, 13),
        torch.randn(3, 5, 16),
        torch.randn(3, 13, 5).mT,
        torch.randn(1, 1, 16),
    ):
        made = _aligned(bias, (2, 3, 5, bias.shape[-1]))
        assert made.stride(-1) == 1
        assert all(step % 8 == 0 for step in made.stride()[:-1])
        assert torch.equal(made, bias.expand(2, 3, 5, -1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        full = ops.attention(x, grid=(2, 1, x.shape[1] // 2), window=(1, 1, 3))
        return full + ops.attention(x, grid=(2, 1, x.shape[1] // 2), axis="spatial")

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (6, 10) if dynamic else (6,):
        x = torch.randn(1, tokens, 3, 1, 8, requires_grad=True)
        torch.testing.assert_close(compiled(x), work(x))
        torch.testing.assert_close(*(torch.autograd.grad(made(x).square().sum(), x) for made in (compiled, work)))


def test_order_by_rule() -> None:
    assert preferred(torch.bfloat16, 128, 24, False, (9, 0))[0] == SDPBackend.CUDNN_ATTENTION
    assert preferred(torch.bfloat16, 256, 24, False, (9, 0))[0] == SDPBackend.FLASH_ATTENTION
    assert preferred(torch.bfloat16, 128, 24, False, (8, 0))[0] == SDPBackend.FLASH_ATTENTION
    for biased in (
        preferred(torch.bfloat16, 128, 24, True, (9, 0)),
        preferred(torch.float32, 128, 24, False, (9, 0)),
    ):
        assert SDPBackend.CUDNN_ATTENTION not in biased


def test_samples_that_flash_can_address() -> None:
    q = torch.empty(6000, 24, 32, 128, device="meta")
    assert flash_samples(q, q) == 5461  # 24 * 128 * 128 * 5462 elements are 2**31
    longest = torch.empty(1, 24, 10**6, 128, device="meta")
    assert flash_samples(longest, longest) == 1


@pytest.mark.parametrize(
    ("error", "said", "settings"),
    [
        (ConfigError, "axis is 'time'", {"axis": "time"}),
        (ConfigError, "window is .2, 1, 1.", {"window": (2, 1, 1)}),
        (ConfigError, "bias together", {"window": (1, 1, 1), "bias": torch.ones(1)}),
        (ConfigError, "along time", {"axis": "temporal", "window": (1, 1, 1)}),
        (ShapeError, "context.0. is float32", {"context": (torch.ones(2, 5, 2, 8), torch.ones(1, 5, 2, 8))}),
        (ShapeError, "grid is .3, 8.", {"grid": (3, 8)}),
        (ShapeError, "grid is .3, 2, 5.", {"grid": (3, 2, 5)}),
    ],
)
def test_refusals(error: type[Exception], said: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=said):
        ops.attention(torch.ones(1, TOKENS, 3, HEADS, DIM), **{"grid": GRID, **settings})
