"""The check of a fused module on first use: each new signature runs both ways, and outputs and gradients are compared.

Both runs work on copies of the arguments, with dropout off, and leave nothing behind: no gradient, no drawn random number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from gpupipe.telemetry import log
from gpupipe.train import statistics

if TYPE_CHECKING:
    from gpupipe.train.fused import Fused, State

BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative errors of outputs, root mean square: some roundings of the type, and sums in another order."""
TF32 = 2e-3
"""In place of that of float32 where products round their factors to TF32."""
ENOUGH = 8
"""Checks that differ in sizes alone, after which further sizes are taken to pass: batches of many shapes train on."""
_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
_MOST = 4096
"""Signatures that a module remembers."""
_GRADIENTS = 4.0
"""Gradients may be this much further off: they are sums over all rows, in which much cancels."""
_SMALL = 0.25
"""A gradient is measured against at least this much of the largest: some are zero but for rounding, as a key's bias."""


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], *, sizes: bool = True) -> Hashable:
    """What two calls have in common for which one check is enough; without ``sizes``, what they have for which eight are."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        tuple([_described(value, sizes) for value in args]),
        tuple([(name, _described(value, sizes)) for name, value in kwargs.items()]) if kwargs else None,
    )


def _described(value: Any, sizes: bool) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape if sizes else value.dim(), value.dtype, value.device, value.requires_grad
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple([_described(one, sizes) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _described(one, sizes)) for name, one in value.items()])
    return value if sizes and isinstance(value, int | float) else type(value).__qualname__


def decide(module: Fused, state: State, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this signature runs fused: the check's verdict, kept for the next call. True unchecked where none can be made."""
    if _watched() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    if len(state.decided) >= _MOST:  # clips of any size: keep what did not pass, which is not to be forgotten
        state.decided = {key: passed for key, passed in state.decided.items() if not passed}
    alike = signature(args, kwargs, sizes=False)
    if state.passed.get(alike, 0) >= ENOUGH:
        state.decided[key] = True
        return True
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():  # a checkpoint's, see _watched
        found = check(module, args, kwargs, state.bound)
    if found.unserved:
        state.unserved.add(key)
    if found.unserved or found.open:
        return True
    state.decided[key] = found.passed
    statistics.checked[0] += 1
    if found.passed:
        state.passed[alike] = state.passed.get(alike, 0) + 1
        statistics.checked[1] = max(statistics.checked[1], found.worst)
    else:
        log.warning(
            "%s (%s) runs as written for %s: %s", state.name or "the model", module.kind, shown(args, kwargs), found.said
        )  # fmt: skip
    return found.passed


def _watched() -> bool:
    """True where tensors are not what they seem, or somebody counts the ops. Selective checkpoints do neither: they keep what
    ops return, which a check's are not to be among."""
    modes = _get_current_dispatch_mode_stack()
    return torch._C._are_functorch_transforms_active() or any(type(mode) not in _CHECKPOINTS for mode in modes)


def shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Arguments as a message names them."""
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves) or "no tensors"


@dataclass
class Verdict:
    """What a check found.

    Attributes:
        passed: within bounds.
        worst: the largest error, in parts of what is allowed.
        said: what was wrong.
        open: nothing can be said: as written it gives values that are not finite.
        unserved: the fused way does not serve the call.
    """

    passed: bool
    worst: float = 0.0
    said: str = ""
    open: bool = False
    unserved: bool = False


def check(module: Fused, args: tuple[Any, ...], kwargs: dict[str, Any], bound: float | None = None) -> Verdict:
    """Runs a fused module both ways on copies of these arguments, and compares outputs and gradients."""
    with _quiet(module), statistics.apart(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        failed: Exception | None = None
        try:
            made = _run(module, module.fused_forward, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the fused way may stumble over what it likes, as long as the way as written works
            made, failed = None, error
        if made is None and failed is None:
            return Verdict(True, unserved=True)
        expected = _run(module, module.written_forward, args, kwargs)
    if made is None or expected is None:
        return Verdict(False, said=f"{type(failed).__name__}: {failed}")
    return compared(made, expected, bound, _narrowest(module, args, kwargs))


def compared(made: Run, expected: Run, bound: float | None, narrowest: torch.dtype) -> Verdict:
    """Two runs, held against each other."""
    allowed = bound or _bound(narrowest, made)
    if made.shape != expected.shape:
        return Verdict(False, said=f"it gives {made.shape}, and {expected.shape} as written")
    if not all(bool(value.isfinite().all()) for value in (*expected.outputs, *expected.gradients.values())):
        return Verdict(True, open=True)
    worst = Verdict(True)
    sizes = [float(value.float().square().mean().sqrt()) for value in expected.gradients.values() if value.numel()]
    least = _SMALL * max(sizes, default=0.0)
    pairs = [
        (f"output {number}", one, other, allowed, 0.0)
        for number, (one, other) in enumerate(zip(made.outputs, expected.outputs, strict=True))
    ]
    for name, other in expected.gradients.items():
        pairs.append((f"the gradient of {name}", made.gradients[name], other, allowed * _GRADIENTS, least))
    for what, one, other, most, floor in pairs:
        found = relative_error(one, other, floor)
        if not found <= most:
            return Verdict(False, found / most, f"{what} is off by {found:.1e} of its size, where {most:.1e} is allowed")
        worst.worst = max(worst.worst, found / most)
    return worst


def relative_error(made: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Root mean square of the difference, in parts of that of what is expected, or of ``least`` if that is more."""
    if made.numel() == 0:
        return 0.0
    wide = torch.promote_types(torch.promote_types(made.dtype, expected.dtype), torch.float32)
    off = (made.to(wide) - expected.to(wide)).square().mean().sqrt()
    size = expected.to(wide).square().mean().sqrt().clamp(min=max(least, torch.finfo(wide).tiny))
    return float(off / size)


@dataclass
class Run:
    """What one run gave: floating outputs, gradients by name, and what the outputs look like."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    shape: str


def _run(
    module: torch.nn.Module, way: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Run | None:  # fmt: skip
    """One way on copies of the arguments; None where it does not serve them."""
    args, kwargs = tree_map(_copy, (args, kwargs))
    result = way(*args, **kwargs)
    if result is NotImplemented:
        return None
    leaves = tree_flatten(result)[0]
    shape = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    gradients = {}
    if torch.is_grad_enabled():
        wanted = {
            f"argument {number}": leaf
            for number, leaf in enumerate(tree_flatten((args, kwargs))[0])
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        wanted |= {name: value for name, value in module.named_parameters() if value.requires_grad}
        differentiable = [value for value in outputs if value.requires_grad]
        if wanted and differentiable:
            cotangents = [_cotangent(value) for value in differentiable]
            found = torch.autograd.grad(differentiable, list(wanted.values()), cotangents, allow_unused=True)
            zeros = zip(wanted.items(), found, strict=True)
            gradients = {name: torch.zeros_like(leaf) if value is None else value for (name, leaf), value in zeros}
    return Run([value.detach() for value in outputs], gradients, shape)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _cotangent(value: torch.Tensor) -> torch.Tensor:
    """Fixed values of no pattern, which take nothing from torch's generators."""
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    return (steps * 12.9898).sin().mul(43758.5453).frac().to(value.dtype).view(value.shape)


def _narrowest(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The floating type of the fewest digits among arguments, parameters and autocast's."""
    found = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    found += list(module.parameters())
    types = [value.dtype for value in found if value.dtype in BOUNDS]
    kind = found[0].device.type if found else "cpu"
    if torch.is_autocast_enabled(kind):
        types.append(torch.get_autocast_dtype(kind))
    return max(types, key=lambda dtype: BOUNDS.get(dtype, 0.0), default=torch.float32)


def _bound(narrowest: torch.dtype, run: Run) -> float:
    tf32 = torch.get_float32_matmul_precision() != "highest" and any(value.is_cuda for value in run.outputs)
    return TF32 if narrowest == torch.float32 and tf32 else BOUNDS.get(narrowest, BOUNDS[torch.bfloat16])


@contextmanager
def _quiet(module: torch.nn.Module) -> Iterator[None]:
    """All within in evaluation mode: no dropout, no running statistics."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
