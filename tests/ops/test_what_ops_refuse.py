"""Arguments that mean nothing, and ways to differentiate that kernels do not offer: a clear error, or plain torch instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from gpupipe import ops
from gpupipe.errors import ConfigError, DeviceError, ShapeError

X = torch.linspace(-1, 1, 48).sin().view(2, 4, 6)
Q = torch.linspace(-3, 3, 1296).cos().view(2, 12, 3, 3, 6)
WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "a grid of sizes below 0": (ops.temporal_attention, {"qkv": Q, "grid": (-3, -2, 2)}, ShapeError, "grid is"),
    "no grid": (ops.temporal_attention, {"qkv": Q, "grid": None}, ShapeError, "grid is None"),
    "a number for a grid": (ops.qk_norm_rope, {"qkv": Q, "grid": 12}, ShapeError, "grid is 12"),
    "a grid of fractions": (ops.qk_norm_rope, {"qkv": Q, "grid": (2.0, 6)}, ShapeError, "grid is"),
    "half of text": (ops.qk_norm_rope, {"qkv": Q, "text": (1,)}, ShapeError, "text is"),
    "no text": (ops.qk_norm_rope, {"qkv": Q, "text": None}, ShapeError, "text is"),
    "cosines and sines": (ops.qk_norm_rope, {"qkv": Q, "rope": (X, X)}, ConfigError, "rope is a tuple"),
    "groups that are no whole number": (ops.group_norm_act, {"x": X, "groups": 2.0}, ConfigError, "groups is 2.0"),
    "a share in letters": (ops.dropout_add_norm, {"x": X, "branch": X, "p": "0.5"}, ConfigError, "p is '0.5'"),
    "no epsilon": (ops.layer_norm, {"x": X, "eps": None}, ConfigError, "eps is None"),
    "an epsilon below 0": (ops.rms_norm, {"x": X, "eps": -1.0}, ConfigError, "eps is -1.0"),
    "no scale": (ops.modulate_norm, {"x": X, "scale": None}, ShapeError, "scale is"),
    "no gate": (ops.gate_add_modulate_norm, {"x": X, "branch": X, "gate": None, "scale": X[0, 0]}, ShapeError, "gate is"),
    "a GPU that is not there": (ops.Rope.of, {"grid": (3,), "dims": (2,), "device": "cuda:99"}, DeviceError, "cuda:99"),
    "dims below 0": (ops.Rope.of, {"grid": (3,), "dims": (-2,)}, ConfigError, "dims are"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    op, arguments, error, said = WRONG[name]
    with pytest.raises(error, match=said):
        op(**arguments)


def test_tokens_that_are_all_text_do_not_turn() -> None:
    for length in (8, 0):
        rope = ops.Rope.of((length,), (6,))
        q, k, _ = ops.qk_norm_rope(Q, None, None, rope, text=(12, 0))
        for found, expected in zip((q, k), ops.qk_norm_rope(Q), strict=False):
            assert torch.equal(found, expected)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: ops.layer_norm(x),
    "group_norm_act": lambda x: ops.group_norm_act(x, 2, activation="silu"),
    "linear_act": lambda x: ops.linear_act(x, X[0, :, :6], activation="gelu_tanh"),
    "softmax": lambda x: ops.scaled_softmax(x),
    "qk_norm_rope": lambda x: ops.qk_norm_rope(Q * x.mean())[0],
    "temporal_attention": lambda x: ops.temporal_attention(Q * x.mean(), grid=(3, 2, 2), norm="head"),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_and_functional_transforms_go_through_plain_torch(name: str) -> None:
    call = CALLS[name]
    with ops.use("reference"):
        expected = torch.func.jvp(call, (X,), (X.cos(),))[1]
        gradient = torch.func.grad(lambda x: call(x).sin().sum())(X)
    assert expected.abs().max() > 0
    torch.testing.assert_close(torch.func.jvp(call, (X,), (X.cos(),))[1], expected)
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sin().sum())(X), gradient)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(X, X.cos()))).tangent
    torch.testing.assert_close(tangent, expected)
    both = torch.stack([X, X.cos()])
    torch.testing.assert_close(torch.vmap(call)(both)[0], call(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("watched", [False, True])
def test_a_second_derivative_is_refused(watched: bool) -> None:
    if not ops.settings.kernel_runs("layer_norm", X):
        pytest.skip("plain torch, which has one")
    x = X.clone().requires_grad_()
    with FlopCounterMode(display=False) if watched else torch.enable_grad():
        y = ops.layer_norm(x, X[0, 0])
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        with pytest.raises((NotImplementedError, RuntimeError), match=r"second derivatives|differentiate twice"):
            ((gradient**2).sum() + y.sum()).backward()
