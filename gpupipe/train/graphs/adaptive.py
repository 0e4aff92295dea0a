"""Which calls are captured as CUDA graphs, and when: those that come again and again."""

from __future__ import annotations

import copy
import linecache
import math
import os
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch

from gpupipe.device.inventory import resolve_device
from gpupipe.errors import ConfigError, GraphError
from gpupipe.telemetry import log
from gpupipe.train.arguments import a_device, a_function, several, whole
from gpupipe.train.forwards import Standing, forward_of
from gpupipe.train.graphs.gradients import Gradients, check_optimizer
from gpupipe.train.graphs.graphed import Graphed, Pending
from gpupipe.train.graphs.pace import LOOK_AGAIN, LOOKS, Clock, DeviceClock, Pace, shown
from gpupipe.train.graphs.recorder import CudaRecorder, NotCaptured, Recorder
from gpupipe.train.graphs.report import GraphReport
from gpupipe.train.graphs.segments import in_segments
from gpupipe.train.graphs.signature import Inside, Opaque, apart, surroundings, together, unfit

RETRY = ("GPUPIPE_GRAPH_RETRY", "TELETRON_GRAPH_RETRY")
THRESHOLD = ("GPUPIPE_GRAPH_THRESHOLD", "TELETRON_GRAPH_THRESHOLD")
_JUDGED_AFTER = 50
"""Calls after the warm-up before the hit rate says anything."""
_REMEMBERED = 1024
"""Kinds of calls; beyond that those without a graph are forgotten."""
_TOLD = 32
"""Failures that are told, of different kinds."""
_paused: list[None] = []
"""Not empty while :func:`paused`."""
_SPOILT = "previous error during capture"
"""What CUDA says in a capture that is spoilt already: by another thread, where nothing said so before. Waiting for the whole
device does it."""
_SPOILT_TIMES = 8
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PATIENCE = 4
"""Times ``capture_frequency`` calls that smaller shapes wait for the largest one to come again."""
_WAYS = 8
"""In which a kind of call finds gradients or an optimizer's numbers, after which it is told that they change too often."""
_LOOKS = 3
"""Calls of each kind by which a function shows what it does to gradients: it is seen to clear them once there are some."""


@dataclass
class _Seen:
    """A kind of call."""

    size_bytes: int
    times: int = 0
    failed: int = 0
    spoilt: int = 0
    """Captures that came to nothing for what another thread did."""
    next_try: int = 0
    """Its own count of calls from which on it may be tried again."""
    graphed: Graphed | None = None
    pace: Pace = field(default_factory=Pace)
    gpu_bound: str | None = None
    """Why a graph would gain nothing, if so."""
    looks: int = 0  # that found so


class AdaptiveGraph:
    """Calls a training step, or a module, by CUDA graphs where calls repeat, and as it is where they do not::

        model = AdaptiveGraph(model)                    # forward and backward; the optimizer runs as it is
        step = AdaptiveGraph(step, optimizers=[optimizer])   # the whole step

        with AdaptiveGraph(model).installed():          # model itself, so that names and checkpoints stay
            train(model)

    It watches calls by their signature: shapes, strides and types of tensors, other arguments by value, gradients, autocast and
    training mode. After ``warmup_steps`` calls, a kind of call that has come ``capture_frequency`` times is captured, the
    largest first, so that the smaller ones fit into its memory. Inputs are copied into memory of the graph, outputs and
    gradients out of it: all of them are yours to keep. Until the backward of a replayed forward has run, other calls run as
    they are.

    A graph saves the host its launches and keeps memory for itself: where the GPU is the bottleneck it gains nothing. So,
    unless ``capture`` is ``always``, the last calls before a capture are measured on the host and on the GPU. A kind of call
    that takes the GPU over 1.5 times as long as the host takes to launch it, by the least times of three, or that each time
    finds and leaves the GPU 2 ms behind, runs as it is; the log, at level info, and :meth:`report` tell both times. After 10,
    100 and then each 1000 more it is looked at again. Of a module it is the forward that is measured: in a backward the GPU
    has more to do still.

    What cannot be captured (a value that the host must see, such as ``.item()``) is named in the log and in :meth:`report`, and
    runs as it is. With ``segments`` a module is then cut at such places by TorchDynamo, and the parts are captured.

    A captured call does on the host nothing of what the function does: no counters, no hooks of modules, no printing, and it
    keeps numbers that modules hold as attributes. Parameters are read where they lie: ``optimizer.step()`` and
    ``load_state_dict`` change them in place; where they are put elsewhere, the call is another kind and captured anew. Dropout
    of torch and of gpupipe draws anew at each replay. A step captured whole finds gradients as it did when it was captured
    (none, or in the same memory), or clears them first; otherwise it runs as it is. What it leaves of them is a copy, yours to
    keep.

    A copy of a module with graphs installed, and one read from a file, has its own ``forward`` again and no graphs.

    Args:
        target: a module, or a function that does a whole step with its backward and optimizer. What a step returns has no
            gradient.
        warmup_steps: calls before the first capture.
        capture_frequency: how often a kind of call must have come.
        max_graphs: kinds of calls that are captured, at most.
        optimizers: those that a step runs: they must be capturable.
        capture: ``auto``: kinds of calls of which the host is the bottleneck; ``always``: all.
        segments: cut a module that cannot be captured whole: ``auto``, or not at all.
        device: default the current CUDA device; on the CPU everything runs as it is.
        recorder: makes what records; for tests.
        clock: the host's time and the GPU's; for tests. Without one, ``auto`` is ``always`` where there is no GPU.

    ``GPUPIPE_GRAPH_RETRY`` (default 1) is how often a failed kind of call is tried again, ``GPUPIPE_GRAPH_THRESHOLD`` (default
    0.2) the hit rate under which all is given up, with ``TT_ERR_GRAPH`` in the log.

    Raises:
        ConfigError: for arguments of the wrong kind, numbers below 1, optimizers that cannot be captured,
            DistributedDataParallel itself, or a wrong environment variable.
        DeviceError: for a device that is not there.
    """

    def __init__(
        self,
        target: torch.nn.Module | Callable[..., Any],
        *,
        warmup_steps: int = 100,
        capture_frequency: int = 5,
        max_graphs: int = 8,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        capture: Literal["auto", "always"] = "auto",
        segments: Literal["auto", "off"] = "auto",
        device: torch.device | str | None = None,
        recorder: Callable[[], Recorder] | None = None,
        clock: Clock | None = None,
    ) -> None:
        whole(capture_frequency, "capture_frequency", 1)
        whole(max_graphs, "max_graphs", 1)
        whole(warmup_steps, "warmup_steps", 0)
        a_function(target, "target", "does a step, or a module")
        if isinstance(target, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "DistributedDataParallel as a whole cannot be captured: replays would not average gradients",
                fix="capture the module in it: AdaptiveGraph(model.module).installed()",
            )
        for name, value, known in (("segments", segments, ("auto", "off")), ("capture", capture, ("auto", "always"))):
            if value not in known:
                raise ConfigError(f"{name}={value!r}", fix=f"choose {known[0]!r} or {known[1]!r}")
        for optimizer in several(optimizers, "optimizers", "a list of optimizers, as optimizers=[optimizer]"):
            check_optimizer(optimizer)
        self.target = target
        self._module = target if isinstance(target, torch.nn.Module) else None
        self._function: Callable[..., Any] = target
        self._warmup, self._frequency, self._most = warmup_steps, capture_frequency, max_graphs
        self._retries = int(_from_environment(RETRY, 1, lowest=0))
        self._threshold = _from_environment(THRESHOLD, 0.2, lowest=0)
        self._may_cut = segments == "auto" and self._module is not None
        self._device = resolve_device("auto" if device is None else str(a_device(device)))
        self._options: dict[str, Any] = {
            "warmup_steps": warmup_steps, "capture_frequency": capture_frequency, "max_graphs": max_graphs,
            "capture": capture, "segments": segments, "device": self._device, "recorder": recorder, "clock": clock,
        }  # fmt: skip
        if recorder is None and self._device.type == "cuda":
            recorder, clock = partial(CudaRecorder, self._device), clock or DeviceClock(self._device)
        self._clock = clock if capture == "auto" else None
        self._new_recorder = recorder
        self._recorder = recorder() if recorder is not None else None
        self._pending = Pending()
        self._inside: Callable[[], int] = Inside(self._module) if self._module is not None else int
        self._gradients = Gradients(optimizers) if self._module is None else None
        self._looked: Counter[Hashable] = Counter()
        """Calls of a function that were looked on at, by all but the gradients that they found."""
        self._found: Counter[Hashable] = Counter()
        """In how many ways they found gradients."""
        self._seen: dict[Hashable, _Seen] = {}
        self._cut: tuple[Callable[..., Any], list[AdaptiveGraph]] | None = None
        self._calls = self._hits = self._late_calls = self._late_hits = self._launches = self._held_up = 0
        self._late_left = self._told = 0
        """Calls that were left as they are for the GPU is the bottleneck, and kinds of them that were told."""
        self._failures: dict[str, None] = {}
        self._given_up: str | None = None if self._recorder is not None else f"there are no graphs on {self._device}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given_up is not None or torch.compiler.is_compiling() or self._in_a_capture():
            return self._plainly(*args, **kwargs)
        self._calls += 1
        late = self._calls > self._warmup
        self._late_calls += late
        if self._cut is not None:
            return self._in_segments(late, *args, **kwargs)
        if _paused or torch.is_inference_mode_enabled():
            return self._plainly(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        try:
            structure = apart((args, kwargs), tensors)
        except Opaque as what:
            self._fail(f"{what} among the arguments, which a graph cannot follow")
            return self._plainly(*args, **kwargs)
        if (reason := unfit(tensors, self._device)) is not None:
            self._fail(reason)
            return self._plainly(*args, **kwargs)
        kind = (structure, surroundings(self._device))
        signature = (kind, self._inside() if self._gradients is None else self._gradients.state(kind))
        seen = self._seen.get(signature)
        if seen is None:
            seen = self._new_kind(kind, signature, sum(tensor.nbytes for tensor in tensors))
        seen.times += 1
        if self._pending.count:
            self._held_up += seen.graphed is not None
            return self._plainly(*args, **kwargs)
        if seen.graphed is None and late and self._is_due(kind, seen) and self._gains(seen, tensors):
            self._capture(kind, seen, args, kwargs)
        if self._cut is not None:
            return self._in_segments(late, *args, **kwargs)
        if seen.graphed is None:
            self._late_left += late and seen.gpu_bound is not None
            self._judge()
            with self._measured(seen):
                return self._looked_on_at(kind, args, kwargs)
        if not seen.graphed.fits(tensors):
            self._fail("an argument that is written to shares memory with another one")
            return self._plainly(*args, **kwargs)
        self._hits += 1
        self._late_hits += late
        self._launches += seen.graphed.launches
        return seen.graphed(tensors)

    def _new_kind(self, kind: Hashable, signature: Hashable, size_bytes: int) -> _Seen:
        if len(self._seen) >= _REMEMBERED:
            self._seen = {key: each for key, each in self._seen.items() if each.graphed is not None}
            self._looked.clear()
            self._found.clear()
        if self._gradients is not None:
            self._found[kind] += 1
            if self._found[kind] == _WAYS:
                self._fail(
                    "the gradients or the optimizer's numbers that it finds change from call to call: clear gradients in the"
                    " step, or by zero_grad(set_to_none=False), and give lr=torch.tensor(…)"
                )
        seen = self._seen[signature] = _Seen(size_bytes)
        return seen

    def _looked_on_at(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call as it is; the first ones of a function show what it does to gradients."""
        if self._gradients is None or self._looked[kind] >= _LOOKS:
            return self._plainly(*args, **kwargs)
        self._looked[kind] += 1
        with self._gradients.observed(kind):
            return self._plainly(*args, **kwargs)

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        made = self._function(*args, **kwargs)
        return made if self._module is not None else _without_gradient(made)

    def _in_a_capture(self) -> bool:
        """Whether this call is a part of something else that is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _in_segments(self, late: bool, /, *args: Any, **kwargs: Any) -> Any:
        """A call in parts; a hit when each of them was replayed."""
        assert self._cut is not None
        function, parts = self._cut
        calls, hits = sum(part._calls for part in parts), sum(part._hits for part in parts)
        made = function(*args, **kwargs)
        calls, hits = sum(part._calls for part in parts) - calls, sum(part._hits for part in parts) - hits
        whole = 0 < calls == hits
        self._hits += whole
        self._late_hits += whole and late
        return made

    def _is_due(self, kind: Hashable, seen: _Seen) -> bool:
        if self._gradients is not None and not self._looked[kind]:
            return False
        if seen.times < max(self._frequency, seen.next_try) or seen.failed > self._retries:
            return False
        if seen.times == 1 and self._device.type == "cuda":
            return False  # libraries and kernels get ready in a first call, which no capture allows
        if self._is_full():
            return False
        others = [each for each in self._seen.values() if each.gpu_bound is None]
        often = [seen, *(each for each in others if each.times >= self._frequency and each.failed <= self._retries)]
        largest = max(often, key=lambda each: each.size_bytes)
        waited = seen.times - self._frequency
        return seen is largest or largest.graphed is not None or waited >= _PATIENCE * self._frequency

    def _is_full(self) -> bool:
        return sum(each.graphed is not None for each in self._seen.values()) >= self._most

    def _measured(self, seen: _Seen) -> AbstractContextManager[None]:
        """Round a call that runs as it is: measures it where it is among the last ones before it may be captured."""
        near = self._calls + LOOKS > self._warmup and seen.times + LOOKS >= max(self._frequency, seen.next_try)
        if self._clock is None or not near or seen.times == 1 or seen.failed > self._retries or self._is_full():
            return nullcontext()
        return seen.pace.measured(self._clock)

    def _gains(self, seen: _Seen, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a graph would gain anything, as far as that is known by now."""
        if self._clock is None:
            return True
        if not seen.pace.known():
            return False
        times, before = seen.pace.gpu_bound(), seen.gpu_bound
        seen.gpu_bound = None if times is None else f"{shown(tensors)}: {times}"
        if times is None:
            return True
        seen.next_try = seen.times + LOOK_AGAIN[min(seen.looks, len(LOOK_AGAIN) - 1)]
        seen.looks += 1
        self._told += before is None
        if before is None and self._told <= _TOLD:
            log.info("a call runs as it is, for a graph would gain nothing (capture='always' makes one): %s", seen.gpu_bound)
        return False

    def _capture(self, kind: Hashable, seen: _Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._recorder is not None
        wanted = self._module is not None and torch.is_grad_enabled()
        try:
            seen.graphed = Graphed(
                self._recorder, self._function, (args, kwargs), self._module, self._pending, with_backward=wanted,
                observed=None if self._gradients is None else self._gradients.observed(kind),
            )  # fmt: skip
        except NotCaptured as error:
            seen.next_try = seen.times + self._frequency
            if _SPOILT in str(error) and seen.spoilt < _SPOILT_TIMES:
                seen.spoilt += 1
                return
            seen.failed += 1
            self._fail(_place(error.__cause__ or error))
            if self._may_cut and seen.failed > self._retries:
                self._cut = in_segments(self._function, self._like_this)
                log.warning("it is cut at such places, and what lies between them is captured")

    def _fail(self, what: str) -> None:
        """Tells once what was not captured."""
        if what not in self._failures and len(self._failures) < _TOLD:
            self._failures[what] = None
            log.warning("[%s] a call was not captured as a graph: %s", GraphError.code, what)

    def _like_this(self, function: Callable[..., Any]) -> AdaptiveGraph:
        """For a segment: with a pool of its own, for its forward is followed by those of others before its backward."""
        made = AdaptiveGraph(
            _Segment(function), warmup_steps=0, capture_frequency=self._frequency, max_graphs=self._most,
            capture="always", segments="off", device=self._device, recorder=self._new_recorder,
        )  # fmt: skip
        return made

    def _judge(self) -> None:
        """Gives up for good where too few calls are hits."""
        calls = self._late_calls - self._late_left
        if calls < _JUDGED_AFTER + self._frequency * _PATIENCE or self._cut is not None:
            return
        rate = self._late_hits / calls
        if rate < self._threshold:
            self._given_up = (
                f"{100 * rate:.0f} % of {calls} calls could be replayed, under {100 * self._threshold:.0f} % ({THRESHOLD[0]})"
            )
            log.warning("[%s] graphs are given up: %s; everything runs as it is", GraphError.code, self._given_up)
            self.release()

    def report(self) -> GraphReport:
        """What has been done so far."""
        parts = self._cut[1] if self._cut is not None else []
        reports = [part.report() for part in parts]
        return GraphReport(
            calls=self._calls,
            hits=self._hits,
            hit_rate=self._late_hits / self._late_calls if self._late_calls else 0.0,
            graphs=sum(each.graphed is not None for each in self._seen.values()) + sum(each.graphs for each in reports),
            segments=sum(each.graphs > 0 for each in reports),
            signatures=len(self._seen),
            pool_bytes=sum(each.pool_bytes for each in reports) + (self._recorder.pool_bytes if self._recorder else 0),
            launches_saved=self._launches + sum(each.launches_saved for each in reports),
            failures=tuple(self._failures),
            gpu_bound=tuple(each.gpu_bound for each in self._seen.values() if each.gpu_bound is not None)[:_TOLD],
            held_up=self._held_up,
            given_up=self._given_up,
        )

    def release(self) -> None:
        """Drops all graphs and their memory; calls are watched anew."""
        self._seen.clear()
        self._cut = None
        if self._recorder is not None:
            self._recorder.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptiveGraph:
        """The same for a copy of the target; it has no graphs yet."""
        return AdaptiveGraph(copy.deepcopy(self.target, memo), **self._options)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "an AdaptiveGraph cannot be saved: its graphs are of this process",
            fix="save its module, or the state_dict() of that",
        )

    def installed(self) -> Installed:
        """For a ``with`` block: the module itself is called by graphs, under its own name, hooks and wrappers included.

        Raises:
            ConfigError: when the target is no module, or has these graphs installed already.
        """
        if self._module is None:
            raise ConfigError("only a module can have graphs installed", fix="call the AdaptiveGraph in the place of the step")
        if self._function is not self.target:
            raise ConfigError("these graphs are installed already", fix="call installed() once, or remove() them first")
        return Installed(self, self._module)


@contextmanager
def paused() -> Iterator[None]:
    """All calls run as they are for the time of the block, in all threads: so that hooks of modules see them."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


class Installed:
    """Graphs in the place of a module's ``forward``, until :meth:`remove` or the end of a ``with`` block."""

    def __init__(self, graph: AdaptiveGraph, module: torch.nn.Module) -> None:
        self.graph = graph
        graph._function = forward_of(module)
        self._replaced = Standing(module, graph)

    def remove(self) -> None:
        """Gives the module its own ``forward`` back, and leaves what else stands in its place; may be called again."""
        if self._replaced.undone:
            return
        self._replaced.undo()
        self.graph._function = self.graph.target

    def __enter__(self) -> AdaptiveGraph:
        return self.graph

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class _Segment(torch.nn.Module):
    """A part between two cuts, as a module; its parameters come as inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def _from_environment(names: Sequence[str], default: float, *, lowest: float) -> float:
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not lowest <= value < math.inf:
                raise ConfigError(
                    f"{name}={text!r} is no finite number from {lowest:g} on", fix=f"unset {name}, or give it one"
                )
            return value
    return default


def _without_gradient(made: Any) -> Any:
    """What a step returns: a loss that its caller keeps would keep the step's whole graph, and in it autograd's nodes of the
    parameters, which lead out of a later capture."""
    found: list[torch.Tensor] = []
    try:
        apart(made, found)
    except Opaque:
        return made
    if not any(each.requires_grad for each in found):
        return made
    return together(made, iter([each.detach() for each in found]))


def _place(error: BaseException) -> str:
    """Where an error came from, in the user's own code, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if not frame.filename.startswith(_TORCH) and not _is_ours(frame.filename)]
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not inside:
        return said
    frame = inside[-1]
    line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}: {line} ({said})"


def _is_ours(path: str) -> bool:
    return os.path.dirname(os.path.abspath(path)) == os.path.dirname(os.path.abspath(__file__))
