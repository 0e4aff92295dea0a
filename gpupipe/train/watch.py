"""A watch over losses and gradients that costs the step two small kernels, and names the culprit when one is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpupipe import ops
from gpupipe.config.training import WatchConfig
from gpupipe.errors import ConfigError, NotFiniteError
from gpupipe.telemetry import log
from gpupipe.train.arguments import a_function, a_model, a_tensor, of, whole
from gpupipe.train.graphs import paused
from gpupipe.train.loading import unwrapped
from gpupipe.train.precision import Precision
from gpupipe.train.trace import NotFinite, first_not_finite, paths_of


@dataclass(frozen=True)
class Report:
    """What is known of a step that was not finite.

    Attributes:
        step: its number.
        loss, norm: as they were read.
        scale: the loss scale that it had.
        first: the first tensor that is not finite when the step is done again; None where all were finite then.
        files: the videos concerned.
    """

    step: int
    loss: float
    norm: float
    scale: float
    first: NotFinite | None
    files: tuple[str, ...]

    def __str__(self) -> str:
        text = f"step {self.step} is not finite: loss {self.loss:g}, norm of the gradients {self.norm:g}"
        text += f", loss scale {self.scale:g}" if self.scale != 1 else ""
        again = "done again, all of it is finite: the weights have changed since, or it came from another rank"
        text += f"; first the {self.first}" if self.first else f"; {again}"
        named = ", ".join(self.files[:8]) + (f" and {len(self.files) - 8} more" if len(self.files) > 8 else "")
        return text + (f"; from {named}" if named else "")


@dataclass(frozen=True)
class Seen:
    """The figures of a step, as the host learns them some steps later.

    Attributes:
        step: its number, as it was given.
        loss, norm: of the step; the norm is not finite where it was left out.
        scale: the loss scale that it had; 1 without one.
        report: where the step has to be looked into, what was found; it should be done again, from ``batches``.
        batches: of the step, where there is a report.
    """

    step: int
    loss: float
    norm: float
    scale: float
    report: Report | None = None
    batches: tuple[Any, ...] = ()


@dataclass
class _Pending:
    """A step whose figures are on their way."""

    step: int
    batches: tuple[Any, ...]
    random: Any
    figures: torch.Tensor
    event: torch.cuda.Event | None


class Watch:
    """Reads each step's loss and gradient norm ``lag`` steps later, without a wait, and looks into those that are not finite::

        watch = Watch(model, loss_of, precision)
        for step, batch in enumerate(loader):
            loss, norm = train_step(batch)
            seen = watch.after(step, [batch], loss, norm)
            if seen and seen.report:
                with watch.careful():
                    watch.after(seen.step, seen.batches, *train_step(*seen.batches))

    :meth:`Precision.step` leaves such a step out, so the weights are whole. The watch does its forward and backward again with
    the random numbers that it had and hooks on every module, names the first tensor that is not finite and the videos in it,
    and logs that. Where the weights have moved since, by the steps in between, the same may no longer happen: the report says
    so. Under a loss scale, gradients that overflow are its way to find its place: they are looked into when that does not end.

    Args:
        model: what is trained; DistributedDataParallel and ``torch.compile`` are looked through.
        loss_of: the loss of (model, batch), as the step works it out, times the batch's share of it. It is called with the
            unwrapped model.
        precision: of the step.
        config: a WatchConfig, or a dict of its fields.

    Raises:
        ConfigError: for arguments of the wrong kind, or settings that do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module, Any], torch.Tensor],
        precision: Precision,
        config: WatchConfig | dict[str, Any] | None = None,
    ) -> None:
        a_model(model)
        a_function(loss_of, "loss_of", "works out the loss of (model, batch)")
        of(Precision, precision, "precision", "give the Precision that the step uses")
        self.config = WatchConfig.parse(config)
        if self.config.repeat == "float32" and precision.masters:
            raise ConfigError(
                "repeat='float32' with master_weights: the model's own weights are not float32", fix="use repeat='conservative'"
            )
        self._model, self._loss_of, self._precision = unwrapped(model), loss_of, precision
        self._device = precision.device
        self._pending: deque[_Pending] = deque()
        self._random = _random_state(self._device)
        self._overflows = self._failures = 0
        self._careful = False
        self._slots: list[torch.Tensor] = []
        if self._device.type == "cuda":
            self._slots = [torch.empty(3, pin_memory=True) for _ in range(self.config.lag + 1)]
        self._next = 0

    def after(self, step: int, batches: Any, loss: torch.Tensor, norm: torch.Tensor) -> Seen | None:
        """Takes the figures of a step that was just done, and gives those of the step ``lag`` before it.

        Within :meth:`careful` it waits, and gives those of this step.

        Args:
            step: its number.
            batches: a list or tuple of those that it was made of, one after the other; anything else is taken for the only one.
                They are held until its figures are read. What their tensors and videos are is known of a loader's batches, and
                of mappings, lists, tuples, dataclasses and tensors.
            loss: a scalar on the device. With several ranks their mean, so that all of them see the same.
            norm: as :meth:`Precision.step` gave it.

        Returns:
            None in the first ``lag`` steps.

        Raises:
            NotFiniteError: where ``give_up`` such steps came in a row.
            ConfigError: for figures that are no scalars, or a step that is no number.
        """
        whole(step, "step", 0)
        for name, figure in (("loss", loss), ("norm", norm)):
            if a_tensor(figure, name).numel() != 1:
                raise ConfigError(f"{name} is a tensor {tuple(figure.shape)}", fix=f"give {name} as a scalar on the device")
        given = tuple(batches) if isinstance(batches, list | tuple) else (batches,)
        self._pending.append(self._taken(step, given, loss, norm))
        self._random = _random_state(self._device)
        if self._careful:
            return self._read(self._pending.pop())
        return self._read(self._pending.popleft()) if len(self._pending) > self.config.lag else None

    def settle(self) -> Iterator[Seen]:
        """The figures of all steps that are still on their way, oldest first. Waits for the device: before a checkpoint, and
        at the end."""
        while self._pending:
            yield self._read(self._pending.popleft())

    @contextmanager
    def careful(self) -> Iterator[None]:
        """In this block a step is done again, as ``repeat`` says."""
        with ExitStack() as stack:
            stack.enter_context(paused())
            if self.config.repeat != "no":
                stack.enter_context(ops.precision("conservative"))
            if self.config.repeat == "float32":
                stack.enter_context(self._precision.in_float32())
            self._careful = True
            try:
                yield
            finally:
                self._careful = False

    def _taken(self, step: int, batches: tuple[Any, ...], loss: torch.Tensor, norm: torch.Tensor) -> _Pending:
        figures = torch.stack(
            [loss.detach().float().reshape(()), norm.detach().float().reshape(()), self._precision.used_scale]
        )
        event = None
        if self._slots and not self._careful:
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            slot.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            figures = slot
        return _Pending(step, batches, self._random, figures, event)

    def _read(self, done: _Pending) -> Seen:
        if done.event is not None:
            done.event.synchronize()  # long past, unless the host is that far ahead
        loss, norm, scale = done.figures.tolist()
        seen = Seen(done.step, loss, norm, scale)
        fine = math.isfinite(norm) and math.isfinite(loss)
        if fine:
            self._failures = self._overflows = 0
            return seen
        if self._careful:
            log.warning("step %d, done again (%s), is not finite either: it is left out", done.step, self.config.repeat)
            return seen
        if self._precision.scales and math.isfinite(loss):
            self._overflows += 1
            if self._overflows % self.config.overflows:
                return seen
        self._failures += 1
        report = self._look_into(done, loss, norm, scale)
        log.warning("%s", report)
        if self._failures >= self.config.give_up:
            raise NotFiniteError(
                f"{self._failures} steps in a row; the last: {report}",
                fix="lower the learning rate, keep the module named in float32 (keep_float32), or look at the videos",
                path=report.files[0] if report.files else None,
            )
        return Seen(done.step, loss, norm, scale, report, done.batches)

    def _look_into(self, done: _Pending, loss: float, norm: float, scale: float) -> Report:
        def take(batch: Any) -> torch.Tensor:
            with self._precision.autocast():
                return self._loss_of(self._model, batch)

        def backward(value: torch.Tensor) -> None:
            self._precision.backward(value, scale=scale)

        devices = [self._device] if self._device.type == "cuda" else []
        with paused(), self._unchanged(), torch.random.fork_rng(devices=devices):
            _set_random_state(done.random, self._device)
            first = first_not_finite(self._model, done.batches, take, backward)
        whole = tuple(path for batch in done.batches for path in paths_of(batch))
        files = first.files if first is not None and first.files else whole
        return Report(done.step, loss, norm, scale, first, files)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Puts gradients and buffers back behind the block."""
        values = [*self._model.parameters(), *self._precision.masters.values()]
        grads = [value.grad for value in values]
        buffers = [(value, value.clone()) for value in self._model.buffers()]
        for value in values:
            value.grad = None
        try:
            yield
        finally:
            for value, grad in zip(values, grads, strict=True):
                value.grad = grad
            with torch.no_grad():
                for value, kept in buffers:
                    value.copy_(kept)


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of torch's generators; the host does not wait for it."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
