"""What a pipeline works on, shared by all epochs of a loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpupipe.config import LoaderConfig
from gpupipe.data.bytes import name
from gpupipe.data.cache import ClipCache, KeptClip
from gpupipe.data.decode import DecodeEngine, Helping
from gpupipe.data.depth import DepthControl
from gpupipe.data.files import UNKEPT, OpenFiles
from gpupipe.data.group import Grouping
from gpupipe.data.makers import Makers
from gpupipe.data.micro import Sizes
from gpupipe.data.order import Order
from gpupipe.data.prepare import Prepared
from gpupipe.data.source.columns import Kind
from gpupipe.data.tokens import Tokenizers
from gpupipe.data.transform.custom import NO_CUSTOM, Custom
from gpupipe.data.visit import Task
from gpupipe.telemetry import Telemetry
from gpupipe.types import Entry


@dataclass
class Job:
    """What a loader has made of its arguments, and what its epochs share."""

    entries: Sequence[Entry]
    order: Order
    grouping: Grouping
    config: LoaderConfig
    makers: Makers
    kinds: Mapping[str, Kind]
    device: torch.device
    stream: torch.cuda.Stream | None
    engines: list[DecodeEngine]
    """One a thread: with NVDEC where the device has it."""
    helpers: list[DecodeEngine]
    """Further ones, a thread each, that decode in software what NVDEC cannot, or help it; none without NVDEC."""
    helping: Helping | None
    """What is known of them as helpers; None: they do not help."""
    index_workers: int
    telemetry: Telemetry
    cores: frozenset[int] | None = None
    """On which the threads run; None: anywhere."""
    custom: Custom = NO_CUSTOM
    sizes: Sizes | None = None
    """Of the parts in which batches are handed out; None: whole."""
    tokenizers: Tokenizers | None = None
    clips: ClipCache | None = None
    """Decoded clips of this epoch and of those before."""
    files: OpenFiles = UNKEPT
    read_ahead: int = 0
    """Visits whose bytes are asked for before their turn."""
    bad_files: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    """Videos that ``source.filter`` left out."""
    stuck_in: set[str] = field(default_factory=set)
    """Files in which threads were stuck, or visits took too long: not tried again."""
    shapes: str = ""
    """What tells the shapes of the videos' clips, where batches are planned from these; else empty."""
    digest: str = ""
    """What tells this list of videos from another."""
    classes: str = ""
    """What tells the names of the classes and their order; empty where they have none."""
    labels: str = ""
    """What tells the videos' labels; empty where they have none."""
    made: dict[str, Any] = field(default_factory=dict)
    """How clips are made, as :func:`gpupipe.data.state.made_by` has it."""
    folder: str = field(default_factory=name.working_folder)
    """Where relative paths start, whatever the working directory becomes."""
    depth: DepthControl = field(init=False)
    """Of the jitter buffer; what one epoch has taught it serves the next."""

    def __post_init__(self) -> None:
        jitter = self.config.jitter
        if jitter.depth == "auto":
            self.depth = DepthControl(jitter.min_depth, jitter.max_depth)
        else:
            self.depth = DepthControl.fixed(jitter.depth)

    def entry_of(self, task: Task) -> Entry:
        """The video that a task is about."""
        return self.entries[task.request.entry]

    def file_of(self, entry: Entry) -> str:
        """The path by which a video is opened."""
        return name.of_entry(entry, self.folder)

    def kept(self, prepared: Prepared) -> KeptClip | None:
        """The planes of a visit, where they were kept and are as good as those that its decoder would make."""
        if self.clips is None:
            return None
        decoder = self.engines[0].choose(prepared.index).decoder
        return self.clips.find(prepared.index, prepared.plan, decoder)

    def kill(self) -> None:
        """Ends the processes at once, from any thread, for a loader that was dropped and not closed."""
        for engine in [*self.engines, *self.helpers]:
            engine.give_up()

    def close(self) -> None:
        """Leaves the decoders to the next loader, and lets go of what is kept."""
        for engine in [*self.engines, *self.helpers]:
            engine.close()
        if self.clips is not None:
            self.clips.close()
        self.files.close()
