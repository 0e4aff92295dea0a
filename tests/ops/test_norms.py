"""The norm family: exact, whole in its gradients, repeatable, whatever the shape and the strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import hold
from norm_cases import CASES, eager, inputs_of, weights_of
from torch.nn import functional

from gpupipe import ops
from gpupipe.device.jit import interpreted
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.layout import parts
from gpupipe.ops.norms.backward import launch_backward
from gpupipe.ops.norms.op import norm_backward_op, norm_op
from gpupipe.ops.norms.tiles import backward_candidates, forward_candidates

needs_triton = pytest.mark.skipif(not interpreted(), reason="Triton does not run here on the CPU")
pytestmark = needs_triton


def check(case: str, shape: tuple[int, ...], modulated: tuple[int, ...], dtype: torch.dtype, **more: Any) -> None:
    op, names, settings = CASES[case]
    named = {"kind": settings["kind"]} if op not in (ops.layer_norm, ops.rms_norm) and settings else {}
    hold(
        lambda **kw: op(**kw, eps=1e-6, **named, **more),
        lambda **kw: eager(**kw, eps=1e-6, **settings),
        inputs_of(names, shape, modulated), weights_of(names, shape), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_exact_as_torch(case: str, dtype: torch.dtype) -> None:
    check(case, (3, 5, 96), (3, 96), dtype)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("case", ["layer_norm", "gate_add_modulate_affine_norm"])
def test_any_number_of_rows(case: str, rows: int) -> None:
    check(case, (rows, 40), (40,), torch.float32)
    check(case, (2, rows, 40), (2, 40), torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 100, 1152, 1536])
def test_any_hidden_size(size: int) -> None:
    check("gate_add_modulate_affine_norm", (2, 3, size), (2, size), torch.float32)
    check("layer_norm", (4, size), (), torch.float32)


@pytest.mark.parametrize("modulated", [(24,), (1, 24), (2, 24), (2, 1, 24), (2, 3, 24), (2, 3, 1, 24), (2, 3, 4, 24)])
def test_modulations_of_every_grain(modulated: tuple[int, ...]) -> None:
    check("gate_add_modulate_affine_norm", (2, 3, 4, 24), modulated, torch.float32)


def test_modulations_of_unlike_grain() -> None:
    inputs = inputs_of(("x", "branch"), (2, 3, 24), ()) | {
        "gate": torch.randn(2, 24).double(), "scale": torch.randn(2, 3, 24).double(), "shift": torch.randn(24).double()
    }  # fmt: skip
    hold(ops.gate_add_modulate_norm, eager, inputs, weights_of(("branch",), (2, 3, 24)), torch.float32)


def test_many_rows_make_several_programs() -> None:
    check("gate_add_modulate_affine_norm", (2, 300, 12), (2, 12), torch.float32)


@pytest.mark.parametrize("case", ["modulate_affine_norm", "gate_add_modulate_norm"])
def test_every_tile_gives_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tuner may choose is right, not only what the model of the machine likes best."""
    from gpupipe.device.autotune import Machine

    gpu = Machine("some", 3)
    forward, backward = forward_candidates(96), backward_candidates(gpu, 96, 5, 3)
    assert len(forward) > 5
    assert len(backward) > 5
    tried = []

    def chosen(op: str, *_: Any) -> Any:
        among = forward if op == "norm_forward" else backward
        tried.append(op)
        return among[turn % len(among)]

    monkeypatch.setattr("gpupipe.ops.norms.forward.choose", chosen)
    monkeypatch.setattr("gpupipe.ops.norms.backward.choose", chosen)
    turn = 0
    while turn < max(len(forward), len(backward)):
        check(case, (3, 5, 96), (3, 96), torch.float32)
        turn += 3
    assert set(tried) == {"norm_forward", "norm_backward"}


def strided(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values of a shape in memory that is not in order."""
    generator = torch.Generator().manual_seed(3)
    *leading, size = shape
    if kind == "sliced":
        return torch.randn(*leading, 3, size, generator=generator)[..., 1, :]
    if kind == "cut":
        return torch.randn(leading[0], leading[1] + 2, size, generator=generator)[:, 1:-1]
    if kind == "transposed":
        return torch.randn(leading[1], leading[0], size, generator=generator).transpose(0, 1)
    if kind == "columns":
        return torch.randn(*leading, 2 * size, generator=generator)[..., ::2]
    if kind == "unaligned":
        return torch.randn(leading[0] * leading[1] * size + 1, generator=generator)[1:].view(shape)
    if kind == "turned":  # three leading steps that no two strides tell
        return torch.randn(size, leading[1], leading[0], generator=generator).permute(2, 1, 0)
    assert kind == "expanded"
    return torch.randn(1, leading[1], size, generator=generator).expand(shape)


@pytest.mark.parametrize("kind", ["sliced", "cut", "transposed", "columns", "unaligned", "turned", "expanded"])
def test_strides_do_not_matter(kind: str) -> None:
    x, branch, dy, dh = (strided(kind, (2, 4, 20)) for _ in range(4))
    scale, shift, gate = torch.randn(2, 60).chunk(3, -1)
    answers = []
    for tensors in ((x, branch, dy, dh, gate, scale, shift), [t.contiguous() for t in (x, branch, dy, dh, gate, scale, shift)]):
        x_, branch_, dy_, dh_, gate_, scale_, shift_ = (t.detach() for t in tensors)
        leaves = [t.requires_grad_() for t in (x_, branch_, gate_, scale_, shift_)]
        made = ops.gate_add_modulate_norm(*leaves)
        answers.append([*made, *torch.autograd.grad(made, leaves, (dy_, dh_))])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_strides_of_weights_do_not_matter() -> None:
    x, both = torch.randn(4, 24), torch.randn(24, 2)
    answers = []
    for weight, bias in (both.unbind(1), both.t().contiguous().unbind(0)):
        leaves = [x.clone().requires_grad_(), weight.detach().requires_grad_(), bias.detach().requires_grad_()]
        y = ops.layer_norm(*leaves)
        answers.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_large_means_do_not_spoil_the_deviation() -> None:
    x = torch.randn(8, 64, dtype=torch.float64) + 300
    found = ops.layer_norm(x.to(torch.float16))
    exact = functional.layer_norm(x.to(torch.float16).double(), (64,))
    assert (found.double() - exact).abs().max() < 2e-3


def test_conservative_rounds_where_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, branch = torch.randn(2, 2, 9, 64, generator=generator).to(torch.float16)
    gate, scale, shift = torch.randn(3, 2, 64, generator=generator).to(torch.float16)
    y, h = ops.gate_add_modulate_norm(x, branch, gate, scale, shift, precision="conservative")
    y_eager, h_eager = eager(x, branch, gate, scale, shift)
    assert torch.equal(h, h_eager)
    assert (y != y_eager).float().mean() < 0.01  # the order of sums moves a statistic by an ulp now and then
    y_balanced, h_balanced = ops.gate_add_modulate_norm(x, branch, gate, scale, shift, precision="balanced")
    assert (h_balanced != h_eager).float().mean() > 0.02
    assert (y_balanced != y_eager).float().mean() > 0.1
    with ops.use("reference"):
        y_reference, h_reference = ops.gate_add_modulate_norm(x, branch, gate, scale, shift, precision="conservative")
    assert torch.equal(h_reference, h_eager)
    assert (y_reference != y_eager).float().mean() < 0.01


def test_gradients_repeat_bit_for_bit() -> None:
    def once() -> list[torch.Tensor]:
        torch.manual_seed(1)
        leaves = [torch.randn(2, 40, 36).requires_grad_() for _ in range(2)]
        leaves += [torch.randn(2, 36).requires_grad_() for _ in range(3)]
        y, h = ops.gate_add_modulate_norm(*leaves)
        return [y, h, *torch.autograd.grad((y * y).sum() + h.sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(value: float) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = value
    y = ops.layer_norm(x)
    assert y[1].isnan().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("wanted", ["x", "branch", "gate", "scale", "shift", "weight", "bias"])
def test_a_gradient_alone_is_the_same(wanted: str) -> None:
    names = ("x", "branch", "gate", "scale", "shift", "weight", "bias")
    inputs = {name: value.float() for name, value in inputs_of(names, (2, 3, 20), (2, 20)).items()}
    grads = []
    for alone in (False, True):
        leaves = {name: value.clone().requires_grad_(not alone or name == wanted) for name, value in inputs.items()}
        y, h = ops.gate_add_modulate_norm(**leaves)
        (y.sin().sum() + h.cos().sum()).backward()
        grads.append(leaves[wanted].grad)
        assert not alone or all(leaf.grad is None for name, leaf in leaves.items() if name != wanted)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("used", ["y", "h"])
def test_one_output_may_be_left_unused(used: str) -> None:
    def grads(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        x, branch = torch.randn(2, 3, 20).requires_grad_(), torch.randn(2, 3, 20).requires_grad_()
        y, h = function(x, branch)
        return torch.autograd.grad((y if used == "y" else h).sin().sum(), (x, branch))

    for found, expected in zip(grads(ops.add_norm), grads(eager), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.layer_norm(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class TestDropout:
    def test_drops_the_share_it_should_and_scales_the_rest(self) -> None:
        torch.manual_seed(5)
        branch = torch.ones(64, 96, requires_grad=True)
        _, h = ops.dropout_add_norm(torch.zeros(64, 96), branch, p=0.25)
        kept = h != 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
        assert torch.allclose(h[kept], torch.tensor(4 / 3))
        assert kept.float().mean(0).std() < 0.1, "no column is dropped for all rows"
        assert kept.float().mean(1).std() < 0.1
        h.sum().backward()
        assert torch.equal(branch.grad, h.detach()), "the gradient passes where the value did"

    def test_comes_from_torchs_generator(self) -> None:
        x, branch = torch.randn(2, 6, 40)

        def draw() -> torch.Tensor:
            return ops.dropout_add_norm(x, branch, p=0.5)[1]

        torch.manual_seed(3)
        first, second = draw(), draw()
        torch.manual_seed(3)
        assert torch.equal(first, draw())
        assert not torch.equal(first, second)

    def test_a_recomputed_checkpoint_drops_the_same(self) -> None:
        from torch.utils.checkpoint import checkpoint

        def grads(recompute: bool) -> tuple[torch.Tensor, ...]:
            torch.manual_seed(7)
            x, branch = (torch.randn(6, 40, requires_grad=True) for _ in range(2))

            def block(x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
                y, h = ops.dropout_add_norm(x, branch, p=0.5)
                return y.sin() + h

            out = checkpoint(block, x, branch, use_reentrant=False) if recompute else block(x, branch)
            return torch.autograd.grad(out.sum(), (x, branch))

        assert all(torch.equal(a, b) for a, b in zip(grads(True), grads(False), strict=True))

    @pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.9, False)])
    def test_without_it_the_op_is_add_norm(self, p: float, training: bool) -> None:
        x, branch = torch.randn(2, 6, 40)
        found = ops.dropout_add_norm(x, branch, p=p, training=training)
        assert all(torch.equal(a, b) for a, b in zip(found, ops.add_norm(x, branch), strict=True))

    def test_all_may_be_dropped(self) -> None:
        x = torch.randn(3, 8)
        assert torch.equal(ops.dropout_add_norm(x, torch.full_like(x, 3.0), p=1.0)[1], x)

    def test_gradients_are_those_of_the_mask_it_drew(self) -> None:
        torch.manual_seed(2)
        x, branch, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
        leaves = [t.clone().requires_grad_() for t in (x, branch, weight)]
        y, h = ops.dropout_add_norm(*leaves, p=0.5, kind="rms")
        mask = (h.detach() != x).float() * 2
        again = [t.clone().double().requires_grad_() for t in (x, branch, weight)]
        y2, h2 = eager(again[0], again[1] * mask.double(), weight=again[2], kind="rms")
        found = torch.autograd.grad(y.sin().sum() + h.sin().sum(), leaves)
        expected = torch.autograd.grad(y2.sin().sum() + h2.sin().sum(), again)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def op_arguments() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(2, 3, 20, generator=generator, requires_grad=True) for _ in range(2))
    gate, scale, shift = (torch.randn(2, 20, generator=generator, requires_grad=True) for _ in range(3))
    weight = torch.randn(20, generator=generator, requires_grad=True)
    return [x, branch, gate, torch.tensor([5]), 0.3, weight, None, scale, shift, 1e-6, False, False]


def test_the_library_ops_keep_their_contract() -> None:
    torch.library.opcheck(norm_op.library_op, tuple(op_arguments()))
    plain = op_arguments()
    plain[1:5] = [None, None, None, 0.0]
    torch.library.opcheck(norm_op.library_op, tuple(plain))
    x, branch, gate, seed, p, weight, bias, scale, shift, _, rms, conservative = (
        value.detach() if isinstance(value, torch.Tensor) else value for value in op_arguments()
    )
    rows = torch.rand(6)
    arguments = (
        x, branch, branch, x, gate, seed, p, weight, bias, scale, shift, rows, rows + 1, rms, conservative, [True] * 7
    )  # fmt: skip
    torch.library.opcheck(norm_backward_op.library_op, arguments, test_utils=("test_schema", "test_faketensor"))
    assert all(made.numel() for made in launch_backward(*arguments)[:4])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_and_gives_the_same(dynamic: bool) -> None:
    def block(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Any:
        y, h = ops.gate_add_modulate_norm(x, branch, gate, scale, shift)
        return ops.rms_norm(y.sin()), h

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch, rows in ((2, 3), (3, 5)) if dynamic else ((2, 3),):
        torch.manual_seed(0)
        leaves = [torch.randn(batch, rows, 20).requires_grad_() for _ in range(2)]
        leaves += [torch.randn(batch, 20).requires_grad_() for _ in range(3)]
        found, expected = compiled(*leaves), block(*leaves)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        weights = [torch.randn_like(value) for value in expected]
        found_grads, expected_grads = (torch.autograd.grad(made, leaves, weights) for made in (found, expected))
        assert all(torch.equal(a, b) for a, b in zip(found_grads, expected_grads, strict=True))


def test_compiled_dropout_draws_anew() -> None:
    x, branch = torch.randn(2, 6, 40)
    compiled = torch.compile(lambda: ops.dropout_add_norm(x, branch, p=0.5)[1], fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(), compiled())


def test_under_autocast_the_type_stays() -> None:
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.layer_norm(x).dtype == torch.bfloat16
        assert ops.layer_norm(x.float()).dtype == torch.float32


def test_parameters_of_another_type() -> None:
    x = torch.randn(4, 3, 24, dtype=torch.float16, requires_grad=True)
    weight, scale = torch.randn(24, requires_grad=True), torch.randn(4, 24, requires_grad=True)
    y = ops.modulate_norm(x, scale, weight=weight)
    assert y.dtype == torch.float16
    y.sum().backward()
    assert weight.grad is not None
    assert scale.grad is not None
    assert (weight.grad.dtype, scale.grad.dtype) == (torch.float32, torch.float32)


def test_float64_and_endless_rows_are_plain_torch() -> None:
    torch.autograd.gradcheck(
        lambda *args: ops.gate_add_modulate_norm(*args),
        [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in [(2, 2, 5)] * 2 + [(2, 5)] * 3],
    )
    x = torch.randn(2, 20000)
    torch.testing.assert_close(ops.layer_norm(x), functional.layer_norm(x, (20000,)))


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda x: ops.layer_norm(x.long()), ShapeError, "x is int64"),
        (lambda x: ops.layer_norm(x[0, 0, 0]), ShapeError, "x is float32"),
        (lambda x: ops.layer_norm(x, torch.ones(7)), ShapeError, r"weight must be a tensor \(8,\)"),
        (lambda x: ops.add_norm(x, x[:1]), ShapeError, r"branch is float32 \(1, 3, 8\)"),
        (lambda x: ops.add_norm(x, None), ShapeError, "branch"),
        (lambda x: ops.add_norm(x, x, kind="batch"), ConfigError, "kind is 'batch'"),
        (lambda x: ops.modulate_norm(x, torch.ones(3, 8)), ShapeError, r"scale must be \(8,\)"),
        (lambda x: ops.modulate_norm(x, torch.ones(2, 7)), ShapeError, "scale is"),
        (lambda x: ops.modulate_norm(x, torch.ones(2, 8), torch.ones(2, 8, device="meta")), ShapeError, "shift must be on cpu"),
        (lambda x: ops.dropout_add_norm(x, x, p=1.5), ConfigError, "p is 1.5"),
        (lambda x: ops.rms_norm(x, precision="exact"), ConfigError, "'exact'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call: Callable[[torch.Tensor], object], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        call(torch.randn(2, 3, 8))


def test_rows_waste_few_lanes() -> None:
    for size in (768, 1024, 1152, 1536, 2048, 3072, 4096, 5120):
        assert sum(parts(size)) == size
    for size in range(4, 5000):
        assert size <= sum(parts(size)) <= max(1.5 * size, size + 4)
