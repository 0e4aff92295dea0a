"""Activations made again in the backward instead of kept: by a fixed policy, or as a budget of memory asks for.

What is made again is a block of a model, the unit that repeats (a transformer's layer). Three ways to run one:

- ``none``: all that its backward needs is kept;
- ``elementwise``: results of products, convolutions and attention are kept, what lies between them is made again (selective
  activation checkpointing, Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 5);
- ``block``: only its inputs are kept (Chen et al., 2016, https://arxiv.org/abs/1604.06174).

Fuse a model first: fused ops keep little, so that less has to be made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gpupipe.config.ranges import gigabytes
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.train.arguments import a_budget, a_function, a_model, several, shown
from gpupipe.train.forwards import Replaced, forward_of, replaced

Policy = Literal["none", "elementwise", "block"]
_NO_BACKWARD = "have step do a forward and return its loss, without backward"
_RUNS = 3
"""Times that a block is run in each way, the first of which only warms up."""
_HEAVY = (
    "mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "convolution", "linear", "einsum", "_grouped_mm",
    "linear_act", "norm_linear", "mlp",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What a call of a block keeps for its backward, and how long both take."""

    kept_bytes: int
    seconds: float
    passing_bytes: int = 0
    """What it takes beyond that at its own peak, in the backward as a rule; 0 where nobody counts."""
    calls: int = 1
    """Of a block in a step, each of which keeps so much."""


@dataclass(frozen=True)
class Choice:
    """How one block is run."""

    name: str
    policy: Policy
    costs: dict[Policy, Cost]
    """Of each policy, where they were measured."""


class _MadeAgain(Replaced):
    """A block's ``forward`` under a policy."""


class Recompute:
    """A policy on blocks of a model, until :meth:`remove` or the end of a ``with`` block. Names and checkpoints stay.

    Attributes:
        choices: how each block is run.
        peak_bytes: the most memory that a step is expected to take, of a budget's plan; None of a fixed policy.
    """

    def __init__(self, blocks: dict[str, torch.nn.Module], choices: Sequence[Choice], peak_bytes: int | None) -> None:
        self.choices = tuple(choices)
        self.peak_bytes = peak_bytes
        self._replaced = [
            _MadeAgain(blocks[choice.name], partial(_again, forward_of(blocks[choice.name]), choice.policy, _Draws()))
            for choice in choices
            if choice.policy != "none"
        ]

    def remove(self) -> None:
        """Gives all blocks their own ``forward`` back, and leaves what else stands in its place; may be called again."""
        for each in self._replaced:
            each.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def __str__(self) -> str:
        counts = {policy: sum(choice.policy == policy for choice in self.choices) for policy in get_args(Policy)}
        text = ", ".join(f"{count} {policy}" for policy, count in counts.items() if count)
        if self.peak_bytes is not None:
            text += f"; about {_amounts(self.peak_bytes)[0]} at the peak"
        return f"{len(self.choices)} blocks: {text}"


def recompute(
    model: torch.nn.Module,
    policy: Policy | float | str,
    *,
    step: Callable[[], torch.Tensor] | None = None,
    blocks: Sequence[torch.nn.Module] | None = None,
) -> Recompute:
    """Has blocks of a model make their activations again in the backward.

    Args:
        policy: for all blocks; or a budget in GB (10^9 bytes), or with its unit such as ``"60GB"``, of device memory for the
            whole step, model, gradients and what the optimizer holds by now included, so plan behind its first step: then each
            block is timed in each way, and as few as possible are run in the slower ones.
        step: with a budget: a forward of the largest batch to come, which returns the loss and does no backward, unlike that of
            :func:`gpupipe.train.largest_batch`. It is run once, and changes nothing but what a forward changes.
        blocks: default the modules of the model's lists of like ones (``torch.nn.ModuleList``), the outermost.

    Raises:
        ConfigError: for arguments of the wrong kind, an unknown policy, a budget without ``step``, a step with a backward, a
            model without blocks, blocks of another model, or such as are made again already.
        DeviceMemoryError: when the budget is too small even with every block made again.
    """
    named = _named(a_model(model), None if blocks is None else _modules(model, blocks))
    if policy in get_args(Policy):
        return Recompute(named, [Choice(name, cast(Policy, policy), {}) for name in named], None)
    if isinstance(policy, str) and isinstance(gigabytes(policy), str):
        raise ConfigError(
            f"recompute={policy!r}", fix="choose 'none', 'elementwise', 'block', or a budget in GB such as 60.0 or '60GB'"
        )
    budget = a_budget(policy, "recompute")
    if step is not None:
        a_function(step, "step", "does a forward of the largest batch and returns its loss")
    else:
        raise ConfigError(
            "a budget needs a step to measure", fix="give step=lambda: loss_of(model, batch), with the largest batch"
        )
    return _planned(model, named, budget, step)


def _modules(model: torch.nn.Module, blocks: Any) -> list[torch.nn.Module]:
    found = [a_model(block, "one of blocks") for block in several(blocks, "blocks", "a list of the modules that repeat")]
    inside = {id(module) for module in model.modules()}
    for place, block in enumerate(found):
        if id(block) not in inside:
            raise ConfigError(
                f"blocks[{place}], a {type(block).__name__}, is no module of the {type(model).__name__}",
                fix="name modules of the model itself, not of a copy or of another one",
            )
    return found


def _named(model: torch.nn.Module, blocks: Sequence[torch.nn.Module] | None) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
    chosen = None if blocks is None else {id(block) for block in blocks}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if inside:
            continue
        if chosen is not None:
            if id(module) in chosen:
                found[name] = module
        elif isinstance(module, torch.nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            known = {id(block) for block in found.values()}
            found |= {
                f"{name}.{number}" if name else number: child
                for number, child in module.named_children()
                if id(child) not in known
            }
    for name, block in found.items():
        if any(isinstance(each, _MadeAgain) for each in replaced(block)):
            raise ConfigError(f"{name or 'the model'} is made again already", fix="remove() the plan that says so first")
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no list of like modules", fix="name them: blocks=[…], the modules that repeat"
        )
    return found


@dataclass
class _Draws:
    """Whether a block draws random numbers on the GPU, which it must draw again; None: it has not run yet."""

    known: bool | None = None


def _again(forward: Callable[..., Any], policy: Policy, draws: _Draws, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts: dict[str, Any] = {}
    if policy == "elementwise":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps)
    bound = partial(forward, **kwargs)  # some have the names of checkpoint's own
    run = partial(checkpoint, bound, *args, use_reentrant=False, **contexts)
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return run()
    if torch.cuda.is_current_stream_capturing():  # where a generator's state cannot be read
        return run(preserve_rng_state=draws.known is not False)
    before = _drawn()
    made = run()
    draws.known = draws.known or _drawn() != before
    return made


def _drawn() -> int:
    """A number that rises with what is drawn on the current GPU."""
    return int(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())


def _keeps(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_heavy(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_heavy(op: Any) -> bool:
    """Products, convolutions and attention: what takes longer to make again than to keep."""
    name = op._schema.name.rsplit("::", 1)[-1] if hasattr(op, "_schema") else str(op)
    return name in _HEAVY or "attention" in name


def _planned(
    model: torch.nn.Module, blocks: dict[str, torch.nn.Module], budget: int, step: Callable[[], torch.Tensor]
) -> Recompute:
    base = _base_bytes(model)  # now: what is called below is held till it has been measured
    calls, kept_in_all = _observed(blocks, step)
    costs = _measured(blocks, calls)
    rest = max(0, kept_in_all - sum(_in_all(cost["none"]) for cost in costs.values()))
    policies: dict[str, Policy] = dict.fromkeys(costs, "none")

    def peak() -> int:
        """Everything kept, and what passes: the largest block that is being made again at the time, say."""
        chosen = [costs[name][policy] for name, policy in policies.items()]
        again = [costs[name]["none"].kept_bytes for name, policy in policies.items() if policy != "none"]
        passing = max([each.passing_bytes for each in chosen] + again, default=0)
        return base + rest + sum(map(_in_all, chosen)) + passing

    while peak() > budget:
        moves = [
            (_price(costs[name][policies[name]], cost), name, policy)
            for name, each in costs.items()
            for policy, cost in each.items()
            if cost.kept_bytes < each[policies[name]].kept_bytes
        ]
        if not moves:
            given, taken = _amounts(budget, peak())
            raise DeviceMemoryError(
                f"{given} is too small a budget: with all blocks made again a step takes {taken}",
                fix="use a smaller batch, a larger budget, or smaller blocks",
            )
        _, name, policy = min(moves, key=lambda move: move[0])
        policies[name] = policy
    choices = [Choice(name, policies.get(name, "none"), costs.get(name, {})) for name in blocks]
    return Recompute(blocks, choices, peak())


def _in_all(cost: Cost) -> int:
    """What all calls of a block keep."""
    return cost.calls * cost.kept_bytes


def _amounts(*sizes: int) -> list[str]:
    """Bytes as a message tells them, unlike ones by unlike figures."""
    for digits in range(2, 10):
        told = [f"{size / 1e9:.{digits}f} GB" if size >= 1e9 else f"{size / 1e6:.{digits}f} MB" for size in sizes]
        if len(set(told)) == len(set(sizes)):
            break
    return told


def _price(now: Cost, then: Cost) -> float:
    """Seconds for each byte that is no longer kept."""
    return max(0.0, then.seconds - now.seconds) / (now.kept_bytes - then.kept_bytes)


def _base_bytes(model: torch.nn.Module) -> int:
    """What is held before a forward, and gradients where there are none yet."""
    parameters = list(model.parameters())
    missing = sum(each.nbytes for each in parameters if each.requires_grad and each.grad is None)
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device)) + missing
    held = sum(each.nbytes for each in [*parameters, *model.buffers()])
    return held + sum(each.grad.nbytes for each in parameters if each.grad is not None) + missing


@dataclass
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    """Of each kind of device: its type, and whether it holds."""
    times: int = 0
    """How often it came."""

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """As it was."""
        with ExitStack() as stack:
            for device, dtype, enabled in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            yield


def _autocasts() -> tuple[tuple[str, torch.dtype, bool], ...]:
    return tuple((each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in ("cpu", "cuda"))


def _observed(blocks: dict[str, torch.nn.Module], step: Callable[[], torch.Tensor]) -> tuple[dict[str, _Call], int]:
    """(what each block was called with first, in a forward, and how often; bytes that this forward kept)."""
    calls: dict[str, _Call] = {}

    def keep(name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in calls:
            # not the graph that they are the ends of
            calls[name] = _Call(tree_map(_own, args), tree_map(_own, kwargs), _autocasts())
        calls[name].times += 1

    hooks = [block.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, block in blocks.items()]
    try:
        # Nothing is kept in truth: it may be more than there is memory for, which is why a budget is asked for.
        with _kept(counted_only=True) as kept, torch.enable_grad():
            loss = step()
            if not isinstance(loss, torch.Tensor):
                raise ConfigError(f"step returned {shown(loss)}, not the loss", fix=_NO_BACKWARD)
            total = kept()
            del loss
    finally:
        for hook in hooks:
            hook.remove()
    return calls, total


def _measured(blocks: dict[str, torch.nn.Module], calls: dict[str, _Call]) -> dict[str, dict[Policy, Cost]]:
    """Costs of each block that was called; those of one kind, called alike, are measured once."""
    known: dict[Any, dict[Policy, Cost]] = {}
    costs = {}
    for name, call in calls.items():
        block = blocks[name]
        shapes = tuple(
            (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else type(each)
            for each in tree_leaves((call.args, call.kwargs))
        )
        kind = (type(block), tuple(tuple(each.shape) for each in block.parameters()), shapes, call.autocasts)
        if kind not in known:
            known[kind] = {policy: _cost(block, call, policy) for policy in get_args(Policy)}
        costs[name] = {policy: replace(cost, calls=call.times) for policy, cost in known[kind].items()}
    return costs


def _cost(block: torch.nn.Module, call: _Call, policy: Policy) -> Cost:
    """Of one block alone, with its inputs and autocast as they were."""
    forward = block.forward if policy == "none" else partial(_again, forward_of(block), policy, _Draws())
    wanted = [each for each in block.parameters() if each.requires_grad]
    seconds, kept_bytes, passing_bytes = [], 0, 0
    for _ in range(_RUNS):
        args, kwargs = tree_map(_own, call.args), tree_map(_own, call.kwargs)
        device = next((each.device for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)), None)
        _wait(device)
        held = _held_bytes(device)
        begin = time.perf_counter()
        with _kept(policy) as kept, torch.enable_grad(), call.autocast():
            made = [
                each for each in tree_leaves(forward(*args, **kwargs)) if isinstance(each, torch.Tensor) and each.requires_grad
            ]
            kept_bytes = kept()
        sides = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.requires_grad]
        if made:
            torch.autograd.grad(made, [*sides, *wanted], [torch.ones_like(each) for each in made], allow_unused=True)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        if held is not None:
            passing_bytes = max(0, torch.cuda.max_memory_allocated(device) - held - kept_bytes)
        del made
    return Cost(kept_bytes, min(seconds[1:]), passing_bytes)


def _own(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _held_bytes(device: torch.device | None) -> int | None:
    """Memory that is held on a CUDA device, from which on its peak is counted anew."""
    if device is None or device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _kept(policy: Policy = "none", *, counted_only: bool = False) -> Iterator[Callable[[], int]]:
    """Counts the bytes that a forward keeps for its backward, each piece of memory once; parameters are there anyhow.

    Args:
        counted_only: it keeps nothing, and no backward can follow.
    """
    pieces = _Pieces()

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, torch.nn.Parameter):
            pieces.add(tensor)
        return None if counted_only else tensor

    def unpack(tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ConfigError("step does a backward, of a forward that kept nothing", fix=_NO_BACKWARD)
        return tensor

    watch = _Heavy(pieces) if policy == "elementwise" else None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):  # type: ignore[arg-type]
        if watch is None:
            yield pieces.size_bytes
        else:
            with watch:
                yield pieces.size_bytes


class _Pieces:
    """Pieces of memory, each counted once, also when it has gone since and another lies in its place."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        seen = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._found.setdefault(seen.cdata, (seen, storage.nbytes()))

    def size_bytes(self) -> int:
        return sum(size for _, size in self._found.values())


class _Heavy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Results of heavy ops, which selective checkpointing keeps by itself."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pieces = pieces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if _is_heavy(func):
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor):
                    self._pieces.add(each)
        return made
