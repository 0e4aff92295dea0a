"""The largest batch whose step fits a budget of memory: measured at small sizes, worked out, and tried."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from gpupipe.device.inventory import resolve_device
from gpupipe.device.usage import ran_out, usage
from gpupipe.errors import ConfigError, DeviceMemoryError
from gpupipe.telemetry import log
from gpupipe.train.arguments import a_budget, a_function
from gpupipe.train.arguments import whole as whole_number
from gpupipe.train.memory.tensors import LiveBytes, python_tensors, storages
from gpupipe.train.recomputing import Policy, recompute

Unit = Literal["max_tokens", "micro_size", "size", "max_gib"]
_TRIES = 12
"""Proposals that are tried, at most: each is worked out from all that was measured before."""
_STEP_UP = 4
"""How much larger than the best size the next one is, at most: memory may grow faster than a straight line says, and that of
the CPU has no end at which a step fails cleanly."""
_STILL_FLAT = 64
"""How many times the largest size given may be tried without a byte more than the first took."""
_NEAR = 0.02
"""Share of a size by which another must be larger to be worth a try."""


@dataclass(frozen=True)
class Probe:
    """One step that was run.

    Attributes:
        size: of its batch, in the units of the caller.
        peak_bytes: the most that was in tensors meanwhile, all that was there before included; None where memory ran out.
        seconds: of the step.
    """

    size: int
    peak_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class BatchPlan:
    """The largest batch that fits, under one policy of recomputing.

    Attributes:
        size: of the batch, in the units of the caller.
        policy: how the model's blocks are run, see :func:`gpupipe.train.recompute`.
        peak_bytes: the most that its step took, as measured.
        budget_bytes: what it may take.
        fixed_bytes: what a step takes whatever its batch, by the straight line through what was measured.
        unit_bytes: what each unit adds.
        probes: all steps that were measured, in order.
        others: plans of other policies that were looked at.
    """

    size: int
    policy: Policy
    peak_bytes: int
    budget_bytes: int
    fixed_bytes: int
    unit_bytes: float
    probes: tuple[Probe, ...]
    others: tuple[BatchPlan, ...] = ()

    def for_loader(self, unit: Unit = "max_tokens", *, bytes_each: int | None = None) -> dict[str, float | int]:
        """Fields of the loader's ``batch``: ``VideoLoader(videos, batch={"size": 64, **plan.for_loader("max_tokens")})``.

        Args:
            unit: what the sizes count: tokens of a batch or clips of a part or of a batch. ``max_gib``: the same as memory of
                the loader's batch, which ``bytes_each`` makes of it.
            bytes_each: with ``max_gib``: bytes of ``video`` or ``tokens`` for each unit.

        Raises:
            ConfigError: for an unknown unit, or ``max_gib`` without ``bytes_each``.
        """
        if unit not in get_args(Unit):
            raise ConfigError(f"unit={unit!r} is no field of batch", fix=f"choose one of {', '.join(get_args(Unit))}")
        if unit != "max_gib":
            return {unit: self.size}
        if not bytes_each:
            raise ConfigError(
                "max_gib is memory of the loader's batch", fix="give bytes_each, those of one unit's pixels in it"
            )
        return {"max_gib": self.size * bytes_each / 2**30}

    def __str__(self) -> str:
        text = (
            f"{self.size} with recompute={self.policy!r}: {self.peak_bytes / 1e9:.3f} of {self.budget_bytes / 1e9:.3f} GB, "
            f"{self.fixed_bytes / 1e9:.3f} fixed and {self.unit_bytes / 1e6:.4g} MB each"
        )
        return "\n".join([text, *(f"  not: {other}" for other in self.others)])


Measure = Callable[[Callable[[int], object], int], Probe]
"""Runs a step of a size and says what it took."""


def largest_batch(
    step: Callable[[int], object],
    sizes: Sequence[int],
    *,
    budget: float | str | None = None,
    model: torch.nn.Module | None = None,
    policies: Sequence[Policy] = ("none",),
    blocks: Sequence[torch.nn.Module] | None = None,
    multiple: int = 1,
    most: int | None = None,
    margin: float = 0.1,
    zero_grad: Callable[[], object] | None = None,
    device: torch.device | str = "auto",
) -> BatchPlan:
    """The largest batch whose step fits a budget of memory.

    The step is run at a few small sizes, which tells what it takes whatever its batch and what each unit adds; the size that
    this leaves room for is tried, and the next is worked out from what that took. What is returned has been run, and within the
    budget. On a GPU the figures are those of torch's allocator, and a step that runs out of memory counts as one that does not
    fit; on the CPU those of the tensors that live meanwhile.

    Args:
        step: forward and backward of a batch of a size, with random pixels as a rule; what it returns is let go. Run the
            optimizer once before, so that what it holds is there. A size is any number that memory follows: tokens, or clips of
            one shape.
        sizes: two or more small ones to begin with, ascending. Three tell whether memory follows them.
        budget: GB (10^9 bytes), or an amount with its unit such as ``"60GB"``, for all that is in tensors, model and optimizer
            included. None: what the device has for this process, less ``margin``.
        model, policies: of recomputing, the cheapest first, to choose from: the first with which ``most`` fits, else the one
            with the largest batch. The model's blocks are left as they were: put the plan's policy on by ``recompute``.
        blocks: of ``model``, as for ``recompute``; default the modules of its lists of like ones.
        multiple: sizes are multiples of this: tokens of a clip, say.
        most: a larger size is of no use; what is over a multiple is left out.
        margin: share, 0 to 1, of the device's memory that is left for what changes from step to step, and fragmentation;
            without a budget.
        zero_grad: called behind each step: the optimizer's. Gradients that stay are counted as what they are.

    Raises:
        ConfigError: for sizes, budgets or policies that do not go together, and, without ``most``, for a step whose memory does
            not follow its size.
        DeviceMemoryError: when not even the first size fits.
    """
    place = resolve_device(str(device))
    most = _check(step, sizes, multiple, margin, most, model, policies, blocks)
    bytes_in_all = a_budget(budget, "budget") if budget is not None else int((1 - margin) * usage(place).reachable)
    checked = False

    def clean(size: int) -> object:
        nonlocal checked
        try:
            if checked:
                return step(size)
            checked = True
            with _with_backward():
                return step(size)
        finally:
            if zero_grad is not None:
                zero_grad()

    measure = _on_cuda(place) if place.type == "cuda" else _on_cpu(place)
    plans: list[BatchPlan] = []
    for policy in policies:
        # a model without blocks has nothing to be made again, which is all that "none" asks
        with recompute(model, policy, blocks=blocks) if model is not None and list(policies) != ["none"] else nullcontext():
            plan = fitted(clean, sizes, bytes_in_all, measure, policy=policy, multiple=multiple, most=most)
        if plan is not None:
            log.info("%s", plan)
            plans.append(plan)
            if plan.size == most:
                break
    if not plans:
        raise DeviceMemoryError(
            f"not even a batch of {sizes[0]} fits {bytes_in_all / 1e9:.3f} GB",
            fix="begin with a smaller size, or use a larger budget, another policy of recomputing, or a smaller model",
        )
    best = max(plans, key=lambda plan: plan.size)  # of like ones the first, which makes least again
    others = tuple(plan for plan in plans if plan is not best)
    return BatchPlan(**{**{name: getattr(best, name) for name in BatchPlan.__dataclass_fields__}, "others": others})


@contextmanager
def _with_backward() -> Iterator[None]:
    """Refuses a step that keeps tensors for a backward and does none: it would seem to fit where it does not."""
    kept = used = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 1
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        used += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    if kept and not used:
        raise ConfigError("step does no backward", fix="have step(size) call loss.backward(): most of its memory is for that")


def fitted(
    step: Callable[[int], object],
    sizes: Sequence[int],
    budget_bytes: int,
    measure: Measure,
    *,
    policy: Policy = "none",
    multiple: int = 1,
    most: int | None = None,
) -> BatchPlan | None:
    """:func:`largest_batch` under one policy; None when the first size does not fit."""
    found = _Search(budget_bytes, multiple, most)
    measure(step, sizes[0])  # the first step makes gradients, and chooses algorithms
    for size in sizes:
        if (most is not None and size > most) or found.too_large is not None:
            break
        found.add(measure(step, size))
    for _ in range(_TRIES):
        proposed = found.next()
        if proposed is None:
            break
        found.add(measure(step, proposed))
        if most is None and found.best >= _STILL_FLAT * sizes[-1] and found.peaks[found.best] <= found.peaks[sizes[0]]:
            raise ConfigError(
                f"a step of {found.best} takes no more memory than one of {sizes[0]}",
                fix="let step(size) run a batch of that size, in the thread that it is called in; or give most",
            )
    if not found.best:
        return None
    fixed, each = found.line()
    return BatchPlan(found.best, policy, found.peaks[found.best], budget_bytes, int(fixed), each, tuple(found.probes))


class _Search:
    """What was measured so far, and what follows from it."""

    def __init__(self, budget: int, multiple: int, most: int | None) -> None:
        self._budget, self._multiple, self._most = budget, multiple, most
        self.probes: list[Probe] = []
        self.peaks: dict[int, int] = {}
        self.best = 0
        """The largest size that fits; 0: none."""
        self.too_large: int | None = None
        """The smallest that does not."""

    def add(self, probe: Probe) -> None:
        self.probes.append(probe)
        if probe.peak_bytes is not None:
            self.peaks[probe.size] = probe.peak_bytes
        if probe.peak_bytes is not None and probe.peak_bytes <= self._budget:
            self.best = max(self.best, probe.size)
        else:
            self.too_large = min(probe.size, self.too_large or probe.size)

    def line(self) -> tuple[float, float]:
        """(bytes at 0, bytes of each unit) through what is known of the best size and of the next, above it if there is one."""
        known = sorted(self.peaks)
        place = known.index(self.best)
        other = known[place + 1] if place + 1 < len(known) else known[max(0, place - 1)]
        if other == self.best:
            return float(self.peaks[other]), 0.0
        each = (self.peaks[other] - self.peaks[self.best]) / (other - self.best)
        return self.peaks[self.best] - each * self.best, each

    def next(self) -> int | None:
        """The size to try next; None where none is worth it."""
        if not self.best:
            return None
        fixed, each = self.line()
        wanted = _STEP_UP * self.best
        if each > 0:
            wanted = min(wanted, int((self._budget - fixed) / each))
        if self.too_large is not None and wanted >= self.too_large:  # less fits than a straight line says
            wanted = math.isqrt(self.best * self.too_large)
        if self._most is not None:
            wanted = min(wanted, self._most)
        wanted = wanted // self._multiple * self._multiple
        gain = wanted - self.best
        return wanted if gain >= max(self._multiple, _NEAR * self.best) or (gain > 0 and wanted == self._most) else None


def _on_cuda(device: torch.device) -> Measure:
    def measure(step: Callable[[int], object], size: int) -> Probe:
        begun = time.perf_counter()
        peak: int | None = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            step(size)
            torch.cuda.synchronize(device)
            peak = int(torch.cuda.max_memory_allocated(device))
        except RuntimeError as error:
            if not ran_out(error):
                raise
            error.__traceback__ = None  # its frames hold the tensors of the step
        seconds = time.perf_counter() - begun
        gc.collect()
        torch.cuda.empty_cache()
        return Probe(size, peak, seconds)

    return measure


def _on_cpu(device: torch.device) -> Measure:
    gc.collect()
    base = sum(storages(python_tensors(device)).values())

    def measure(step: Callable[[int], object], size: int) -> Probe:
        nonlocal base
        begun, done = time.perf_counter(), False
        live = LiveBytes(device)
        try:
            with live:
                step(size)
            done = True
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            error.__traceback__ = None
        probe = Probe(size, base + live.peak if done else None, time.perf_counter() - begun)
        base += live.now  # gradients, say, where they stay
        return probe

    return measure


def _check(
    step: Any,
    sizes: Sequence[int],
    multiple: int,
    margin: float,
    most: int | None,
    model: Any,
    policies: Sequence[Policy],
    blocks: Any,
) -> int | None:
    """``most``, as a multiple."""
    a_function(step, "step", "runs a batch of a size")
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in (*sizes, multiple))
    if len(sizes) < 2 or not whole or list(sizes) != sorted(set(sizes)) or any(size % multiple for size in sizes):
        raise ConfigError(
            f"sizes={list(sizes)} are not two or more whole numbers, ascending, that are multiples of {multiple}",
            fix="give small ones that differ enough to show what each unit takes: sizes=(1, 2, 4)",
        )
    if most is not None:
        whole_number(most, "most", sizes[0])
        most = most // multiple * multiple
    if not 0 <= margin < 1:
        raise ConfigError(f"margin={margin!r} is no share", fix="give a number from 0 to below 1")
    if not policies or (model is None and list(policies) != ["none"]):
        raise ConfigError(f"policies={list(policies)} without a model", fix="give the model whose blocks they are for")
    if blocks is not None and model is None:
        raise ConfigError("blocks without a model", fix="give the model that they are of")
    return most
