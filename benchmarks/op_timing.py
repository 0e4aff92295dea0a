"""How long a call takes on the GPU, and on the host, forward and backward apart, and what it keeps for its backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
COLD_BYTES = 256 << 20
"""Inputs that a graph goes through before it comes back to the first: five times the L2 cache of an H200."""
MOST_SETS = 64
CALLS = 50
"""Calls in a row whose time with launches is taken …"""
CALLS_SECONDS = 0.1
"""… or as many as take so long: what is slower takes no launches' time."""


def timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clone(inputs: Inputs) -> Inputs:
    """The same values in memory of their own, with the same strides."""
    copies = {}
    for name, value in inputs.items():
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copies[name] = copy.copy_(value.detach()).requires_grad_(value.requires_grad)
    return copies


def copies_for(inputs: Inputs) -> int:
    """How many sets of inputs it takes for none to be in L2 when its turn comes again."""
    held = sum(value.nbytes for value in inputs.values())
    return max(1, min(MOST_SETS, -(-COLD_BYTES // max(1, held))))


def outputs_of(made: Any) -> list[torch.Tensor]:
    return list(made) if isinstance(made, tuple | list) else [made]


class Timing:
    """One subject on one case: its calls on several sets of inputs, outputs and gradients of outputs."""

    def __init__(self, function: Callable[..., Any], inputs: Inputs, sets: int) -> None:
        self._function = function
        self._sets = [clone(inputs) for _ in range(sets)]
        self._device = next(iter(inputs.values())).device
        self._grads: list[torch.Tensor] | None = None

    def _wanted(self, values: Inputs) -> list[torch.Tensor]:
        return [value for value in values.values() if value.requires_grad]

    def forward(self) -> list[Callable[[], Any]]:
        """One call a set of inputs, that keeps what a backward would need."""
        return [partial(self._function, **values) for values in self._sets]

    def backward(self) -> list[Callable[[], Any]]:
        """The same for the gradients of every input; the forward calls are made here, and held."""
        calls: list[Callable[[], Any]] = []
        for values in self._sets:
            made = outputs_of(self._function(**values))
            if self._grads is None:
                self._grads = [torch.randn_like(out) for out in made]
            grads = [grad.clone() for grad in self._grads]
            wanted = self._wanted(values)
            calls.append(partial(torch.autograd.grad, made, wanted, grads, retain_graph=True))
        return calls

    def graph_us(self, make: Callable[[], Sequence[Callable[[], Any]]], rounds: int) -> list[float]:
        """GPU microseconds a call, by replaying a CUDA graph of one call a set of inputs."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls = make()  # a backward runs on the stream of its forward: that must be the one that is captured
            for _ in range(2):
                for call in calls:
                    call()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                kept = [call() for call in calls]
            times = []
            for _ in range(rounds + 1):
                begin, end = timer(), timer()
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / len(calls))
        torch.cuda.current_stream().wait_stream(side)
        del kept
        return times[1:]

    def call_us(self, make: Callable[[], Sequence[Callable[[], Any]]], rounds: int) -> list[float]:
        """Microseconds a call in a row of calls, launches included: the slower of host and GPU."""
        call = make()[0]
        for _ in range(2 if self._device.type == "cuda" else 0):
            call()
        self._wait()
        begin = time.perf_counter()
        call()
        self._wait()
        seconds = time.perf_counter() - begin
        calls = max(1, min(CALLS, int(CALLS_SECONDS / seconds))) if self._device.type == "cuda" else 1
        times = []
        for _ in range(rounds):
            self._wait()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self._wait()
            times.append((time.perf_counter() - begin) * 1e6 / calls)
        return times

    def saved_mb(self) -> float:
        """Megabytes that a forward call leaves allocated, beyond its inputs and outputs."""
        values = self._sets[0]
        self._function(**values)
        self._wait()
        before = torch.cuda.memory_allocated(self._device)
        made = outputs_of(self._function(**values))
        self._wait()
        own = sum(out.untyped_storage().nbytes() for out in {out.untyped_storage().data_ptr(): out for out in made}.values())
        return max(0, torch.cuda.memory_allocated(self._device) - before - own) / 1e6

    def results(self) -> list[torch.Tensor]:
        """Outputs and gradients of the first set, for a fixed loss."""
        values = self._sets[0]
        made = outputs_of(self._function(**values))
        generator = torch.Generator(device=self._device).manual_seed(1)
        grads = [torch.randn(out.shape, generator=generator, device=self._device).to(out.dtype) for out in made]
        return [out.detach() for out in made] + list(torch.autograd.grad(made, self._wanted(values), grads))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def copy_bytes_a_us(device: torch.device) -> list[float]:
    """Bytes a microsecond that a device copy moves, read and write together."""
    source = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(6):
        begin, end = timer(), timer()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * source.nbytes / (begin.elapsed_time(end) * 1e3))
    return rates[1:]
