"""Attention along time: values and gradients against float64, with and without norm and turning, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import hold
from torch.library import opcheck

from gpupipe import ops
from gpupipe.errors import ShapeError
from gpupipe.ops.packed import strides
from gpupipe.ops.temporal.op import temporal_backward_op, temporal_op


def turning(grid: tuple[int, int, int], dim: int, layout: Any = "half") -> ops.Rope:
    third = 2 * (dim // 6)
    return ops.Rope.of(grid, (dim - 2 * third, third, third), layout=layout)


def compare(
    dtype: torch.dtype, grid: tuple[int, int, int], heads: int = 1, dim: int = 8, *, samples: int = 1, layout: Any = None,
    norm: Any = None, packed: bool = True, **settings: Any,
) -> None:  # fmt: skip
    """Holds the op to its reference, in float64 and in the type asked for."""
    torch.manual_seed(0)
    shape = (samples, grid[0] * grid[1] * grid[2], heads, dim)
    inputs = {"qkv": torch.randn(*shape[:2], 3, *shape[2:])}
    if norm:
        size = dim if norm == "head" else heads * dim
        inputs |= {f"{side}_weight": 1 + 0.3 * torch.randn(size) for side in "qk"}
    rope = turning(grid, dim, layout) if layout else None

    def run(qkv: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        given = qkv if packed else tuple(qkv.unbind(2))
        return ops.temporal_attention(given, rope=rope, grid=grid, norm=norm, **weights, **settings)  # type: ignore[arg-type]

    def eager(**given: torch.Tensor) -> torch.Tensor:
        with ops.use("reference"):
            return run(**given)

    hold(run, eager, inputs, [torch.randn(shape, dtype=torch.float64)], dtype)


@pytest.mark.parametrize(
    ("dtype", "grid", "settings"),
    [
        (torch.float32, (5, 2, 3), {"heads": 2, "samples": 3}),
        (torch.float32, (2, 3, 6), {"causal": True, "packed": False}),
        (torch.float32, (8, 1, 5), {"norm": "head", "layout": "interleaved", "heads": 2}),
        (torch.float32, (3, 1, 2), {"norm": "full", "layout": "half", "heads": 2}),
        (torch.float32, (3, 1, 1), {"layout": "interleaved"}),
        (torch.float32, (33, 1, 1), {"dim": 7, "causal": True}),
        (torch.float32, (65, 1, 1), {"samples": 2, "causal": True}),
        (torch.bfloat16, (16, 1, 3), {"norm": "head", "layout": "half", "dim": 72}),
        (torch.float16, (15, 1, 3), {"norm": "head", "layout": "interleaved", "dim": 64}),
    ],
)
def test_values_and_gradients(dtype: torch.dtype, grid: tuple[int, int, int], settings: dict[str, Any]) -> None:
    compare(dtype, grid, **settings)


@pytest.mark.parametrize("frames", [4, 66])
def test_padded_frames(frames: int) -> None:
    mask = torch.rand(2, frames) > 0.5
    mask[0] = False
    mask[1, 0] = True
    compare(torch.float32, (frames, 1, 2), samples=2, mask=mask, causal=True)


def test_a_frame_that_sees_nothing_gets_zero() -> None:
    qkv = torch.randn(1, 6, 3, 1, 8, requires_grad=True)
    out = ops.temporal_attention(qkv, grid=(3, 1, 2), mask=torch.zeros(1, 3, dtype=torch.bool))
    out.sum().backward()
    assert (out == 0).all()
    assert qkv.grad is not None
    assert (qkv.grad == 0).all()


def test_equals_torch() -> None:
    qkv = torch.randn(2, 12, 3, 2, 8)
    q, k, v = (side.unflatten(1, (4, 3)).permute(0, 2, 3, 1, 4) for side in qkv.unbind(2))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(0, 3, 1, 2, 4).reshape(2, 12, 2, 8)
    torch.testing.assert_close(ops.temporal_attention(qkv, grid=(4, 1, 3)), exact)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.expand(2, *x.shape[1:]),
        lambda x: torch.cat((x, x), 1)[:, 3:9],
        lambda x: torch.cat((x, x), 4)[..., 1:9],
        lambda x: x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
    ],
)
def test_strides(change: Any) -> None:
    x = change(torch.randn(1, 6, 3, 1, 8))
    found, straight = (ops.temporal_attention(given, grid=(2, 1, 3)) for given in (x, x.contiguous()))
    assert torch.equal(found, straight)
    y = x.detach().requires_grad_()
    out = ops.temporal_attention(y, grid=(2, 1, 3)).transpose(1, 3)
    out.backward(torch.ones(()).expand(out.shape))
    assert y.grad is not None
    assert strides(y.grad)[2]


@pytest.mark.parametrize("grid", [(0, 1, 3), (2, 0, 3), (1, 1, 1), (15, 1, 1), (17, 1, 1)])
def test_any_size(grid: tuple[int, int, int]) -> None:
    qkv = torch.randn(1, grid[0] * grid[1] * grid[2], 3, 1, 8, requires_grad=True)
    out = ops.temporal_attention(qkv, grid=grid, norm="head")
    out.sum().backward()
    assert out.shape == (1, qkv.shape[1], 1, 8)
    assert qkv.grad is not None


def test_repeats_bit_for_bit() -> None:
    x, w = torch.randn(1, 40, 3, 1, 8, dtype=torch.bfloat16), torch.ones(8, requires_grad=True)

    def once() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = ops.temporal_attention(leaf, w, w, turning((8, 1, 5), 8), grid=(8, 1, 5), norm="head")
        return [out, *torch.autograd.grad(out.float().square().sum(), (leaf, w))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_partial_sums_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.ops.temporal.backward._AT_ONCE", 2)
    compare(torch.float32, (16, 1, 5), norm="head")


def test_keeps_only_its_inputs() -> None:
    qkv = torch.randn(1, 6, 3, 1, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        ops.temporal_attention(qkv, grid=(2, 1, 3), norm="head")
    assert [x.data_ptr() for x in kept] == [qkv.data_ptr()]


def test_nan_and_inf_propagate() -> None:
    qkv = torch.randn(1, 4, 3, 1, 8)
    qkv[0, 0, 0, 0, 0] = torch.nan
    qkv[0, 3, 2, 0, 0] = torch.inf
    out = ops.temporal_attention(qkv, grid=(4, 1, 1))
    assert out[0, 0].isnan().all()
    assert not out[0, 1:, 0, 0].isfinite().any()
    assert out[0, 1:, 0, 1:].isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    rope = turning((3, 1, 5), 8)

    def work(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.temporal_attention(x.sin(), w, w, rope, grid=(3, 1, x.shape[1] // 3), norm="head")

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for pixels in (2, 4) if dynamic else (2,):
        x, w = torch.randn(1, 3 * pixels, 3, 1, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        torch.testing.assert_close(compiled(x, w), work(x, w))
        torch.testing.assert_close(*(torch.autograd.grad(made(x, w).square().sum(), (x, w)) for made in (compiled, work)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """The plain form's products must stay in float32: autocast would round scores, and has no room for what hides them."""
    x, w = torch.randn(1, 6, 3, 1, 8).to(dtype), torch.ones(8, dtype=dtype)
    with ops.use("reference"):
        expected = ops.temporal_attention(x, w, w, grid=(3, 1, 2), norm="head")
        with torch.autocast("cpu", dtype):
            assert torch.equal(ops.temporal_attention(x, w, w, grid=(3, 1, 2), norm="head"), expected)


def test_ops_keep_the_rules_of_torch() -> None:
    x, w = torch.randn(1, 4, 3, 1, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    rope = turning((2, 1, 2), 8)
    rest = (None, w, w, rope.table, rope.lengths, rope.pairs, [2, 1, 2], False, True, 1e-6, False, 0.3, False, False)
    opcheck(temporal_op.library_op, (x, None, None, *rest))
    plain = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in rest)
    q, k, v = x.detach().unbind(2)
    opcheck(temporal_backward_op.library_op, (q, x.detach(), None, None, *plain, True))
    opcheck(temporal_backward_op.library_op, (q, q, k, v, *plain, False))


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("grid is .2, 3.", lambda x: ops.temporal_attention(x, grid=(2, 3))),  # type: ignore[arg-type]
        ("grid is .2, 1, 4.", lambda x: ops.temporal_attention(x, grid=(2, 1, 4))),
        ("mask is float32", lambda x: ops.temporal_attention(x, grid=(2, 1, 3), mask=torch.ones(1, 2))),
        ("qkv is float32", lambda x: ops.temporal_attention(x[0], grid=(2, 1, 3))),
    ],
)
def test_refusals(said: str, call: Any) -> None:
    with pytest.raises(ShapeError, match=said):
        call(torch.ones(1, 6, 3, 1, 8))
