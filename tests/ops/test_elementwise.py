"""The small element-wise ops: a cast with a factor, timestep embeddings, patches and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import hold
from torch.nn import functional

from gpupipe import ops
from gpupipe.device import jit
from gpupipe.errors import ConfigError, ShapeError
from gpupipe.ops import patch_embed3d, scale_cast, timestep_embedding, unpatch_embed3d
from gpupipe.ops.cast import scale_cast_op
from gpupipe.ops.timestep import backward_op, timestep_op

pytestmark = pytest.mark.skipif(not jit.interpreted(), reason="kernels run on the CPU only under Triton's interpreter")

HALVES = [torch.float16, torch.bfloat16, torch.float32]


def compiled_equals_eager(step: Callable[..., torch.Tensor], *inputs: torch.Tensor, dynamic: bool) -> None:
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = []
    for function in (step, compiled):
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = function(*leaves)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


LAID: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "cut": lambda: torch.randn(4, 6, 9)[:, ::2, 1:],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "empty": lambda: torch.randn(0, 3),
    "scalar": lambda: torch.randn(()),
    "odd": lambda: torch.randn(2111),
}


class TestScaleCast:
    @pytest.mark.parametrize("layout", LAID)
    @pytest.mark.parametrize("to", HALVES, ids=str)
    def test_any_layout(self, layout: str, to: torch.dtype) -> None:
        x = LAID[layout]().requires_grad_()
        factor = torch.tensor([0.37], requires_grad=True)
        y = scale_cast(x, factor, to)
        expected = (x * factor.reshape(())).to(to)
        torch.testing.assert_close(y, expected, rtol=torch.finfo(to).eps, atol=0.0)  # bf16 is cut off under the interpreter
        if layout in ("plain", "transposed", "permuted"):
            assert y.stride() == expected.stride()
        weights = torch.randn(x.shape).to(to)
        for a, b in zip(*(torch.autograd.grad(made, (x, factor), weights) for made in (y, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(scale_cast(x, 2, to), scale_cast(x, torch.tensor(2.0), to))

    def test_conservative_rounds_the_product_to_the_type_of_x(self) -> None:
        x = torch.randn(1000).half()
        assert torch.equal(scale_cast(x, 0.3, torch.float32, precision="conservative"), (x * 0.3).float())
        assert torch.equal(scale_cast(x, 0.3, torch.float32), x.float() * 0.3)

    def test_what_is_too_large_becomes_infinite(self) -> None:
        y = scale_cast(torch.tensor([1e5, float("nan"), 1.0]), 2.0, torch.float16)
        assert y[0].isinf()
        assert y[1].isnan()
        assert y[2] == 2

    def test_contracts_and_compiling(self) -> None:
        x, factor = torch.randn(4, 6, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        torch.library.opcheck(scale_cast_op.library_op, (x, factor, 1.0, torch.bfloat16, False))
        torch.library.opcheck(scale_cast_op.library_op, (x, None, 2.0, torch.float16, False))
        for dynamic in (False, True):
            inputs = torch.randn(4, 6), torch.tensor(2.5)
            compiled_equals_eager(lambda x, f: scale_cast(x, f, torch.float16), *inputs, dynamic=dynamic)

    def test_errors_name_the_argument(self) -> None:
        x = torch.randn(4)
        with pytest.raises(ShapeError, match="x is int64"):
            scale_cast(torch.arange(3), 1.0, torch.float16)
        with pytest.raises(ShapeError, match="factor is"):
            scale_cast(x, x, torch.float16)
        with pytest.raises(ConfigError, match="dtype is"):
            scale_cast(x, 1.0, torch.int8)


def embedding(t: torch.Tensor, dim: int, flip: bool = False, shift: float = 1.0, scale: float = 1.0) -> torch.Tensor:
    """As diffusion models' code has it."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=t.dtype) / (half - shift))
    phase = scale * (t[..., None] * frequencies)
    parts = [phase.sin(), phase.cos()]
    return functional.pad(torch.cat(parts[::-1] if flip else parts, -1), (0, dim % 2))


class TestTimestepEmbedding:
    @pytest.mark.parametrize("count", [0, 1, 15, 16, 17])
    @pytest.mark.parametrize("dim", [4, 7, 256, 321])
    def test_as_exact_as_torch(self, count: int, dim: int) -> None:
        for flip, shift, scale in ((False, 1.0, 1.0), (True, 0.0, 2.5)):
            hold(
                lambda t, flip=flip, shift=shift, scale=scale: timestep_embedding(
                    t, dim, flip_sin_to_cos=flip, downscale_freq_shift=shift, scale=scale,
                    dtype=torch.float64 if t.dtype == torch.float64 else torch.float32,
                ),
                lambda t, flip=flip, shift=shift, scale=scale: embedding(t, dim, flip, shift, scale),
                {"t": torch.linspace(0, 999, count).double()},
                [torch.linspace(-1, 1, count * dim, dtype=torch.float64).view(count, dim)],
                torch.float32,
            )  # fmt: skip

    def test_integers_tokens_and_types(self) -> None:
        t = torch.arange(6).view(2, 3) * 150
        y = timestep_embedding(t, 64, dtype=torch.float16)
        assert (y.shape, y.dtype) == ((2, 3, 64), torch.float16)
        torch.testing.assert_close(y.double(), embedding(t.double(), 64), atol=1e-3, rtol=0.0)
        with ops.use("reference"):
            torch.testing.assert_close(timestep_embedding(t, 64).double(), embedding(t.double(), 64), atol=1e-4, rtol=0.0)
        assert timestep_embedding(t.double(), 64, dtype=torch.float64).dtype == torch.float64

    def test_large_and_endless_times(self) -> None:
        t = torch.tensor([-1e6, 123456.0, float("inf"), float("nan")])
        y = timestep_embedding(t, 16)
        with ops.use("reference"):
            expected = timestep_embedding(t, 16)
        torch.testing.assert_close(y[:2, [0, 8]], expected[:2, [0, 8]])  # the frequency is 1 there: the phase is exact
        assert y[2:].isnan().all()

    def test_contracts_and_compiling(self) -> None:
        t = torch.rand(5, requires_grad=True)
        torch.library.opcheck(timestep_op.library_op, (t, 9, True, 1.0, 1.0, 1e4, torch.float32))
        torch.library.opcheck(backward_op.library_op, (torch.randn(5, 9), t.detach(), True, 1.0, 1.0, 1e4))
        for dynamic in (False, True):
            compiled_equals_eager(lambda t: timestep_embedding(t * 1, 12), torch.rand(5) * 100, dynamic=dynamic)

    def test_errors_name_the_argument(self) -> None:
        t = torch.rand(3)
        for match, given in (
            ("dim is 1", {"dim": 1}),
            ("downscale_freq_shift is 2", {"dim": 4, "downscale_freq_shift": 2.0}),
            ("max_period is 0", {"dim": 4, "max_period": 0.0}),
            ("dtype is", {"dim": 4, "dtype": torch.int8}),
        ):
            with pytest.raises(ConfigError, match=match):
                timestep_embedding(t, **given)  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match="timesteps is bool"):
            timestep_embedding(t > 0, 4)


class TestPatches:
    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("batch", [0, 1, 3])
    def test_equals_a_convolution(self, batch: int, dtype: torch.dtype) -> None:
        shapes = {"video": (batch, 5, 4, 6, 9), "weight": (7, 5, 2, 3, 1), "bias": (7,)}
        inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}

        def eager(video: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            with ops.use("reference"):
                return patch_embed3d(video, weight, bias)

        hold(patch_embed3d, eager, inputs, [torch.randn(batch, 36, 7, dtype=torch.float64)], dtype)

    @pytest.mark.parametrize("channels", ["first", "last"])
    @pytest.mark.parametrize("batch", [0, 1, 3])
    def test_goes_back(self, channels: Any, batch: int) -> None:
        grid, patch = (2, 3, 2), (2, 1, 3)
        video = torch.randn(batch, 4, 4, 3, 6)
        tokens = patch_embed3d(video, torch.eye(24).view(24, 4, *patch))
        if channels == "last":
            tokens = tokens.unflatten(-1, (4, 6)).transpose(-1, -2).flatten(-2)
        found = unpatch_embed3d(tokens, grid, patch, channels=channels)
        assert torch.equal(found, video)
        assert found.is_contiguous()
        weight, bias = torch.randn(24, 24), torch.randn(24)
        whole = unpatch_embed3d(tokens, grid, patch, weight, bias, channels=channels)
        assert torch.equal(whole, unpatch_embed3d(functional.linear(tokens, weight, bias), grid, patch, channels=channels))

    def test_shares_no_memory(self) -> None:
        tokens = torch.randn(2, 1, 6)
        assert unpatch_embed3d(tokens, (1, 1, 1), (1, 2, 3), channels="first").data_ptr() != tokens.data_ptr()

    def test_autocast_and_compiling(self) -> None:
        video, weight = torch.randn(2, 3, 4, 4, 4), torch.randn(8, 3, 2, 2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            assert patch_embed3d(video, weight).dtype == torch.bfloat16
        compiled_equals_eager(
            lambda v, w: unpatch_embed3d(patch_embed3d(v, w), (2, 2, 2), (1, 2, 4)), video, weight, dynamic=False
        )

    def test_errors_name_the_argument(self) -> None:
        video, weight = torch.randn(1, 3, 4, 4, 4), torch.randn(8, 3, 2, 2, 2)
        for match, given in (
            ("video is", (video[0], weight)),
            ("weight is", (video, weight[:, :2])),
            ("do not fill", (video[..., :3], weight)),
            ("bias is", (video, weight, torch.randn(7))),
        ):
            with pytest.raises(ShapeError, match=match):
                patch_embed3d(*given)
        tokens = torch.randn(1, 8, 6)
        for match, more in (
            ("tokens is", ((2, 2, 3), (1, 2, 3))),
            ("tokens is", ((2, 2, 2), (1, 2, 2))),
            ("weight is", ((2, 2, 2), (1, 2, 3), torch.randn(6, 5))),
            ("bias is", ((2, 2, 2), (1, 2, 3), None, torch.randn(6))),
        ):
            with pytest.raises(ShapeError, match=match):
                unpatch_embed3d(tokens, *more)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="channels"):
            unpatch_embed3d(tokens, (2, 2, 2), (1, 2, 3), channels="middle")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="patch is"):
            unpatch_embed3d(tokens, (2, 2, 2), (0, 2, 3))
