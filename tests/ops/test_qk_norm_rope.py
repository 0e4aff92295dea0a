"""Norm and turning of queries and keys: values and gradients against float64, under all that may trace them, and its refusals.

Without a GPU the kernels run interpreted; bfloat16 is then cut off, not rounded, which costs one unit in the last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from gpupipe import ops
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops.rotary import prepared
from gpupipe.ops.rotary.op import qk_backward_op, qk_op
from gpupipe.ops.rotary.tiles import parts

GRID = (2, 1, 2)


def make(
    dtype: torch.dtype = torch.float32, samples: int = 1, heads: int = 2, dim: int = 8, text: tuple[int, int] = (0, 0), **_: Any
) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(samples, 4 + sum(text), 3, heads, dim).to(dtype)


def turning(dim: int = 8, layout: Any = "interleaved") -> ops.Rope:
    third = 2 * (dim // 6)
    return ops.Rope.of((3, 2, 3), (dim - 2 * third, third, third), layout=layout)


def weights(size: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [1 + 0.3 * torch.randn(size) for _ in range(2)]


def results(
    qkv: torch.Tensor, wide: torch.dtype, *, packed: bool = True, norm: Any = "head", layout: Any = "interleaved",
    text: tuple[int, int] = (0, 0), weighted: bool = True,
) -> list[torch.Tensor]:  # fmt: skip
    """Outputs and all gradients, with float64 as the kernels' truth."""
    heads, dim = qkv.shape[3:]
    x = qkv.detach().to(wide).requires_grad_()
    affine: list[torch.Tensor | None] = [None, None]
    if norm and weighted:
        kind = torch.promote_types(wide, torch.float32)
        affine = [w.to(kind).requires_grad_() for w in weights(dim if norm == "head" else heads * dim)]
    rope = turning(dim, layout) if layout else None
    given = x if packed else tuple(x.unbind(2))
    made = ops.qk_norm_rope(given, *affine, rope, grid=GRID, norm=norm, text=text)
    torch.manual_seed(2)
    torch.autograd.backward(made, [torch.randn(y.shape).to(qkv.dtype).to(wide) for y in made])
    gradients = [x.grad, *(w.grad for w in affine if w is not None)]
    assert all(gradient is not None for gradient in gradients)
    return [*made, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        (torch.float32, {}),
        (torch.float32, {"samples": 2, "text": (1, 1), "layout": "half"}),
        (torch.float32, {"norm": "full", "heads": 3, "packed": False}),
        (torch.float32, {"norm": "full", "dim": 24, "layout": "half"}),  # cut by pairs
        (torch.float32, {"norm": None, "text": (0, 2)}),
        (torch.float32, {"weighted": False, "layout": None, "heads": 5, "dim": 7}),
        (torch.bfloat16, {"heads": 3, "dim": 72}),
        (torch.float16, {"heads": 3, "dim": 64, "layout": "half", "packed": False}),
        (torch.bfloat16, {"norm": "full", "heads": 6, "dim": 18, "text": (1, 0)}),
    ],
)
def test_values_and_gradients(dtype: torch.dtype, case: dict[str, Any]) -> None:
    qkv = make(dtype, **case)
    case = {name: value for name, value in case.items() if name not in ("samples", "heads", "dim")}
    found = results(qkv, dtype, **case)
    truth = results(qkv, torch.float64, **case)
    with ops.use("reference"):
        eager = results(qkv, dtype, **case)
    cut = torch.finfo(dtype).eps if dtype == torch.bfloat16 and not torch.cuda.is_available() else 0.0
    for ours, exact, theirs in zip(found, truth, eager, strict=True):
        assert ours.dtype == theirs.dtype
        allowed = 2 * (theirs - exact).abs().max() + 2e-6 * exact.abs().max() + cut * exact.abs()
        assert ((ours - exact).abs() <= allowed).all()


@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_any_number_of_tokens(tokens: int) -> None:
    qkv = torch.randn(1, tokens, 3, 1, 4, requires_grad=True)
    rope = ops.Rope.of((17,), (4,))
    q, k, v = ops.qk_norm_rope(qkv, *weights(4), rope)
    (q.sum() + k.sum() + v.sum()).backward()
    with ops.use("reference"):
        q_exact, k_exact, _ = ops.qk_norm_rope(qkv, *weights(4), rope)
    torch.testing.assert_close((q, k), (q_exact, k_exact))
    assert qkv.grad is not None
    assert (qkv.grad[:, :, 2] == 1).all()


def test_rotation_by_hand() -> None:
    rope = ops.Rope(
        (torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])), (torch.ones(1, 1), torch.zeros(1, 1)), layout="half"
    )  # fmt: skip
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 2, 1, 4)
    turned, _, _ = ops.qk_norm_rope((q, q, q), rope=rope, grid=(2, 1), norm=None)
    assert turned[0, :, 0].tolist() == [[1, 2, 3, 4], [-3, 2, 1, 4]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.expand(2, *x.shape[1:]),
        lambda x: torch.cat((x, x), 1)[:, 3:7],
        lambda x: torch.cat((x, x), 4)[..., 1:9],  # unaligned
        lambda x: x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
    ],
)
def test_strides(change: Any) -> None:
    x = change(make())
    torch.testing.assert_close(
        ops.qk_norm_rope(x, rope=turning(), grid=GRID),
        ops.qk_norm_rope(x.contiguous(), rope=turning(), grid=GRID),
        rtol=0,
        atol=0,
    )
    y = x.detach().requires_grad_()
    q, _, _ = ops.qk_norm_rope(y, rope=turning(), grid=GRID)
    q.transpose(1, 3).backward(torch.ones(()).expand(q.transpose(1, 3).shape))
    assert y.grad is not None
    assert (y.grad[:, :, 1:] == 0).all()


def test_values_are_a_view_and_inputs_stay() -> None:
    qkv = make()
    before = qkv.clone()
    _, _, v = ops.qk_norm_rope(qkv)
    assert v.data_ptr() == qkv[:, :, 2].data_ptr()
    assert torch.equal(qkv, before)


def test_repeats_bit_for_bit() -> None:
    qkv = make(torch.bfloat16)
    first, second = results(qkv, torch.bfloat16), results(qkv, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_and_inf_stay_in_their_head() -> None:
    qkv = make()
    qkv[0, 1, 0, 1, 2] = torch.nan
    qkv[0, 2, 1, 0, 3] = torch.inf
    q, k, _ = ops.qk_norm_rope(qkv)
    assert q[0, 1, 1].isnan().all()
    assert k[0, 2, 0, 3].isnan()
    assert q.isnan().sum() == 8
    assert k.isnan().sum() == 1


def test_conservative_rounds_between() -> None:
    qkv = make(torch.bfloat16)
    found = ops.qk_norm_rope(qkv, rope=turning(), grid=GRID, precision="conservative")[0]
    with ops.use("reference"):
        exact = ops.qk_norm_rope(qkv, rope=turning(), grid=GRID, precision="conservative")[0]
    torch.testing.assert_close(found, exact, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False)])
def test_some_gradients_only(asked: tuple[bool, ...]) -> None:
    given = [tensor.clone().requires_grad_(need) for tensor, need in zip([make(), *weights(8)], asked, strict=True)]
    _, k, _ = ops.qk_norm_rope(*given)  # type: ignore[arg-type]
    k.sum().backward()
    assert [tensor.grad is not None for tensor in given] == list(asked)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(packed: bool, dynamic: bool) -> None:
    rope = ops.Rope.of((8,), (4,))

    def work(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = ops.qk_norm_rope(x if packed else tuple(x.unbind(2)), w, w, rope)  # type: ignore[arg-type]
        return q * k.sin() + v

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (3, 5) if dynamic else (3,):
        x, w = torch.randn(1, tokens, 3, 1, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        y = compiled(x, w)
        torch.testing.assert_close(y, work(x, w))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(work(x, w).sum(), (x, w)))


def test_ops_keep_the_rules_of_torch() -> None:
    x = torch.randn(1, 2, 3, 1, 4)
    rope = ops.Rope.of((2,), (4,))
    q, k, _ = x.unbind(2)
    arguments = prepared(
        q, *weights(4), rope, grid=None, norm="head", text=(0, 0), eps=1e-6, precision=None
    )  # fmt: skip
    learned = [w.requires_grad_() for w in arguments[:2]]  # type: ignore[union-attr]
    opcheck(qk_op.library_op, (q.clone().requires_grad_(), k.clone().requires_grad_(), *learned, *arguments[2:]))
    plain = [None if value is None else value.detach() for value in arguments[:2]]
    rest = (*plain, *arguments[2:11])
    opcheck(qk_backward_op.library_op, (q, k, None, q, k, *rest, True))
    opcheck(qk_backward_op.library_op, (q, k, q, x, None, *rest, False))


def test_cuts_waste_less_than_a_quarter() -> None:
    for heads, dim in ((24, 128), (16, 64), (16, 72), (12, 128), (40, 128), (16, 96), (30, 64), (18, 128)):
        cut = parts(heads, dim)
        lanes = 2 * (cut["HA"] * cut["PA"] + cut["HB"] * cut["PB"])
        assert heads * dim <= lanes < heads * dim / 0.75


@pytest.mark.parametrize(
    ("error", "said", "call"),
    [
        (ShapeError, "qkv is float32 .2, 3.", lambda: ops.qk_norm_rope(torch.ones(2, 3))),
        (
            ShapeError,
            "k is float32",
            lambda: ops.qk_norm_rope((torch.ones(1, 6, 2, 8), torch.ones(1, 5, 2, 8), make()[:, :, 0])),
        ),
        (ShapeError, "q_weight is float32 .7,.", lambda: ops.qk_norm_rope(make(), torch.ones(7), torch.ones(8))),
        (ConfigError, "weights of queries and keys", lambda: ops.qk_norm_rope(make(), torch.ones(8))),
        (ConfigError, "norm is 'layer'", lambda: ops.qk_norm_rope(make(), norm="layer")),  # type: ignore[arg-type]
        (ShapeError, "text is .4, 1.", lambda: ops.qk_norm_rope(make(), text=(4, 1))),
        (ShapeError, "grid is .2, 2, 3.", lambda: ops.qk_norm_rope(make(), grid=(2, 2, 3))),
        (ShapeError, "rope turns 3 pairs", lambda: ops.qk_norm_rope(make(), rope=turning(6), grid=GRID)),
        (ShapeError, "rope has 3 axes", lambda: ops.qk_norm_rope(make(), rope=turning(), grid=(4,))),
        (ShapeError, "positions", lambda: ops.qk_norm_rope(make(), rope=turning(), grid=(1, 4, 1))),
        (ConfigError, "layout is 'pairs'", lambda: ops.Rope.of((2,), (4,), layout="pairs")),  # type: ignore[arg-type]
        (ConfigError, "dims are", lambda: ops.Rope.of((2,), (3,))),
        (ConfigError, "0 axes", lambda: ops.Rope()),
        (ShapeError, "cos of axis 0", lambda: ops.Rope((torch.ones(3), torch.ones(3)))),
        (ShapeError, "axis 0 has cos", lambda: ops.Rope((torch.ones(3, 1), torch.ones(3, 2)))),
    ],
)
def test_refusals(error: type[Exception], said: str, call: Any) -> None:
    with pytest.raises(error, match=said):
        call()
