"""How much of what goes between ranks is hidden behind their work, read from a profile of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from gpupipe.errors import ConfigError
from gpupipe.train.timeline import Span, overlap

WORK, EXCHANGE = "work", "exchange"
"""Kinds of spans."""
_EXCHANGES = re.compile(r"^(nccl|gloo:)", re.IGNORECASE)
_COPIES = re.compile(r"^(Memcpy|Memset)")


@dataclass(frozen=True)
class Balance:
    """What a rank did in a stretch of time, in ms.

    Attributes:
        whole_ms: from the first to the last of it.
        work_ms: in which something was computed.
        exchange_ms: in which something was on its way between ranks, waiting for the others included.
        hidden: share of that beside which something was computed, 0 to 1.
    """

    whole_ms: float
    work_ms: float
    exchange_ms: float
    hidden: float

    @property
    def exposed_ms(self) -> float:
        """Time in which nothing but exchange went on: what a better overlap could save at most."""
        return self.exchange_ms * (1 - self.hidden)

    @property
    def bound(self) -> str:
        """``"communication"`` where exchange takes longer than all the work that could hide it, else ``"compute"``."""
        return "communication" if self.exchange_ms > self.work_ms else "compute"

    def __str__(self) -> str:
        idle = max(0.0, self.whole_ms - self.work_ms - self.exposed_ms)
        return (
            f"{self.bound}-bound: of {self.whole_ms:.1f} ms {self.work_ms:.1f} are work and {self.exposed_ms:.1f} exchange by "
            f"itself; {100 * self.hidden:.0f} % of {self.exchange_ms:.1f} ms of exchange is hidden; {idle:.1f} are neither"
        )


def balance(profile: torch.profiler.profile) -> Balance:
    """Work and exchange of this rank in a profile, on the GPU where there was one, else on the CPU.

    Args:
        profile: over whole steps, ended: with ``ProfilerActivity.CUDA`` on a GPU, else ``CPU``.

    Raises:
        ConfigError: for a profile in which nothing was computed.
    """
    return balance_of(spans_of(profile.events() or ()))  # type: ignore[no-untyped-call]


def balance_of(spans: Sequence[Span]) -> Balance:
    """The same of spans.

    Raises:
        ConfigError: as there.
    """
    work = [span for span in spans if span.kind == WORK]
    exchange = [span for span in spans if span.kind == EXCHANGE]
    if not work:
        raise ConfigError("the profile shows no work", fix="profile whole steps, with ProfilerActivity.CUDA on a GPU")
    whole = max(span.end_ms for span in spans) - min(span.begin_ms for span in spans)
    worked, exchanged = joined(work), joined(exchange)
    return Balance(whole, total(worked), total(exchanged), overlap([*worked, *exchanged], EXCHANGE, WORK))


def spans_of(events: Iterable[Any]) -> list[Span]:
    """A profile's events as spans of work and of exchange: kernels where there are any, else the ops of torch."""
    listed = list(events)
    kernels = [event for event in listed if event.device_type == DeviceType.CUDA]
    found: list[Span] = []
    for event in kernels or listed:
        exchange = bool(_EXCHANGES.match(event.name))
        if not exchange and (_COPIES.match(event.name) if kernels else not event.name.startswith("aten::")):
            continue
        begin, end = event.time_range.start / 1000, event.time_range.end / 1000
        found.append(Span(EXCHANGE if exchange else WORK, len(found), begin, end))
    return found


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of one kind as stretches that do not overlap."""
    made: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin_ms):
        if made and span.begin_ms <= made[-1].end_ms:
            made[-1] = Span(span.kind, made[-1].index, made[-1].begin_ms, max(made[-1].end_ms, span.end_ms))
        else:
            made.append(Span(span.kind, len(made), span.begin_ms, span.end_ms))
    return made


def total(spans: Iterable[Span]) -> float:
    """Of stretches that do not overlap, in ms."""
    return sum(span.end_ms - span.begin_ms for span in spans)
