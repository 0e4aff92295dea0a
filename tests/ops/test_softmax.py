"""Softmax with scale, mask and dropout: kernels under Triton's interpreter against float64."""

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
from gpupipe.ops.softmax import reference, softmax_backward_op, softmax_op
from gpupipe.ops.softmax.kernels import mask_steps

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="needs TRITON_INTERPRET=1")

SCALE = 0.7


def eager(scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    z = scores * SCALE
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    return z.softmax(-1)


def fused(scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return ops.scaled_softmax(scores, mask, scale=SCALE)


def weight_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 8, 17, 48, 200])
def test_values_and_gradients(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 17, columns)
    hold(fused, eager, {"scores": scores}, weight_of((3, 17, columns)), dtype)


@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 24), (1, 1, 1, 24), (3, 1, 1, 24), (5, 24), (2, 1, 1), (3, 2, 1, 1), (24,), (1, 5, 24)]
)
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = {"scores": torch.randn(3, 2, 5, 24), "mask": torch.randn(shape)}
    if shape[-1] > 1:
        hold(fused, eager, given, weight_of((3, 2, 5, 24)), torch.float32)
    else:  # a mask that shifts whole rows has no gradient but rounding
        torch.testing.assert_close(fused(**given), eager(**given))
    keep = torch.rand(shape) < 0.7
    keep[..., 0] = True
    hold(
        lambda scores: fused(scores, keep), lambda scores: eager(scores, keep),
        {"scores": given["scores"]}, weight_of((3, 2, 5, 24)), torch.float32,
    )  # fmt: skip


def test_masks_in_odd_strides() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4, 8)
    masks = [
        torch.randn(2, 4, 3, 8).transpose(1, 2), torch.randn(8, 4).T, torch.randn(4, 16)[:, ::2],
        torch.randn(3, 4, 2, 8).permute(2, 0, 1, 3),
    ]  # fmt: skip
    for mask in masks:
        torch.testing.assert_close(fused(scores, mask), eager(scores, mask))
    wild = torch.randn(2, 2, 2, 2, 8).permute(3, 1, 2, 0, 4)  # four strides that no two of are one: copied
    assert mask_steps(wild[:, :, :, :1].expand(2, 2, 2, 2, 8), torch.Size((2, 2, 2, 2, 8)))[0] is not None
    scores = torch.randn(2, 2, 2, 2, 8)
    torch.testing.assert_close(fused(scores, wild), eager(scores, wild))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_any_number_of_rows(rows: int) -> None:
    hold(fused, eager, {"scores": torch.randn(rows, 24)}, weight_of((rows, 24)), torch.float32)
    assert fused(torch.empty(rows, 0)).shape == (rows, 0)


def test_strided_and_unaligned_inputs() -> None:
    torch.manual_seed(0)
    base = torch.randn(4, 6, 40)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[:, 1:4], lambda x: x[..., 3:35], lambda x: x[..., ::2], lambda x: x.transpose(0, 1),
        lambda x: x.transpose(1, 2),
        lambda x: x[:1].expand(5, -1, -1), lambda x: x[0, 0],
    ]  # fmt: skip
    for view in views:
        weights = weight_of(tuple(view(base).shape))
        hold(lambda x, v=view: fused(v(x)), lambda x, v=view: eager(v(x)), {"x": base}, weights, torch.float32)
    torch.testing.assert_close(fused(base.flatten()[1:241].view(6, 40)), eager(base.flatten()[1:241].view(6, 40)))


def test_rows_with_nothing_left_give_zeros() -> None:
    scores = torch.randn(4, 24)
    keep = torch.ones(4, 24, dtype=torch.bool)
    keep[1] = False
    for mask in (keep, torch.zeros(4, 24).masked_fill(~keep, -torch.inf)):
        for body in (fused, lambda *given: reference(*given, SCALE, 0.0, False)):
            leaf = scores.clone().requires_grad_()
            y = body(leaf, mask)
            (dx,) = torch.autograd.grad(y, leaf, torch.randn(4, 24))
            assert not y[1].any()
            assert not dx[1].any()
            torch.testing.assert_close(y[2:], eager(scores)[2:])


def test_what_is_not_finite_spoils_its_row_alone() -> None:
    scores = torch.randn(5, 24)
    scores[1, 3], scores[2, 23], scores[3, 4] = torch.nan, torch.inf, -torch.inf
    y = fused(scores)
    assert y[1].isnan().all()
    assert y[2].isnan().any()
    torch.testing.assert_close(y, eager(scores), equal_nan=True)


@pytest.mark.parametrize("masked", [None, "bool", "float"])
@pytest.mark.parametrize("scale", [8.0, 1e-3, 1e-50, 0.0, -0.0, -0.7])
def test_any_scale(scale: float, masked: str | None) -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 40)
    mask = None if masked is None else torch.randn(40) if masked == "float" else torch.arange(40) % 3 != 0
    y = ops.scaled_softmax(scores, mask, scale=scale)
    torch.testing.assert_close(y, reference(scores.double(), mask, scale, 0.0, False).float(), rtol=1e-5, atol=1e-7)
    scores.requires_grad_()
    dropped = ops.softmax_dropout(scores, mask, p=1e-6, scale=scale)  # so few that none are; the backward makes y again
    assert torch.equal(dropped, y)
    dy = torch.randn(6, 40)
    (found,) = torch.autograd.grad(dropped, scores, dy)
    (right,) = torch.autograd.grad(reference(scores.double(), mask, scale, 0.0, False), scores, dy.double())
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.0, -1.0])
def test_the_largest_numbers_are_numbers(scale: float) -> None:
    """Masked by the lowest number instead of minus infinity, a row still has a softmax; and it is not confused by the scale."""
    lowest = torch.finfo(torch.float32).min
    scores = torch.randn(6, 24)
    scores[1], scores[2, 3:], scores[3, 5], scores[4] = lowest / 4, lowest / 4, -lowest / 4, -1e9
    torch.testing.assert_close(ops.scaled_softmax(scores, scale=scale), (scores * scale).softmax(-1))
    mask = torch.zeros(6, 24)
    mask[0], mask[2, :5] = lowest, lowest
    scores = torch.randn(6, 24)
    torch.testing.assert_close(ops.scaled_softmax(scores, mask, scale=scale), (scores * scale + mask).softmax(-1))


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.5])
def test_infinities_as_torch_has_them(scale: float) -> None:
    scores = torch.randn(5, 24)
    scores[0, 3], scores[1, 23], scores[2, 4], scores[3, :23] = torch.nan, torch.inf, -torch.inf, -torch.inf
    found = ops.scaled_softmax(scores, scale=scale)
    torch.testing.assert_close(found, (scores * scale).softmax(-1), equal_nan=True)
    torch.manual_seed(0)
    dropped = ops.softmax_dropout(scores, p=0.5, scale=scale)
    kept = dropped != 0  # what is dropped is 0 whatever it was
    torch.testing.assert_close(dropped, torch.where(kept, 2 * found, 0), equal_nan=True)
    assert not ops.softmax_dropout(scores, p=1.0, scale=scale).any()


@pytest.mark.parametrize("masked", [None, "bool", "float"])
@pytest.mark.parametrize("columns", [24, 200])
def test_dropout_and_its_gradient(columns: int, masked: str | None) -> None:
    """What the forward dropped is read off its output; the gradient with that dropout in float64 is the truth."""
    torch.manual_seed(0)
    p = 0.25
    scores = torch.randn(2, 3, 17, columns)
    mask = None if masked is None else torch.randn(3, 1, columns) if masked == "float" else torch.rand(17, columns) < 0.8
    leaves = [scores.requires_grad_()] + ([mask.requires_grad_()] if masked == "float" and mask is not None else [])
    y = ops.softmax_dropout(scores, mask, p=p, scale=SCALE)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, leaves, dy)
    whole = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = eager(whole[0], whole[1] if masked == "float" else mask)
    kept = y.detach() != 0
    right = torch.where(kept, truth / (1 - p), 0)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-6)
    for got, want in zip(found, torch.autograd.grad(right, whole, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    drawn = kept[truth.detach() > 0].double()
    # five standard deviations of the mean of as many draws
    assert abs(drawn.mean() - (1 - p)) < 5 * (p * (1 - p) / drawn.numel()) ** 0.5


def test_draws_are_apart_from_each_other() -> None:
    """Neighbours, lanes that share a draw, and rows: kept together as often as chance has it."""
    torch.manual_seed(0)
    kept = (ops.softmax_dropout(torch.zeros(256, 192), p=0.5) != 0).double()
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.roll(4, 1), kept.roll(8, 1), kept.roll(128, 1)):
        assert abs((kept * other).mean() - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert (kept.mean(0) - 0.5).abs().max() < 5 * (0.25 / 256) ** 0.5


def test_dropout_at_its_ends_and_by_its_seed() -> None:
    scores = torch.randn(9, 40)
    assert not ops.softmax_dropout(scores, p=1.0).any()
    assert torch.equal(ops.softmax_dropout(scores, p=0.0), ops.scaled_softmax(scores))
    assert torch.equal(ops.softmax_dropout(scores, p=0.5, training=False), ops.scaled_softmax(scores))
    torch.manual_seed(3)
    first, second = (ops.softmax_dropout(scores, p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, ops.softmax_dropout(scores, p=0.5))
    assert not torch.equal(first, second)


def test_conservative_rounds_as_torch_does() -> None:
    scores, mask = torch.randn(17, 64).half(), torch.randn(64).half()
    ours = ops.scaled_softmax(scores, mask, scale=SCALE, precision="conservative")
    assert (ours == eager(scores, mask)).double().mean() > 0.98  # only the order of sums differs


def test_saves_one_tensor_of_that_size() -> None:
    scores = torch.randn(8, 64, requires_grad=True)
    for call in (lambda: ops.scaled_softmax(scores), lambda: ops.softmax_dropout(scores, p=0.1)):
        sizes: list[int] = []

        def note(value: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(value.numel())
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            call()
        assert sizes.count(scores.numel()) == 1


def test_repeats_bit_for_bit_and_leaves_inputs_alone() -> None:
    scores, mask = torch.randn(17, 48).bfloat16(), torch.randn(48).bfloat16()
    before = scores.clone(), mask.clone()
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        leaf = scores.detach().requires_grad_()
        y = ops.softmax_dropout(leaf, mask, p=0.3)
        found.append([y, *torch.autograd.grad(y, leaf, torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(scores, before[0])
    assert torch.equal(mask, before[1])


@pytest.mark.parametrize("drop", [False, True])
def test_opcheck(drop: bool) -> None:
    scores = torch.randn(2, 5, 24, requires_grad=True)
    mask = torch.randn(5, 1, requires_grad=True)
    seed = torch.tensor([7]) if drop else None
    given: tuple[Any, ...] = (scores, mask, 0.5, seed, 0.2 if drop else 0.0, False)
    torch.library.opcheck(softmax_op.library_op, given)
    y, top, inverse = (value.detach() for value in softmax_op(*given))
    kept = (None, scores.detach()) if drop else (y, None)
    rest = (*kept, mask.detach(), 0.5, seed, 0.2 if drop else 0.0, top, inverse, False, [True, True])
    torch.library.opcheck(softmax_backward_op.library_op, (y, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    def body(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ops.softmax_dropout(ops.scaled_softmax(scores * 2, mask), p=0.5, scale=3.0)

    compiled = torch.compile(body, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (6, 9):
        found = []
        for call in (compiled, body):
            torch.manual_seed(0)
            leaves = [torch.randn(2, rows, 24).requires_grad_(), torch.randn(rows, 1).requires_grad_()]
            y = call(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y) * torch.arange(24))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_reference_is_the_twin() -> None:
    scores, mask = torch.randn(4, 24), torch.rand(4, 24) < 0.5
    with ops.use("reference", "scaled_softmax"):
        torch.testing.assert_close(
            ops.scaled_softmax(scores, mask), fused(scores, mask) if SCALE == 1 else reference(scores, mask, 1.0, 0.0, False)
        )
    assert ops.scaled_softmax(scores.double()).dtype == torch.float64
    with ops.use("reference"):
        torch.manual_seed(0)
        y = ops.softmax_dropout(scores, p=0.5)
        torch.manual_seed(0)
        assert torch.equal(y, functional.dropout(scores.softmax(-1), 0.5))
    torch.testing.assert_close(reference(scores, mask, SCALE, 0.0, False), fused(scores, mask))


def test_errors_name_what_came() -> None:
    scores = torch.zeros(2, 3, 8)
    with pytest.raises(ShapeError, match=r"scores is float32 \(\)"):
        ops.scaled_softmax(torch.zeros(()))
    with pytest.raises(ShapeError, match=r"scores is int64 \(3,\)"):
        ops.scaled_softmax(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"mask is float32 \(2, 8\) on cpu, which does not broadcast to scores \(2, 3, 8\)"):
        ops.scaled_softmax(scores, torch.zeros(2, 8))
    with pytest.raises(ShapeError, match=r"mask is float32 \(1, 2, 3, 8\)"):
        ops.softmax_dropout(scores, torch.zeros(1, 2, 3, 8), p=0.1)
    with pytest.raises(ShapeError, match=r"mask is int64 \(8,\)"):
        ops.scaled_softmax(scores, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"p is 1\.5"):
        ops.softmax_dropout(scores, p=1.5)
