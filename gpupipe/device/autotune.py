"""Which way to launch a kernel: candidates, ranked by a model of the machine, the best few timed, the winner kept on disk.

``GPUPIPE_AUTOTUNE`` says how much: ``full`` (the default) times what the model ranks highest, ``cached`` takes an earlier run's
winner and else the model's first choice, ``off`` always the model's first choice. Nothing is timed on the CPU, while a CUDA
graph is being captured, or where ``torch.use_deterministic_algorithms`` asks for the same bits in every run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupipe.device import disk, jit
from gpupipe.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("gpupipe")

Config = Mapping[str, int]
"""Keyword arguments of a launch: the kernel's constants, ``num_warps``, ``num_stages``."""

TIMED = 6
"""Candidates that are timed, of those that the model ranks highest."""
_ROUNDS = 5
_LONG_US = 10_000
"""A call that takes as long is timed once: the differences that matter show."""
_CLOSE = 1.03
"""The model's first choice stays unless another is faster by more: noise should not decide."""
_SPIN_CYCLES = 10_000_000
"""How long the GPU waits before it is timed, so that it does not wait for the host between two launches: some 5 ms."""
_FLUSH_BYTES = 256 << 20
"""More than any L2 holds: written between two timings, so that inputs come from memory as they do in a training step."""
_VERSION = 1
"""Raise it when what a stored winner means has changed."""

_chosen: dict[tuple[Any, ...], Config] = {}
_recalled: dict[str, Config] = {}
"""What :func:`recall` was told, by the name of the winner's file."""
_tuning = threading.Lock()
_notes: _Notes | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model needs to know of a GPU."""

    name: str
    sms: int
    warps: int = 64
    """Warps that an SM can hold."""
    registers: int = 65536
    shared_bytes: int = 227 << 10
    bytes_per_us: float = 4.25e6
    """Reads and writes together, as a device copy reaches; the ranking hardly depends on it."""
    cycles_per_us: float = 1700.0
    latency_us: float = 0.8
    """From asking for a line of memory to having it, under load."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was tried for one kernel and one kind of inputs: candidates as the model ranks them, and microseconds of each.

    A candidate that does not compile or fit has ``inf``; one that was only compiled, 0.
    """

    op: str
    key: tuple[Any, ...]
    candidates: list[Config]
    us: list[float]

    def best(self, of: int | None = None) -> int:
        """Place of the fastest of all, or of the first so many."""
        return min(range(len(self.us[:of])), key=self.us.__getitem__)


@dataclass(slots=True)
class _Notes:
    most: int
    timed: bool
    choices: list[Choice]


@contextmanager
def noting(most: int, *, timed: bool = True) -> Iterator[list[Choice]]:
    """Within the block, every choice is made anew of up to ``most`` candidates and noted; nothing is read from disk or kept.

    Args:
        most: candidates to try, of those that the model ranks highest.
        timed: False only runs each once, which compiles it.
    """
    global _notes
    before = _notes, dict(_chosen)
    _chosen.clear()
    _notes = _Notes(most, timed, [])
    try:
        yield _notes.choices
    finally:
        _notes = before[0]
        _chosen.clear()
        _chosen.update(before[1])


@functools.cache
def machine(device: torch.device) -> Machine:
    """The GPU of a tensor; for tensors on the CPU, where kernels run interpreted, a Hopper GPU stands in."""
    if device.type != "cuda":
        return Machine("interpreter", 132)
    import torch

    found = torch.cuda.get_device_properties(device)
    return Machine(
        found.name, found.multi_processor_count, found.max_threads_per_multi_processor // 32,
        shared_bytes=getattr(found, "shared_memory_per_multiprocessor", 228 << 10) - 1024,
    )  # fmt: skip


def resident(gpu: Machine, warps: int, registers: int, shared_bytes: int = 0) -> int:
    """Programs that an SM holds at once."""
    return min(
        gpu.warps // warps,
        gpu.registers // (min(registers, 255) * 32 * warps),
        gpu.shared_bytes // shared_bytes if shared_bytes else gpu.warps,
        32,
    )


def issue_us(gpu: Machine, *, instructions: float, warps: int) -> float:
    """Microseconds to issue so many instructions of warps: the more ``warps`` an SM holds, the more often one can go on."""
    return instructions / (gpu.sms * gpu.cycles_per_us * min(3.0, 0.13 * max(warps, 1)))


def overlapped_us(one: float, other: float) -> float:
    """Time of two kinds of work that hide behind each other, as well as kernels manage that."""
    return max(one, other) + 0.3 * min(one, other)


def streaming_us(
    gpu: Machine, *, total_bytes: float, programs: int, tile_bytes: float, warps: int, registers: int, shared_bytes: int = 0
) -> float:
    """Time that a kernel which streams through memory should take, in microseconds.

    Bandwidth is reached when enough bytes are under way (Little's law); programs that do not fill a whole wave leave SMs idle.

    Args:
        programs: in the grid; of a persistent kernel, those that stay.
        tile_bytes: what one program has under way at a time.
        registers: of a thread. Beyond 255 they spill, which is ranked last.
    """
    held = resident(gpu, warps, registers, shared_bytes)
    if held == 0:
        return math.inf
    slots = gpu.sms * held
    waves = programs / slots
    idle = math.ceil(waves) / waves if waves > 1 else min(slots, gpu.sms) / min(programs, gpu.sms)
    under_way = tile_bytes * min(held, max(1.0, programs / gpu.sms))
    needed = gpu.bytes_per_us * gpu.latency_us / gpu.sms
    spill = 4.0 if registers > 255 else 1.0
    return total_bytes / gpu.bytes_per_us * max(1.0, needed / under_way) * (1 + (idle - 1) * 0.5) * spill


def unlike(candidates: Sequence[dict[str, int]], programs: Callable[[Config], int]) -> list[dict[str, int]]:
    """Candidates of a persistent kernel without those that come to the same launch: ``PER_SM`` may be more than enough."""
    found: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for config in candidates:
        found.setdefault(tuple({**config, "PER_SM": programs(config)}.items()), config)
    return list(found.values())


def choose(
    op: str,
    key: tuple[Any, ...],
    device: torch.device,
    candidates: Callable[[], Sequence[Config]],
    cost: Callable[[Config], float],
    run: Callable[[Config], object],
) -> Config:
    """The way to launch a kernel for inputs like these.

    Args:
        op: the kernel's name.
        key: all that the best choice may depend on, sizes in buckets; plain numbers, strings and truth values.
        candidates: makes the list; called when nothing is known yet.
        cost: estimated microseconds of a candidate.
        run: launches a candidate; what it writes is written again by the launch that follows.

    Raises:
        ConfigError: for an unknown ``GPUPIPE_AUTOTUNE``.
    """
    found = _chosen.get((op, key, device))
    return found if found is not None else _choose(op, key, device, candidates, cost, run)


def _choose(
    op: str,
    key: tuple[Any, ...],
    device: torch.device,
    candidates: Callable[[], Sequence[Config]],
    cost: Callable[[Config], float],
    run: Callable[[Config], object],
) -> Config:
    mode = os.environ.get("GPUPIPE_AUTOTUNE", "full")
    if mode not in ("off", "cached", "full"):
        raise ConfigError(f"GPUPIPE_AUTOTUNE is {mode!r}", fix="set it to off, cached or full")
    import torch

    ranked = sorted(candidates(), key=cost)
    if device.type != "cuda" or mode == "off":
        _chosen[op, key, device] = ranked[0]
        return ranked[0]
    if torch.are_deterministic_algorithms_enabled():
        return ranked[0]
    with _tuning, torch.cuda.device(device):
        if (found := _chosen.get((op, key, device))) is not None:
            return found
        if _notes is not None:
            tried = ranked[: _notes.most]
            choice = Choice(op, key, tried, _times(op, key, tried, run, timed=_notes.timed)[0])
            _notes.choices.append(choice)
            _chosen[op, key, device] = tried[choice.best()]
            return tried[choice.best()]
        name = _file_name(op, key, device)
        stored = _stored(name, ranked)
        if stored is None and mode == "full" and len(ranked) > 1:
            if torch.cuda.is_current_stream_capturing():
                return ranked[0]  # not kept: a later call may time
            stored, certain = _fastest(op, key, ranked[:TIMED], run)
            if certain:
                record = json.dumps({"key": [op, *key], "winner": dict(stored)})
                disk.write(disk.cache_dir() / disk.LAUNCHES / name, record.encode())
        winner = stored if stored is not None else ranked[0]
        _chosen[op, key, device] = winner
        return winner


def _file_name(op: str, key: tuple[Any, ...], device: torch.device) -> str:
    import torch

    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = [torch.__version__, torch.version.cuda, cudnn, jit.triton.__version__]
    parts = [_VERSION, op, *key, machine(device).name, *versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32] + ".json"


def _stored(name: str, candidates: Sequence[Config]) -> Config | None:
    """An earlier winner, if it is of the candidates' kind; a damaged file is as good as none.

    It need not be one of them: which are worth a try depends on sizes that a key has in buckets.
    """
    winner: Any = _recalled.get(name)
    if winner is None:
        try:
            winner = json.loads((disk.cache_dir() / disk.LAUNCHES / name).read_bytes())["winner"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
    kind = dict.fromkeys(candidates[0], int)
    return winner if isinstance(winner, dict) and {name: type(value) for name, value in winner.items()} == kind else None


def recorded() -> dict[str, Config]:
    """How this process launches its kernels, as plain data, for a checkpoint: another process may sum in another order."""
    return _recalled | {
        _file_name(*question): dict(winner) for question, winner in _chosen.items() if question[2].type == "cuda"
    }


def recall(record: Mapping[str, Config]) -> None:
    """Makes kernels not launched yet be launched as :func:`recorded` says; what is of another GPU or version is not used."""
    _recalled.update(record)


class DoesNotFit(Exception):
    """A candidate cannot serve these inputs: raised by what is timed."""


def _fastest(
    op: str, key: tuple[Any, ...], candidates: Sequence[Config], run: Callable[[Config], object]
) -> tuple[Config, bool]:
    """Times each candidate with inputs out of L2; one that does not compile or fit is left out.

    Returns:
        The winner, and whether a later process should go by it: not if memory was too short to try them all.
    """
    times, certain = _times(op, key, candidates, run)
    best = min(range(len(times)), key=times.__getitem__)
    if math.isinf(times[best]):
        return candidates[0], False  # and the launch itself says what is wrong
    if times[0] <= _CLOSE * times[best]:
        best = 0
    log.info("tuned %s %s: %s, %.1f us", op, key, dict(candidates[best]), times[best])
    return candidates[best], certain


def _times(
    op: str, key: tuple[Any, ...], candidates: Sequence[Config], run: Callable[[Config], object], *, timed: bool = True
) -> tuple[list[float], bool]:
    """Microseconds of each candidate, ``inf`` for one that does not compile or fit; and whether memory was enough for all."""
    import torch

    times: list[float] = []
    certain = True
    for number, candidate in enumerate(candidates):
        _tell(f"gpupipe: tuning {op} {key}: {number + 1} of {len(candidates)}")
        try:
            if timed:
                times.append(cold_us(lambda candidate=candidate: run(candidate)))  # type: ignore[misc]
            else:
                run(candidate)
                times.append(0.0)
        except Exception as error:
            if not _does_not_fit(error):
                raise
            certain = certain and not isinstance(error, torch.cuda.OutOfMemoryError)
            log.debug("candidate %s of %s does not fit: %s", dict(candidate), op, error)
            times.append(math.inf)
    _tell("")
    return times, certain


def _does_not_fit(error: Exception) -> bool:
    import torch

    named = type(error).__name__ in ("OutOfResources", "CompilationError", "PTXASError")
    return named or isinstance(error, DoesNotFit | torch.cuda.OutOfMemoryError)


def cold_us(run: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median GPU time of a call in microseconds, its inputs flushed out of L2 before each."""
    import torch

    run()  # compiles
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def timed(rounds: int) -> list[float]:
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        spans = []
        for _ in range(rounds):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            spans.append((begin, end))
        spans[-1][1].synchronize()  # this stream's work alone: another may wait for what this process is yet to send
        return [1e3 * begin.elapsed_time(end) for begin, end in spans]

    (first,) = timed(1)
    return first if first > _LONG_US else statistics.median(timed(rounds))


def _tell(text: str) -> None:
    """A line that the next one overwrites, where a person looks on."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text[:120]}")
        sys.stderr.flush()
