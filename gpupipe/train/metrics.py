"""Means of a training loop's figures, without the host waiting for the GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from gpupipe.errors import ConfigError
from gpupipe.train.arguments import shown


@dataclass
class _Sums:
    total: torch.Tensor
    count: int = 0


@dataclass
class _Flight:
    """Sums on their way to the host."""

    names: list[str]
    counts: list[int]
    values: torch.Tensor
    ready: torch.cuda.Event | None = field(default=None)


class Metrics:
    """Adds up figures on the device where they are; hands out means once they have come to the host.

    Not for use by two threads at once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._flights: deque[_Flight] = deque()
        self._newest: dict[str, float] = {}

    def log(self, **values: torch.Tensor | float) -> None:
        """Adds figures of one step, by name: numbers, or tensors of one element on any device. Does not wait for the GPU.

        Raises:
            ConfigError: for anything else.
        """
        for name, value in values.items():
            if not isinstance(value, int | float) and (not isinstance(value, torch.Tensor) or value.numel() != 1):
                raise ConfigError(f"{name} is {shown(value)}", fix=f"give {name} a number, or a tensor of one element")
            figure = value.detach().reshape(()).to(torch.float64) if isinstance(value, torch.Tensor) else value
            sums = self._sums.get(name)
            if sums is None:
                device = value.device if isinstance(value, torch.Tensor) else None
                sums = self._sums[name] = _Sums(torch.zeros((), dtype=torch.float64, device=device))
            sums.total += figure  # in place: no new memory a step
            sums.count += 1

    def means(self, *, wait: bool = False) -> dict[str, float]:
        """The mean of each figure over the steps between two calls.

        What was logged since the last call is sent to the host; without ``wait`` the newest means that have arrived there are
        given, those of the call before as a rule: empty at first. With ``wait`` those up to now.
        """
        if self._sums:
            self._flights.append(_sent(self._sums))
            self._sums = {}
        while self._flights and (wait or _arrived(self._flights[0])):
            flight = self._flights.popleft()
            if flight.ready is not None:
                flight.ready.synchronize()
            pairs = zip(flight.names, flight.values.tolist(), flight.counts, strict=True)
            self._newest = {name: total / count for name, total, count in pairs}
        return dict(self._newest)


def _sent(sums: dict[str, _Sums]) -> _Flight:
    names = list(sums)
    cuda = [name for name in names if sums[name].total.is_cuda]
    counts = [sums[name].count for name in names]
    if not cuda:
        return _Flight(names, counts, torch.stack([sums[name].total for name in names]))
    device = sums[cuda[0]].total.device
    together = torch.stack([sums[name].total.to(device, non_blocking=True) for name in names])
    values = torch.empty(len(names), dtype=torch.float64, pin_memory=True)
    values.copy_(together, non_blocking=True)
    return _Flight(names, counts, values, torch.cuda.current_stream(device).record_event())


def _arrived(flight: _Flight) -> bool:
    return flight.ready is None or bool(flight.ready.query())  # type: ignore[no-untyped-call]
