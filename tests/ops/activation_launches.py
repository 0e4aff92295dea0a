"""The activation pass' launches at the shapes of the benchmark, and those of the other element-wise ops."""

from __future__ import annotations

import torch
from cubins import Launch, recording

from gpupipe.ops.activation.backward import launch_act_backward
from gpupipe.ops.activation.forward import launch_act
from gpupipe.ops.cast import _body as launch_cast
from gpupipe.ops.timestep import _backward_body, _body

ROWS = 32768


def launches() -> list[Launch]:
    """After the first product of an MLP, after the second, and both ways."""
    found: list[Launch] = []
    bf16, meta = torch.bfloat16, {"device": "meta"}
    seed = torch.empty(1, dtype=torch.int64, **meta)
    with recording("gpupipe.ops.activation.forward", "gpupipe.ops.activation.backward", "gpupipe.ops.sums") as taken:
        for act, size in (("gelu_tanh", 12288), ("gelu", 12288), ("swiglu", 8192)):
            wide = torch.empty(1, ROWS, size * (2 if act == "swiglu" else 1), dtype=bf16, **meta)
            y = torch.empty(1, ROWS, size, dtype=bf16, **meta)
            bias = wide[0, 0]
            launch_act(wide, None, None, None, None, 0.0, act, False)
            for want in (False, True):
                launch_act_backward(y, wide, None, None, None, 0.0, act, bf16, False, like_bias=bias, want_act=want)
            found += taken(act)
        x = torch.empty(2, ROWS // 2, 3072, dtype=bf16, **meta)
        gate = torch.empty(2, 3072, dtype=bf16, **meta)
        launch_act(x, x[0, 0], gate, x, seed, 0.1, "gelu_tanh", False)
        launch_act(x, None, gate, x, None, 0.0, "none", False)
        launch_act(x, None, None, x, seed, 0.1, "none", False)
        launch_act_backward(
            x, x, x[0, 0], gate, seed, 0.1, "gelu_tanh", bf16, False, like_bias=x[0, 0], want_gate=True
        )  # fmt: skip
        launch_act_backward(x, x, None, gate, None, 0.0, "none", bf16, False, like_bias=x[0, 0], want_gate=True)
        launch_act_backward(x, None, None, None, None, 0.0, "none", bf16, False, want_x=False, like_bias=x[0, 0])
        launch_act_backward(x, x, None, x[0], None, 0.0, "none", bf16, False, want_gate=True)
        found += taken("gate")
    with recording("gpupipe.ops.cast", "gpupipe.ops.timestep") as taken:
        launch_cast(x, torch.empty(1, **meta), 1.0, torch.float32, False)
        launch_cast(x[:, ::2], None, 2.0, torch.float16, False)
        found += taken("cast")
        times = torch.empty(ROWS, **meta)
        y = _body(times, 256, True, 0.0, 1.0, 1e4, bf16)
        _backward_body(y, times, True, 0.0, 1.0, 1e4)
        found += taken("timestep")
    return found
