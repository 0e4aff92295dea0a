"""What a loader is doing, while it does it: a table on the terminal, and numbers for sinks."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from gpupipe.data.stages import StageFigures
from gpupipe.data.verdict import Limit, limit
from gpupipe.errors import ConfigError
from gpupipe.observe.machine import BusCounters

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from gpupipe.data.loader import VideoLoader

log = logging.getLogger("gpupipe")

PLAIN_SECONDS = 10.0
"""Between two lines where stderr is no terminal, at least."""
_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class StageRates:
    """What one stage did between two looks."""

    items_per_s: float
    busy: float
    """Share of its threads' time, 0 to 1, like the next two."""
    input: float
    """Waited for what comes before."""
    output: float
    """Waited for what comes after."""
    bytes_per_s: float
    queue: int | None
    p50_seconds: float | None
    """Of the newest items, however long ago they were."""
    p99_seconds: float | None
    failures: int
    """Since the loader was made."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a loader: what has happened since the look before."""

    time: float
    """Seconds since 1970."""
    seconds: float
    """Since the look before."""
    batches: int
    """Taken since the loader was made."""
    clips_per_s: float
    stages: Mapping[str, StageRates]
    limit: Limit
    to_device_bytes_per_s: float
    """What the pipeline sent over the bus, see :func:`gpupipe.data.stages.traffic`."""
    device_written_bytes_per_s: float
    pcie_to_device_bytes_per_s: float | None = None
    """All that went to the GPU over PCIe, as NVML measures it over 20 ms; None where it does not. Of all processes."""
    pcie_from_device_bytes_per_s: float | None = None
    totals: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """``loader.stats()`` at this look."""

    def flat(self) -> dict[str, float]:
        """All figures by names such as ``decode/busy``; those that there are."""
        found: dict[str, float | None] = {
            "clips_per_s": self.clips_per_s,
            "waiting": self.limit.waiting,
            "room": self.limit.room,
            "to_device_bytes_per_s": self.to_device_bytes_per_s,
            "device_written_bytes_per_s": self.device_written_bytes_per_s,
            "pcie_to_device_bytes_per_s": self.pcie_to_device_bytes_per_s,
            "pcie_from_device_bytes_per_s": self.pcie_from_device_bytes_per_s,
        }
        for name, rates in self.stages.items():
            found |= {f"{name}/{key}": getattr(rates, key) for key in StageRates.__dataclass_fields__}
        return {name: float(value) for name, value in found.items() if value is not None}


class Sink(Protocol):
    """Where looks go besides the terminal. Both are called from the monitor's thread; what they raise ends the sink alone."""

    def write(self, look: Look) -> None:
        """Takes a look."""
        ...

    def close(self) -> None:
        """No further look comes."""
        ...


def monitor(loader: VideoLoader, *, sinks: Sequence[Sink] = (), every_seconds: float = 1.0, show: bool = True) -> Monitor:
    """Watches a loader for the time of a ``with`` block, from a thread that ends with it.

    Shows a live table on stderr where that is a terminal: of what has happened since the look before, at the end of the whole
    block. Elsewhere it writes a line every ten seconds at most, and one at the end.

    Args:
        loader: any number of its epochs may be iterated meanwhile. It stays open.
        sinks: get each look too; see :mod:`gpupipe.observe.sinks`. They are closed at the end of the block.
        every_seconds: between two looks, from 0.05 on.
        show: False: only the sinks.

    Raises:
        ConfigError: when ``every_seconds`` is too small.
    """
    return Monitor(loader, sinks=sinks, every_seconds=every_seconds, show=show)


class Monitor:
    """See :func:`monitor`."""

    def __init__(self, loader: VideoLoader, *, sinks: Sequence[Sink], every_seconds: float, show: bool) -> None:
        if not isinstance(every_seconds, int | float) or not 0.05 <= every_seconds <= 86400:
            raise ConfigError(
                f"every_seconds={every_seconds!r} is not from 0.05 to 86400",
                fix="give a number of seconds; 1 is enough to watch",
            )
        if not isinstance(sinks, list | tuple) or not all(hasattr(sink, "close") for sink in sinks):
            raise ConfigError(f"sinks={sinks!r} is no list of sinks", fix="write sinks=[JsonLines('watch.jsonl')]")
        self._loader = loader
        self._sinks = list(sinks)
        self._every = every_seconds
        self._stream: TextIO | None = sys.stderr if show else None
        self._live: Live | None = None
        self._told = -PLAIN_SECONDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpupipe-monitor", daemon=True)
        self._bus: BusCounters | None = None
        self._began: tuple[float, dict[str, Any]] = (0.0, {})
        self._before = self._began
        self.latest: Look | None = None
        """The newest look; None before the first."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        self._bus = BusCounters.open(self._loader.device)
        if _is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=False)
            self._live.start()
        self._began = self._before = (time.perf_counter(), self._loader.stats())
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._look(last=True)
        finally:
            self._end()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
        for sink in list(self._sinks):
            self._guarded(sink, sink.close)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def _look(self, *, last: bool = False) -> None:
        now = (time.perf_counter(), self._loader.stats())
        look, self._before = self._since(self._before, now), now
        self.latest = look
        for sink in list(self._sinks):
            self._guarded(sink, sink.write, look)
        try:
            self._show(self._since(self._began, now) if last else look, last=last)
        except (OSError, ValueError):  # the terminal is gone, or stderr closed: no reason to end a training run
            self._stream = None

    def _guarded(self, sink: Sink, call: Any, *arguments: Look) -> None:
        try:
            call(*arguments)
        except Exception as error:  # a full disk must not end the training run
            log.warning("%s failed and gets no more: %s: %s", type(sink).__name__, type(error).__name__, error)
            if sink in self._sinks:
                self._sinks.remove(sink)
                if call != sink.close:
                    self._guarded(sink, sink.close)

    def _since(self, then: tuple[float, dict[str, Any]], now: tuple[float, dict[str, Any]]) -> Look:
        """What happened between two looks."""
        before, after, seconds = then[1], now[1], max(1e-6, now[0] - then[0])
        sent, received = self._bus.read() if self._bus is not None else (None, None)

        def rate(key: str) -> float:
            return float(after.get(key, 0) - before.get(key, 0)) / seconds

        stages: dict[str, StageFigures] = after["stages"]
        earlier: dict[str, StageFigures] = before["stages"]
        return Look(
            time=time.time(),
            seconds=seconds,
            batches=int(after["batches"]),
            clips_per_s=rate("clips"),
            stages={name: _rates(figures, earlier[name], seconds) for name, figures in stages.items()},
            limit=limit(stages, earlier),
            to_device_bytes_per_s=rate("to_device_bytes"),
            device_written_bytes_per_s=rate("device_written_bytes"),
            pcie_to_device_bytes_per_s=received,
            pcie_from_device_bytes_per_s=sent,
            totals=after,
        )

    def _show(self, look: Look, *, last: bool) -> None:
        if self._live is not None:
            self._live.update(table(look), refresh=True)
        elif self._stream is not None and (last or time.perf_counter() - self._told >= PLAIN_SECONDS):
            self._told = time.perf_counter()
            print(line(look), file=self._stream, flush=True)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; stderr is None, or closed, in processes that were started without it."""
    return stream is not None and not stream.closed and stream.isatty()


def _rates(now: StageFigures, before: StageFigures, seconds: float) -> StageRates:
    busy, waited, blocked = (
        max(0.0, now[key] - before[key])  # type: ignore[literal-required]
        for key in ("busy_seconds", "input_seconds", "output_seconds")
    )
    total = busy + waited + blocked
    return StageRates(
        items_per_s=(now["items"] - before["items"]) / seconds,
        busy=busy / total if total else 0.0,
        input=waited / total if total else 0.0,
        output=blocked / total if total else 0.0,
        bytes_per_s=(now["bytes"] - before["bytes"]) / seconds,
        queue=now["queue"],
        p50_seconds=now["p50_seconds"],
        p99_seconds=now["p99_seconds"],
        failures=now["failures"],
    )


def line(look: Look) -> str:
    """A look in one line."""
    shares = ", ".join(f"{name} {100 * rates.busy:.0f} %" for name, rates in look.stages.items() if rates.busy >= 0.01)
    return f"{look.batches} batches, {look.clips_per_s:.1f} clips/s; busy: {shares or 'nothing'}; {look.limit.text}"


def table(look: Look) -> RenderableType:
    """A look as a table with what limits below it. ``input`` and ``output`` are shares of the time spent waiting for them."""
    from rich.table import Table

    title = f"{look.batches} batches, {look.clips_per_s:.1f} clips/s"
    made = Table(
        title=title, caption=_caption(look), title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0),
        pad_edge=False,
    )  # fmt: skip
    made.add_column("stage", no_wrap=True)
    for head in ("items/s", "busy", "input", "output", "queue", "p50 ms", "p99 ms", "MiB/s", "failed"):
        made.add_column(head, justify="right", no_wrap=True)
    for name, rates in look.stages.items():
        limiting = name in look.limit.stages
        times = (None if value is None else 1000 * value for value in (rates.p50_seconds, rates.p99_seconds))
        made.add_row(
            name, f"{rates.items_per_s:.1f}", *(f"{100 * share:.0f} %" for share in (rates.busy, rates.input, rates.output)),
            "" if rates.queue is None else str(rates.queue), *("" if t is None else f"{t:.1f}" for t in times),
            f"{rates.bytes_per_s / _MIB:.1f}" if rates.bytes_per_s else "", str(rates.failures or ""),
            style="bold" if limiting else None,
        )  # fmt: skip
    return made


def _caption(look: Look) -> str:
    lines = [look.limit.text] + ([f"to try: {look.limit.help}"] if look.limit.help else [])
    if look.to_device_bytes_per_s or look.device_written_bytes_per_s:
        sent, written = look.to_device_bytes_per_s / _MIB, look.device_written_bytes_per_s / _MIB
        lines.append(f"to the GPU {sent:.0f} MiB/s, written there {written:.0f} MiB/s")
    if look.pcie_to_device_bytes_per_s is not None:
        lines.append(f"PCIe of all processes: {look.pcie_to_device_bytes_per_s / _MIB:.0f} MiB/s to the GPU")
    return "\n".join(lines)
