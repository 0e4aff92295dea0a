"""A watch over what a training loop holds from step to step, which tells growth that lasts and names what grows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpupipe.config.ranges import amount_bytes
from gpupipe.config.training import LeakConfig
from gpupipe.device.inventory import resolve_device
from gpupipe.device.usage import held_bytes, usage
from gpupipe.errors import MemoryLeakError
from gpupipe.telemetry import log
from gpupipe.train.arguments import a_function
from gpupipe.train.memory.tensors import Census, census, holder_of

_SCALES = 8
"""Lengths of windows, each twice the one before: growth that is slow beside what comes and goes shows in the longer ones."""
_SHOWN = 3
"""Kinds of what grew that are named."""
_LOOKED_AT = 12
"""Kinds that are looked at for one that a Python object holds."""
_STILL = 0.5
"""Share of the usual growth of a window that the last one must have: what peters out, as a cache that fills up, is no leak."""


@dataclass(frozen=True)
class Leak:
    """Growth that lasts.

    Attributes:
        step: how many steps the watch had seen.
        grown_bytes: by how much more is held than when the growth began.
        bytes_a_step: the slope.
        steps: over how many steps.
        tensors: kinds of tensors that there are more of by the last window, with their number and who holds them.
        lines: lines of Python that made memory which is still held, with its bytes, of a CUDA device.
        objects: types of objects that there are more of, where no tensors are.
    """

    step: int
    grown_bytes: int
    bytes_a_step: float
    steps: int
    tensors: tuple[str, ...]
    lines: tuple[str, ...]
    objects: tuple[str, ...]

    def __str__(self) -> str:
        text = (
            f"memory grows by {self.bytes_a_step / 1e6:.3g} MB a step: "
            f"{self.grown_bytes / 1e6:.1f} MB in the {self.steps} steps up to step {self.step}"
        )
        if self.tensors:
            text += f"; more tensors: {'; '.join(self.tensors)}"
        if self.lines:
            text += f"; made in {', '.join(self.lines)}"
        if self.objects:
            text += f"; more objects: {', '.join(self.objects)}"
        if not (self.tensors or self.lines or self.objects):
            text += "; no Python object was found that grows: look at what extensions and threads hold"
        return text


class _Scale:
    """Windows of one length in a row, each of which held more than the one before."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        """Of the shortest kind, in one of these."""
        self._least: int | None = None
        self.floors: list[int] = []

    def add(self, floor: int, number: int) -> bool:
        """Takes the least of a shortest window; True where one of these ends with it."""
        self._least = floor if self._least is None else min(self._least, floor)
        if number % self.windows:
            return False
        if self.floors and self._least <= self.floors[-1]:
            self.floors.clear()
        self.floors.append(self._least)
        self._least = None
        return True

    def grows(self, windows: int, least_growth: int) -> bool:
        rises = [after - before for before, after in zip(self.floors, self.floors[1:], strict=False)]
        if len(rises) < windows or sum(rises) - max(rises) < least_growth:  # a jump amid small rises is not growth that lasts
            return False
        return rises[-1] >= _STILL * sorted(rises)[len(rises) // 2]


class LeakWatch:
    """Looks at the memory that is held behind each step, and tells when it grows and goes on growing::

        leaks = LeakWatch()
        for batch in loader:
            train_step(batch)
            leaks.after()

    Of each window of steps the least counts that was held at this point, so neither what comes and goes nor a single jump is a
    leak, nor is growth that peters out. Longer windows, up to 128 times as long, find what leaks slowly. When windows have
    grown one after the other by enough, the tensors that are there are counted, one more window is waited for, and they are
    counted again: what there is more of is named, with who holds it, and on a GPU with the lines that made it. The log has it
    once; or an error, as configured.

    The figure is what is in tensors on a GPU, which the host knows without asking it, and this process's resident memory on the
    CPU, threads of a loader included.

    Args:
        config: a LeakConfig, or a dict of its fields.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        held: what else is to be watched, in bytes; called once a step.

    Attributes:
        leak: what was found; None so far.
    """

    def __init__(
        self,
        config: LeakConfig | dict[str, Any] | None = None,
        device: torch.device | str = "auto",
        *,
        held: Callable[[], int] | None = None,
    ) -> None:
        self.config = LeakConfig.parse(config)
        self.device = resolve_device(str(device))
        if held is not None:
            a_function(held, "held", "returns bytes")
        self._held = held or self._own
        self._least_growth = amount_bytes(self.config.least_growth, usage(self.device).total)
        self._steps = 0
        self._least: int | None = None
        self._scales = [_Scale(2**k) for k in range(_SCALES)]
        self._suspected: tuple[_Scale, Census] | None = None
        self._history = _History(self.device)
        self.leak: Leak | None = None

    def after(self) -> Leak | None:
        """To be called behind each step, always at the same point of it: behind ``zero_grad`` as a rule. Does not wait for the
        device.

        Returns:
            The leak, once: in the step in which it is sure.

        Raises:
            MemoryLeakError: then, with ``action="raise"``.
        """
        self._steps += 1
        if self.leak is not None or self._steps <= self.config.warmup_steps:
            return None
        held = self._held()
        self._least = held if self._least is None else min(self._least, held)
        if (self._steps - self.config.warmup_steps) % self.config.window_steps:
            return None
        floor, self._least = self._least, None
        number = (self._steps - self.config.warmup_steps) // self.config.window_steps
        for scale in self._scales:
            if scale.add(floor, number) and self.leak is None:
                self._look_at(scale)
        return self.leak

    def _look_at(self, scale: _Scale) -> None:
        grows = scale.grows(self.config.windows, self._least_growth)
        if self._suspected is None:
            if grows:
                self._suspected = scale, census(self.device)
                self._history.begin()
        elif self._suspected[0] is scale:
            if grows:
                self._tell(*self._suspected)
            else:
                self._forget()

    def close(self) -> None:
        """Ends the recording of allocations, where one has begun."""
        self._forget()

    def _own(self) -> int:
        return held_bytes(self.device)

    def _forget(self) -> None:
        self._suspected = None
        self._history.end()

    def _tell(self, scale: _Scale, before: Census) -> None:
        lines, now = self._history.lines(), census(self.device)
        self._forget()
        window = scale.windows * self.config.window_steps
        steps = (len(scale.floors) - 1) * window
        grown = scale.floors[-1] - scale.floors[0]
        tensors = _more_tensors(before, now, window, self.device)
        objects = () if tensors else _more_objects(before, now, window)
        self.leak = Leak(self._steps, grown, grown / steps, steps, tensors, lines, objects)
        if self.config.action == "raise":
            raise MemoryLeakError(
                str(self.leak),
                fix="keep loss.detach() in place of losses with their graph, and bound what is kept",
            )
        log.warning("%s", self.leak)


def _more_tensors(before: Census, now: Census, steps: int, device: torch.device) -> tuple[str, ...]:
    grown = []
    for kind, (count, size) in now.tensors.items():
        old_count, old_size = before.tensors.get(kind, (0, 0))
        if count > old_count:
            grown.append((size - old_size, count - old_count, kind))
    often = [each for each in grown if each[1] >= steps // 10]  # a batch more on its way is none of them
    told, named = [], False
    for number, (size, count, kind) in enumerate(sorted(often or grown, key=lambda each: each[:2], reverse=True)[:_LOOKED_AT]):
        holder = holder_of(kind, device) if not named else None
        if number < _SHOWN or (holder and not named):  # a small one that is held may hold the graph of the large ones
            told.append(f"{count} {kind}, {size / 1e6:.3g} MB" + (f", held by {holder}" if holder else ""))
        named = named or holder is not None
    return tuple(told)


def _more_objects(before: Census, now: Census, steps: int) -> tuple[str, ...]:
    """Types that there is one more of for every other step, or more."""
    grown = now.objects - before.objects
    return tuple(f"{count} {name}" for name, count in grown.most_common(_SHOWN) if count >= steps // 2)


class _History:
    """The lines of Python that made what is in use on a CUDA device, as far as it was made since :meth:`begin`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording = False

    def begin(self) -> None:
        if self._device.type != "cuda" or torch._C._cuda_isHistoryEnabled():  # then it is someone else's
            return
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
        self._recording = True

    def lines(self) -> tuple[str, ...]:
        if not self._recording:
            return ()
        everywhere = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return lines_of([segment for segment in everywhere if segment["device"] == (self._device.index or 0)])

    def end(self) -> None:
        if self._recording:
            torch.cuda.memory._record_memory_history(None)
            self._recording = False


def lines_of(segments: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Who made most of what is in use, of a snapshot of torch's allocator: the innermost lines that are not torch's own."""
    sizes: Counter[str] = Counter()
    torch_folder = os.path.dirname(torch.__file__)
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            for frame in block.get("frames", ()):
                if not frame["filename"].startswith(torch_folder) and frame["filename"].endswith(".py"):
                    sizes[f"{frame['filename']}:{frame['line']} ({frame['name']})"] += block["size"]
                    break
    return tuple(f"{line}, {size / 1e6:.3g} MB" for line, size in sizes.most_common(_SHOWN))
