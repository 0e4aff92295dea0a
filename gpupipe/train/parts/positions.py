"""Tables of positions: rotary ones made once a grid, outside autograd, with their factors; added ones kept on the device."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from gpupipe.ops.rope import Rope
from gpupipe.train.fused import Fused, Left
from gpupipe.train.parts.probe import attempt, passed, same, takes

_MOST = 16
"""Grids whose tables are kept, for each module."""
_rotary: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Tables]] = weakref.WeakKeyDictionary()
_added: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, torch.Tensor]] = weakref.WeakKeyDictionary()
_captured: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Tables that CUDA graphs read: replays do as long as the module is there, whether or not they are kept for other calls."""


class Tables(tuple[torch.Tensor, ...]):
    """Cosines and sines of all tokens, as the model made them; and as kernels read them.

    Attributes:
        rope: the same, one table an axis; None where they do not come apart so.
        grid: of tokens, that these are for.
    """

    rope: Rope | None
    grid: tuple[int, ...] | None

    def __new__(cls, tables: Iterable[torch.Tensor] = (), rope: Rope | None = None, grid: Any = None) -> Tables:
        made = super().__new__(cls, tables)
        made.rope, made.grid = rope, grid
        return made


register_pytree_node(
    Tables, lambda tables: (list(tables), (tables.rope, tables.grid)), lambda tables, rest: Tables(tables, *rest)
)  # so that whoever copies arguments keeps the factors


def flat(table: torch.Tensor) -> torch.Tensor | None:
    """A table (tokens, dim), (1, tokens, 1, dim) or (1, 1, tokens, dim) as (tokens, dim); None for any other."""
    sizes = [size for size in table.shape[:-1] if size != 1]
    if len(sizes) > 1 or table.shape[-1] % 2:
        return None
    return table.reshape(-1, table.shape[-1])


def rope_of(tables: Any, like: torch.Tensor) -> tuple[Rope, tuple[int, ...] | None] | None:
    """Tables with two columns a pair, one beside the other, as our ops take them, and their grid; None if they are not such."""
    if isinstance(tables, Tables) and tables.rope is not None and tables.rope.table.device == like.device:
        return tables.rope, tables.grid
    if not isinstance(tables, tuple | list) or len(tables) != 2 or not all(isinstance(one, torch.Tensor) for one in tables):
        return None
    cos, sin = flat(tables[0]), flat(tables[1])
    if cos is None or sin is None or cos.shape != sin.shape:
        return None
    return Rope((cos[:, 0::2].to(like.device), sin[:, 1::2].to(like.device))), None


def factors(cos: torch.Tensor, sin: torch.Tensor, grid: tuple[int, int, int]) -> Rope | None:
    """Tables (T * H * W, dim), two columns a pair, as one table an axis; None where a pair turns with several."""
    both = torch.stack((cos[:, 0::2], sin[:, 1::2])).view(2, *grid, -1)
    alike = [(both == both.narrow(axis, 0, 1)).flatten(1, 3).all(1).all(0).tolist() for axis in (1, 2, 3)]
    axes, start, pairs = [], 0, both.shape[-1]
    for axis in range(3):
        others = [alike[other] for other in range(3) if other != axis]
        end = start
        while end < pairs and all(other[end] for other in others):
            end += 1
        own = both.movedim(axis + 1, 1)[:, :, 0, 0, start:end]
        axes.append((own[0], own[1]))
        start = end
    return Rope(*axes) if start == pairs else None


def _read(module: nn.Module, tables: Any, one: torch.Tensor) -> None:
    """Notes that a call reads these tables, of which ``one`` is a tensor."""
    if one.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.setdefault(module, {})[id(tables)] = tables


class FusedRotary(Fused):
    """A module that works out rotary tables from the shape of a video."""

    kind = "rotary"

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        if any(True for _ in module.parameters()) or any(True for _ in module.children()):
            return None
        patch = cls._patch(module)
        if patch is None:
            return None
        if any(buffer.is_meta for buffer in module.buffers()):
            raise Left("its tables have no memory yet: fuse it again when they have")
        grid = (2, 2, 3)
        size = [1, 1, *(tokens * step for tokens, step in zip(grid, patch, strict=True))]
        device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
        first, second = (attempt(module, torch.full(size, value, device=device)) for value in (0.0, 1.0))
        if first is None or second is None or not isinstance(first.result, tuple) or len(first.result) != 2:
            return None
        pairs = list(zip(first.result, second.result, strict=True))
        if not all(isinstance(one, torch.Tensor) and torch.equal(one, other) for one, other in pairs):
            return None
        sides = [flat(one) for one, _ in pairs]
        if sides[0] is None or sides[1] is None or sides[0].shape[0] != 12 or factors(sides[0], sides[1], grid) is None:
            return None
        return {"patch": patch}

    @staticmethod
    def _patch(module: Any) -> tuple[int, int, int] | None:
        patch, time = getattr(module, "patch_size", None), getattr(module, "patch_size_t", None)
        if isinstance(patch, tuple | list) and len(patch) == 3:
            return (int(patch[0]), int(patch[1]), int(patch[2]))
        return (time, patch, patch) if isinstance(patch, int) and isinstance(time, int) else None

    def fused_forward(self, hidden_states: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return NotImplemented
        buffers = tuple((id(one), one.dtype, one._version) for one in self.buffers())
        key = (hidden_states.shape[2:], hidden_states.device, hidden_states.dtype, buffers, torch.is_inference_mode_enabled())
        kept = _rotary.setdefault(self, {})
        if key not in kept:
            with torch.no_grad():
                cos, sin = self.written_forward(hidden_states)
            patch = self.settings["patch"]
            grid = tuple(size // step for size, step in zip(hidden_states.shape[2:], patch, strict=True))
            sides = flat(cos), flat(sin)
            rope = None if sides[0] is None or sides[1] is None else factors(sides[0], sides[1], grid)  # type: ignore[arg-type]
            while len(kept) >= _MOST:
                kept.pop(next(iter(kept)))
            kept[key] = Tables((cos, sin), rope, grid)
        _read(self, kept[key], kept[key][0])
        return kept[key]


class FusedPositions(Fused):
    """Patches and a fixed table of sines, as VideoMAE has them: the table kept on the device, not sent in each step."""

    kind = "positions"
    whole = False
    patch_embeddings: Any
    position_embeddings: torch.Tensor

    @classmethod
    def recognise(cls, module: nn.Module) -> dict[str, Any] | None:
        table = module.__dict__.get("position_embeddings")
        if not isinstance(table, torch.Tensor) or table.requires_grad or table.dim() != 3 or table.is_meta:
            return None
        if not isinstance(getattr(module, "patch_embeddings", None), nn.Module):
            return None
        if not takes(type(module).forward, "pixel_values", "bool_masked_pos") or any(
            True for _ in module.parameters(recurse=False)
        ):
            return None
        x = torch.linspace(-1, 1, table.numel()).view(table.shape).mul(5).sin()
        trial = attempt(module, x, None, without={"patch_embeddings": passed})
        return {} if trial is not None and same(trial.result, x + table.float().cpu()) else None

    def fused_forward(self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor | None = None) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return NotImplemented
        made: torch.Tensor = self.patch_embeddings(pixel_values)
        kept = _added.setdefault(self, {})
        table = self.position_embeddings
        key = (made.device, made.dtype, id(table), table._version, torch.is_inference_mode_enabled())
        if key not in kept:
            kept.clear()
            kept[key] = table.to(made.device, made.dtype, copy=True)
        _read(self, kept[key], kept[key])
        made = made + kept[key]
        return made if bool_masked_pos is None else made[~bool_masked_pos].view(made.shape[0], -1, made.shape[2])
