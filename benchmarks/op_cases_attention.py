"""Queries and keys, and attention along time, in space and over all: the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from op_case import OpCase, Subject, random
from op_timing import Inputs
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpupipe import ops

Grid = tuple[int, int, int]
Layout = Literal["interleaved", "half"]
BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def parted(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """One dimension as several: a view."""
    made: torch.Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return made


def tables(grid: Grid, dim: int, layout: Layout, device: torch.device) -> ops.Rope:
    """Rotary tables with a quarter of the pairs for time and the rest shared by rows and columns, all even."""
    across = (dim * 3 // 8) // 2 * 2
    return ops.Rope.of(grid, (dim - 2 * across, across, across), layout=layout, device=device)


def full_tables(rope: ops.Rope, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as cosines and sines (tokens, pairs), as models keep them."""
    frames, rows, columns = grid
    place = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).to(rope.table.device)
    total = sum(length * pairs for length, pairs in zip(rope.lengths, rope.pairs, strict=True))
    found = []
    for start in (0, total):
        parts = []
        for axis, (length, pairs) in enumerate(zip(rope.lengths, rope.pairs, strict=True)):
            parts.append(rope.table[start : start + length * pairs].view(length, pairs)[place[:, axis]])
            start += length * pairs
        found.append(torch.cat(parts, 1))
    return found[0], found[1]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> torch.Tensor:
    """x (B, N, heads, dim) turned as models do it: in float32, and back to its type."""
    wide = x.float()
    cos, sin = cos[:, None], sin[:, None]
    if layout == "half":
        one, other = wide.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)
    one, other = parted(wide, -1, (-1, 2)).unbind(-1)
    return torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2).to(x.dtype)


def packed(tokens: int, heads: int, dim: int) -> Callable[[torch.device], Inputs]:
    def inputs(device: torch.device) -> Inputs:
        weights = {name: random(device, dim) for name in ("q_weight", "k_weight")}
        return {"qkv": random(device, 1, tokens, 3, heads, dim), **weights}

    return inputs


def alone(tokens: int, heads: int, dim: int) -> Callable[[torch.device], Inputs]:
    return lambda device: {"qkv": random(device, 1, tokens, 3, heads, dim)}


class _Tables:
    """Tables by device, made once: they are no part of a call."""

    def __init__(self, grid: Grid, dim: int, layout: Layout) -> None:
        self._of = grid, dim, layout
        self._made: dict[torch.device, tuple[ops.Rope, torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[ops.Rope, torch.Tensor, torch.Tensor]:
        if device not in self._made:
            grid, dim, layout = self._of
            rope = tables(grid, dim, layout, device)
            self._made[device] = (rope, *full_tables(rope, grid))
        return self._made[device]


def turn_case(grid: Grid, heads: int, dim: int, layout: Layout) -> OpCase:
    """QK norm and rotary embedding on packed QKV."""
    tokens = grid[0] * grid[1] * grid[2]
    known = _Tables(grid, dim, layout)

    def own(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope, _, _ = known.on(qkv.device)
        return ops.qk_norm_rope(qkv, q_weight, k_weight, rope, grid=grid)[:2]

    def eager(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, cos, sin = known.on(qkv.device)
        q, k, _ = qkv.unbind(2)
        q, k = (functional.rms_norm(x, (dim,), w, 1e-6) for x, w in ((q, q_weight), (k, k_weight)))
        return turned(q, cos, sin, layout), turned(k, cos, sin, layout)

    once = 2.0 * tokens * heads * dim
    name = f"qk_norm_rope_{layout}-n{tokens}-h{heads * dim}-bf16"
    return OpCase(name, "attention", packed(tokens, heads, dim), own, eager, 4 * once, 6 * once)


def _along(qkv: torch.Tensor, grid: Grid, backend: SDPBackend | None) -> torch.Tensor:
    """torch's attention along time on strided views: (B, N, heads, dim)."""
    frames, pixels = grid[0], grid[1] * grid[2]
    q, k, v = (parted(x, 1, (frames, pixels)).permute(0, 2, 3, 1, 4).flatten(0, 1) for x in qkv.unbind(2))
    if backend is None:
        made = functional.scaled_dot_product_attention(q, k, v)
    else:
        with sdpa_kernel(backend):
            made = functional.scaled_dot_product_attention(q, k, v)
    return parted(made, 0, (qkv.shape[0], pixels)).permute(0, 3, 1, 2, 4).flatten(1, 2)


def temporal_case(grid: Grid, heads: int, dim: int, *, fused: bool) -> OpCase:
    """Attention along time; ``fused``: with norm and rotary embedding before it."""
    tokens = grid[0] * grid[1] * grid[2]
    known = _Tables(grid, dim, "half")
    once = 2.0 * tokens * heads * dim
    shape = f"l{grid[0]}-n{tokens}-h{heads * dim}-bf16"
    if not fused:
        backends: dict[str, Callable[[], Subject]] = {
            name: lambda backend=backend: lambda qkv: _along(qkv, grid, backend)  # type: ignore[misc]
            for name, backend in BACKENDS.items()
        }
        return OpCase(
            f"temporal_attention-{shape}", "attention", alone(tokens, heads, dim),
            lambda qkv: ops.temporal_attention(qkv, grid=grid), lambda qkv: _along(qkv, grid, None),
            4 * once, 7 * once, backends, compiled=(),
        )  # fmt: skip

    def own(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> Any:
        rope, _, _ = known.on(qkv.device)
        return ops.temporal_attention(qkv, q_weight, k_weight, rope, grid=grid, norm="head")

    def eager(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
        _, cos, sin = known.on(qkv.device)
        q, k, v = qkv.unbind(2)
        q, k = (functional.rms_norm(x, (dim,), w, 1e-6) for x, w in ((q, q_weight), (k, k_weight)))
        return _along(torch.stack([turned(q, cos, sin, "half"), turned(k, cos, sin, "half"), v], 2), grid, None)

    return OpCase(
        f"temporal_attention_fused-{shape}", "attention", packed(tokens, heads, dim), own, eager, 4 * once, 7 * once,
        compiled=("compile",),
    )  # fmt: skip


def spatial_case(grid: Grid, heads: int, dim: int, axis: Literal["spatial", "full"]) -> OpCase:
    """Long attention, where the work is torch's."""
    tokens = grid[0] * grid[1] * grid[2]
    batch = grid[0] if axis == "spatial" else 1

    def sdpa(qkv: torch.Tensor, backend: SDPBackend | None) -> torch.Tensor:
        q, k, v = (parted(x, 1, (batch, -1)).flatten(0, 1).transpose(1, 2) for x in qkv.unbind(2))
        if backend is None:
            made = functional.scaled_dot_product_attention(q, k, v)
        else:
            with sdpa_kernel(backend):
                made = functional.scaled_dot_product_attention(q, k, v)
        return parted(made.transpose(1, 2), 0, (1, batch)).flatten(1, 2)

    once = 2.0 * tokens * heads * dim
    backends: dict[str, Callable[[], Subject]] = {
        name: lambda backend=backend: lambda qkv: sdpa(qkv, backend)  # type: ignore[misc]
        for name, backend in BACKENDS.items()
        if name != "sdpa-efficient"
    }
    return OpCase(
        f"attention_{axis}-n{tokens}-h{heads * dim}-bf16", "attention", alone(tokens, heads, dim),
        lambda qkv: ops.attention(qkv, grid=grid, axis=axis), lambda qkv: sdpa(qkv, None),
        4 * once, 7 * once, backends, compiled=(),
    )  # fmt: skip


def attention_cases() -> list[OpCase]:
    grid = (32, 32, 32)
    cases = [turn_case(grid, heads, 128, layout) for heads in (24, 16) for layout in ("interleaved", "half")]  # type: ignore[misc]
    for frames, rows in ((32, 32), (16, 64), (8, 128)):
        cases += [temporal_case((frames, rows, 32), 24, 128, fused=fused) for fused in (False, True)]
    return [*cases, spatial_case(grid, 24, 128, "spatial"), spatial_case(grid, 24, 128, "full")]


def tiny_attention_cases() -> list[OpCase]:
    grid = (2, 2, 3)
    return [
        turn_case(grid, 2, 16, "interleaved"), turn_case(grid, 2, 16, "half"), temporal_case(grid, 2, 16, fused=False),
        temporal_case(grid, 2, 16, fused=True), spatial_case(grid, 2, 16, "spatial"), spatial_case(grid, 2, 16, "full"),
    ]  # fmt: skip
