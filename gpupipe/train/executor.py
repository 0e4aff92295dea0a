"""Batches prepared on a stream of their own while the one before trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from gpupipe.device.inventory import resolve_device
from gpupipe.device.stream import hand_over, own_stream
from gpupipe.errors import ClosedError, ConfigError, noted
from gpupipe.telemetry import log
from gpupipe.train.arguments import a_device, a_function, several, whole
from gpupipe.train.metrics import Metrics
from gpupipe.train.timeline import Mark, Span, Timeline, overlap
from gpupipe.train.trace import paths_of

T = TypeVar("T")
P = TypeVar("P")
PREPARE, TRAIN = "prepare", "train"
_MOST_NAMED = 8
"""Videos of a batch that the note of an error names."""
_END_SECONDS = 10.0
"""How long closing waits for a thread that is amid a batch; it ends by itself behind it."""


class PipelineExecutor(Generic[T, P]):
    """Takes batches, has each prepared by your own GPU work (a frozen autoencoder or text encoder, say) on a data stream, and
    hands it out on the compute stream, the next one already under way::

        with PipelineExecutor(loader, prepare=encode, accumulate=4) as run:
            for latents in run:
                loss = model(latents)
                (loss * run.share).backward()
                if run.due:
                    optimizer.step(); optimizer.zero_grad()
                run.log(loss=loss)

    ``prepare`` runs in a thread, without gradients and without the loop's autocast. What it returns is handed over by an event:
    no stream waits longer than it must, and the host not at all. All works alike on the CPU. What it raises comes to the loop
    in the batch's place, with a note that names the batch and its videos.

    Args:
        batches: a loader, or anything else to iterate over; each iteration of the executor iterates over it once.
        prepare: makes of a batch what the loop gets, and returns it; None: the batch itself.
        accumulate: batches for each step of the optimizer.
        ahead: batches prepared in advance, beside the one in preparation: each holds its memory.
        device: default the loader's, else the current CUDA device or the CPU.
        timeline: times preparation and training, for :meth:`timeline`.

    Attributes:
        index: batches handed out in this iteration so far.
        due: True when the batch handed out last ends a step of the optimizer: the last of ``accumulate``, or of a loader that
            has a length. Without one, batches at the end of an epoch that are too few for a step are left in the gradients.
        share: one over the batches of the step that the batch handed out last is part of: times their mean losses it adds up to
            that of the step.

    Raises:
        ConfigError: for arguments of the wrong kind, or numbers below 1.
    """

    def __init__(
        self,
        batches: Iterable[T],
        *,
        prepare: Callable[[T], P] | None = None,
        accumulate: int = 1,
        ahead: int = 1,
        device: torch.device | str | None = None,
        timeline: bool = False,
    ) -> None:
        for name, value in (("accumulate", accumulate), ("ahead", ahead)):
            whole(value, name, 1)
        several(batches, "batches", "a loader, or anything else to iterate over")
        if prepare is not None:
            a_function(prepare, "prepare", "makes of a batch what the loop gets")
        self._batches, self._prepare = batches, prepare
        self._accumulate, self._ahead = accumulate, ahead
        found = device if device is not None else getattr(batches, "device", None)
        self.device = a_device(found) if found is not None else resolve_device("auto")
        self._stream = own_stream(self.device, self) if self.device.type == "cuda" else None
        self._metrics = Metrics()
        self._timeline = Timeline(self.device) if timeline else None
        self._work: _Work[T, P] | None = None
        self._begun: Mark | None = None
        self._state: Mapping[str, Any] | None = None
        self._closed = False
        self.index = 0
        self._length: int | None = None

    @property
    def due(self) -> bool:
        return self.index > 0 and (self.index % self._accumulate == 0 or self.index == self._length)

    @property
    def share(self) -> float:
        length = self._length
        if length is None or self.index <= length // self._accumulate * self._accumulate:
            return 1.0 / self._accumulate
        return 1.0 / (length % self._accumulate)

    def __len__(self) -> int:
        """Batches of an iteration, as the loader's.

        Raises:
            TypeError: when it has no length.
        """
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[P]:
        if self._closed:
            raise ClosedError("this PipelineExecutor is closed", fix="make another one")
        self._end()
        self.index, self._begun, self._length = 0, None, _length_of(self._batches)
        source = getattr(self._batches, "state_dict", None)
        self._state = source() if callable(source) else None
        self._work = _Work(self._batches, self._prepare, self._ahead, self.device, self._stream, self._timeline)
        return self._handed_out(self._work)

    def _handed_out(self, work: _Work[T, P]) -> Iterator[P]:
        try:
            while True:
                made = work.take()
                self._trained()
                if made is None:
                    return
                if made.ready is not None:
                    hand_over(tensors_in(made.value), [made.ready], torch.cuda.current_stream(self.device))
                self.index += 1
                if self.due or made.state is None:
                    self._state = made.state
                if self._timeline is not None:
                    self._begun = self._timeline.mark()
                yield made.value
        finally:
            work.end()

    def _trained(self) -> None:
        """The loop has come back for another batch: what it asked of the compute stream since the last one is its training."""
        if self._timeline is not None and self._begun is not None:
            self._timeline.add(TRAIN, self.index - 1, self._begun, self._timeline.mark())
        self._begun = None

    def log(self, **values: torch.Tensor | float) -> None:
        """Adds figures of a batch to their means; see :meth:`gpupipe.train.Metrics.log`."""
        self._metrics.log(**values)

    def metrics(self, *, wait: bool = False) -> dict[str, float]:
        """Means of what was logged; see :meth:`gpupipe.train.Metrics.means`."""
        return self._metrics.means(wait=wait)

    def timeline(self) -> list[Span]:
        """When the newest batches were prepared and trained on. Waits for the device.

        Raises:
            ConfigError: when the executor was made without ``timeline=True``.
        """
        if self._timeline is None:
            raise ConfigError("nothing was timed", fix="make the executor with timeline=True")
        return self._timeline.spans()

    def hidden(self) -> float:
        """Share of the preparation, 0 to 1, that went on beside training; from :meth:`timeline`."""
        return overlap(self.timeline(), PREPARE, TRAIN)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as of the last step of the optimizer: batches under way do not count, and those handed out for a
        step that is not complete come again.

        Raises:
            ConfigError: when the batches carry no state, as those of a VideoLoader do.
        """
        if self._state is None:
            source = getattr(self._batches, "state_dict", None)
            if source is not None and self._work is None:
                return dict(source())
            raise ConfigError(
                "the batches carry no state, and the loader's own is ahead of the loop",
                fix="use a VideoLoader",
            )
        return dict(self._state)

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`gpupipe.VideoLoader.set_epoch`: between iterations.

        Raises:
            ConfigError: when the batches come from what has no epochs.
        """
        give = getattr(self._batches, "set_epoch", None)
        if not callable(give):
            raise ConfigError(f"batches is a {type(self._batches).__name__}, which takes no epoch", fix="use a VideoLoader")
        give(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the loader a state, and ends the iteration that is under way."""
        load = getattr(self._batches, "load_state_dict", None)
        if not callable(load):
            raise ConfigError(f"batches is a {type(self._batches).__name__}, which takes no state", fix="use a VideoLoader")
        self._end()
        self._state = None
        load(state)

    def _end(self) -> None:
        if self._work is not None:
            self._work.end()
            self._work = None

    def close(self) -> None:
        """Ends the iteration that is under way, and its thread; may be called again. The loader stays open."""
        self._end()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Made(Generic[P]):
    """A prepared batch."""

    def __init__(self, value: P, ready: torch.cuda.Event | None, state: Mapping[str, Any] | None) -> None:
        self.value, self.ready, self.state = value, ready, state


class _Work(Generic[T, P]):
    """One iteration's thread, which prepares ahead."""

    def __init__(
        self,
        batches: Iterable[T],
        prepare: Callable[[T], P] | None,
        ahead: int,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        timeline: Timeline | None,
    ) -> None:
        self._batches, self._prepare = batches, prepare
        self._device, self._stream, self._timeline = device, stream, timeline
        self._made: queue.Queue[_Made[P] | BaseException | None] = queue.Queue()
        self._room = threading.Semaphore(ahead + 1)
        self._stop = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gpupipe-prepare", daemon=True)
        self._begun = False
        if stream is not None:  # batches may be there already, made on the stream of whoever iterates
            hand_over((), [torch.cuda.current_stream(device).record_event()], stream)

    def _run(self) -> None:
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():  # type: ignore[arg-type]
                self._room.acquire()
                for number, batch in enumerate(self._batches):
                    if self._stop:
                        return
                    self._made.put(self._prepared(number, batch))
                    del batch
                    self._room.acquire()
                    if self._stop:
                        return
            self._made.put(None)
        except BaseException as error:  # crosses to the loop, whatever it is
            self._made.put(error)

    def _prepared(self, number: int, batch: T) -> _Made[P]:
        begin = self._timeline.mark() if self._timeline is not None else None
        if self._stream is not None:
            hand_over(tensors_in(batch), (), self._stream)
        value: Any = batch if self._prepare is None else self._by_the_user(self._prepare, number, batch)
        if value is None and self._prepare is not None:
            raise ConfigError("prepare returned None", fix="have it return what the loop is to get of the batch")
        if self._timeline is not None and begin is not None:
            self._timeline.add(PREPARE, number, begin, self._timeline.mark())
        ready = self._stream.record_event() if self._stream is not None else None
        state = getattr(batch, "state", None)
        return _Made(value, ready, state if isinstance(state, Mapping) and state else None)

    @staticmethod
    def _by_the_user(prepare: Callable[[T], P], number: int, batch: T) -> P:
        """What ``prepare`` makes of a batch; its error says whose it is, and of which videos."""
        try:
            return prepare(batch)
        except Exception as error:
            paths = list(dict.fromkeys(paths_of(batch)))
            more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
            videos = f", {', '.join(paths[:_MOST_NAMED])}{more}" if paths else ""
            told = noted(error, f"raised by prepare={prepare!r} of a PipelineExecutor for batch {number}{videos}")
            if told is error:
                raise
            raise told from error

    def take(self) -> _Made[P] | None:
        """The next batch; None at the end.

        Raises:
            ClosedError: when this iteration has been ended by another one, or by closing.
            BaseException: what iterating or preparing raised.
        """
        if self._over:
            raise _ended()
        if not self._begun:  # one that nobody takes from has no thread
            self._begun = True
            self._thread.start()
        made = self._made.get()
        self._room.release()
        if isinstance(made, BaseException):
            self._over = True
            raise made
        return made

    def end(self) -> None:
        """Ends the thread, behind the batch it is at."""
        if self._over and not self._thread.is_alive():
            return
        self._stop = self._over = True
        self._room.release()
        if self._begun and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                log.warning("a batch is still being prepared after %.0f s: its thread ends behind it", _END_SECONDS)
        while not self._made.empty():  # what nobody takes is not to be kept
            self._made.get()
        self._made.put(_ended())  # for a loop that waits, where this is called from elsewhere


def _ended() -> ClosedError:
    return ClosedError("this iteration of a PipelineExecutor has ended", fix="go on with the newer one, or begin again")


def _length_of(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch: itself, or those in its mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
