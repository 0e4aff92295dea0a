"""One batch being made: its memory, the clips that have arrived, and what travels with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpupipe.config import MixConfig
from gpupipe.data.canvas import Canvas
from gpupipe.data.draws import MIX, clip_generator
from gpupipe.data.source.columns import Kind, dtype_of, text_of
from gpupipe.data.transform import mix as mixing
from gpupipe.device.stream import Mark
from gpupipe.types import BATCH_TENSORS, Batch, ClipRecord

Tokenize = Callable[[Mapping[str, list[str]], Iterable[str]], dict[str, torch.Tensor]]
"""Makes tensors of (text by column, names that are taken)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A finished clip: its record, frame times in seconds, its row of the source, and what its completion is marked by."""

    record: ClipRecord
    seconds: tuple[float, ...]
    columns: Mapping[str, Any]
    done: Mark | None


class Assembly:
    """A batch under construction. Clips are written straight into their slots, by several threads.

    The memory belongs to ``stream``, the pipeline's own: writers wait for its allocation, and it waits for the writers, so that
    its allocator may hand the block out again whenever the batch is dropped.
    """

    def __init__(
        self,
        size: int,
        canvas: Callable[[], Canvas],
        device: torch.device,
        stream: torch.cuda.Stream | None,
        kinds: Mapping[str, Kind],
        *,
        mix: MixConfig | None = None,
        epoch: int,
        index: int,
    ) -> None:
        self._kinds = kinds
        self._mix = mix
        self._device = device
        self._stream = stream
        self._epoch = epoch
        self.index = index
        """Position of the batch in its epoch."""
        self._lock = threading.Lock()
        self._arrivals: list[Arrival | None] = [None] * size
        self._left = size
        self._unusable: list[tuple[int, str]] = []
        with torch.cuda.stream(stream):
            self.canvas = canvas()
            self._allocated = Mark(stream) if stream is not None else None

    def slot(self, number: int, writer: torch.cuda.Stream | None) -> torch.Tensor:
        """The memory of one clip, ready to be written on ``writer``, the current stream."""
        if writer is not None and self._allocated is not None:
            self._allocated.hold_back(writer)
        return self.canvas.slot(number)

    def unusable(self, number: int, path: str) -> None:
        """Notes that a video could not be used for a slot."""
        with self._lock:
            self._unusable.append((number, path))

    def arrive(self, number: int, arrival: Arrival | None) -> bool:
        """Notes that a slot is filled, or skipped (None). True for the call that completes the batch."""
        with self._lock:
            self._arrivals[number] = arrival
            self._left -= 1
            return self._left == 0

    def finish(self, tokenize: Tokenize | None = None) -> tuple[Batch, Mark | None] | None:
        """The batch and the mark that completes it; None when every clip was skipped.

        Args:
            tokenize: makes further tensors of the batch's text.
        """
        arrivals = [arrival for arrival in self._arrivals if arrival is not None]
        if not arrivals:
            return None
        text = {name: [text_of(a.columns[name]) for a in arrivals] for name, kind in self._kinds.items() if kind == "text"}
        taken = (*BATCH_TENSORS, *self._kinds)
        tokens = tokenize(text, taken) if tokenize is not None else {}
        with torch.cuda.stream(self._stream):
            numbers = self._numbers(arrivals) | {name: each.to(self._device) for name, each in tokens.items()}
            # before the stream waits: these copies would wait with it, and this thread too
            if self._stream is not None:
                for done in {arrival.done for arrival in arrivals if arrival.done is not None}:  # one a visit
                    done.hold_back(self._stream)
            kept = [slot for slot, arrival in enumerate(self._arrivals) if arrival is not None]
            tensors = {**self.canvas.tensors(kept if len(kept) < len(self._arrivals) else None), **numbers}
            mixed = None
            if self._mix is not None:
                first, video = arrivals[0].record, tensors["video"]
                mixed = mixing.draw(
                    self._mix, (video.shape[-2], video.shape[-1]), clip_generator(first.request, MIX, first.clip)
                )
                mixing.mix(video, mixed)
                tensors["label"] = mixing.soft_labels(tensors["label"], mixed, self._mix)
            complete = Mark(self._stream) if self._stream is not None else None
        batch = Batch(
            tensors,
            tuple(arrival.record for arrival in arrivals),
            text=text,
            epoch=self._epoch,
            index=self.index,
            mix=mixed,
            lengths=tuple(self.canvas.lengths[slot] for slot in kept) if self.canvas.lengths else (),
            substituted=tuple(path for _, path in sorted(self._unusable, key=lambda note: note[0])),
        )
        return batch, complete

    def _numbers(self, arrivals: list[Arrival]) -> dict[str, torch.Tensor]:
        longest = max(len(arrival.seconds) for arrival in arrivals)
        seconds = [arrival.seconds + arrival.seconds[-1:] * (longest - len(arrival.seconds)) for arrival in arrivals]
        masks = [arrival.record.pick.mask + (False,) * (longest - len(arrival.seconds)) for arrival in arrivals]
        columns: dict[str, np.ndarray] = {
            "pts_seconds": np.array(seconds, np.float64),
            "mask": np.array(masks, np.bool_),
        }
        for name, kind in self._kinds.items():
            if kind != "text":
                columns[name] = np.array([arrival.columns[name] for arrival in arrivals], dtype_of(kind))
        return {name: torch.from_numpy(values).to(self._device) for name, values in columns.items()}
