"""What the stages of a running loader do: how much, how fast, and who waits for whom.

A thread carries a clip from its index to its slot of the batch. All of its time is divided: into what each stage takes, what it
waits for an index that others make, and what it waits for room. So for each stage the three figures ``busy``, ``input`` and
``output`` add up to the threads' time: what threads spend on the stages before it, it waits for its input; what they spend on
those after it or without room, for its output. The loop's own time is divided in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypedDict

if TYPE_CHECKING:
    import torch

    from gpupipe.telemetry import Clock, Telemetry
    from gpupipe.types import Batch

CREW: Final = ("index", "plan", "read", "decode", "transform", "custom", "assemble")
"""The stages that the threads carry each clip through, in order."""
INDEX_WAIT: Final = "index_wait"
"""Threads wait for an index that is being made elsewhere."""
ROOM: Final = "room"
"""Threads wait for the loop to take a batch."""
IDLE: Final = "idle"
"""Threads have nothing left to do in their epoch, or are not wanted: no part of the sums."""
RUNNING: Final = "running"
"""An epoch is under way: wall time."""


class StageFigures(TypedDict):
    """What one stage did since the loader was made. Times in seconds."""

    items: int
    """Visits to videos (index, plan, decode), reads of files, clips (transform, custom) or batches (the rest)."""
    items_per_s: float
    busy_seconds: float
    """Summed over threads, like the next two."""
    input_seconds: float
    """Waited for what comes before; the buffer's is without the waits for the first batch of each epoch."""
    output_seconds: float
    """Waited for what comes after."""
    seconds: float
    """Wall time in which an epoch was under way."""
    threads: float
    """How many there were on average."""
    queue: int | None
    """Items that wait for this stage now; None where none can: the same thread goes on with them at once."""
    p50_seconds: float | None
    """Of one item, what is nested in it included; in the buffer how long a batch lay ready. None: not measured singly."""
    p99_seconds: float | None
    bytes: int
    """Read from files; planes that decoding gave; output written."""
    failures: int


class Consumer:
    """Divides the time of the training loop: it waits for a batch, a batch is made usable, or it does something else.

    The wait for an epoch's first batch is kept apart: each epoch starts empty, which says nothing of its pace.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._clock: Clock | None = None
        self._handed_at = 0.0

    def asks(self) -> None:
        """The loop wants a batch: with the first one its time begins."""
        if self._clock is None:
            self._clock = self._telemetry.clock("start")
            return
        before = self._clock.turn("wait")
        if before == "step":
            self._telemetry.observe("step", self._clock.since - self._handed_at)

    def gets(self, ready_since: float | None) -> None:
        """The loop has its batch, ready since then; None: there is no further one."""
        if self._clock is None:
            return
        if ready_since is None:
            self._clock.end()
            return
        self._clock.turn("step")
        self._handed_at = self._clock.since
        self._telemetry.observe("ready", self._handed_at - ready_since)

    def end(self) -> None:
        """The epoch is over. Takes no lock."""
        if self._clock is not None:
            self._clock.end()

    @property
    def clock(self) -> Clock | None:
        return self._clock


def count_bytes(telemetry: Telemetry, batch: Batch, device: torch.device) -> None:
    """Counts what a finished batch holds; on CUDA its columns came from the host."""
    total = sum(tensor.nbytes for tensor in batch.values())
    telemetry.count("bytes_batches", total)
    if device.type == "cuda":
        made = batch["tokens" if "tokens" in batch else "video"]
        telemetry.count("bytes_uploaded", total - made.nbytes)


def stages(
    telemetry: Telemetry, counts: Mapping[str, float], queues: Mapping[str, int], *, custom: bool
) -> dict[str, StageFigures]:
    """The figures of all stages, by name, in the order in which a clip passes them.

    Args:
        counts: the telemetry's snapshot.
        queues: items that wait for a stage now, by its name.
        custom: whether the loader has transforms of its user's.
    """
    spent = telemetry.spent()
    wall = spent.get(RUNNING, 0.0)
    working = sum(spent.get(name, 0.0) for name in (*CREW, INDEX_WAIT, ROOM, IDLE))
    threads = working / wall if wall else 0.0

    def figures(
        name: str,
        items: int,
        times: tuple[float, float, float],
        *,
        timed: str | None = None,
        bytes_: str = "",
    ) -> StageFigures:
        return {
            "items": items,
            "items_per_s": items / wall if wall else 0.0,
            "busy_seconds": times[0],
            "input_seconds": times[1],
            "output_seconds": times[2],
            "seconds": wall,
            "threads": threads if name in CREW else 1.0,
            "queue": queues.get(name, 0) if name in ("decode", "assemble", "buffer") else None,
            "p50_seconds": counts.get(f"{timed}_p50_seconds", 0.0) if timed else None,
            "p99_seconds": counts.get(f"{timed}_p99_seconds", 0.0) if timed else None,
            "bytes": int(counts.get(bytes_, 0)),
            "failures": int(counts.get(f"{name}_failures", 0)),
        }

    made = [spent.get(name, 0.0) for name in CREW]
    before, room = spent.get(INDEX_WAIT, 0.0), spent.get(ROOM, 0.0)
    clips, batches = int(counts.get("clips", 0)), int(counts.get("batches", 0))
    items = {
        "index": telemetry.observed("index"),
        "plan": telemetry.observed("index"),
        "read": telemetry.observed("read"),
        "decode": telemetry.observed("decode"),
        "transform": clips,
        "custom": clips,
        "assemble": telemetry.observed("assemble"),
    }
    bytes_of = {"read": "bytes_read", "decode": "bytes_planes", "assemble": "bytes_batches"}
    found: dict[str, StageFigures] = {}
    for place, name in enumerate(CREW):
        if name != "custom" or custom:
            times = (made[place], before + sum(made[:place]), room + sum(made[place + 1 :]))
            timed = None if name in ("plan", "custom") else name
            found[name] = figures(name, items[name], times, timed=timed, bytes_=bytes_of.get(name, ""))
    start, wait, step, handed = (spent.get(name, 0.0) for name in ("start", "wait", "step", "hand_over"))
    found["buffer"] = figures("buffer", batches, (handed, wait, step), timed="ready")
    found["consumer"] = figures("consumer", batches, (step, start + wait + handed, 0.0), timed="step")
    return found


def traffic(counts: Mapping[str, float], device: torch.device) -> dict[str, int]:
    """Bytes that the pipeline itself moved: ``to_device_bytes`` over the bus, ``device_written_bytes`` in the GPU's memory.

    The first are packets for NVDEC, planes that software decoded or the cache kept on the host, and the batches' columns; the
    second are planes laid out for the transform, and batches. What NVDEC writes for itself, and what kernels read, are not in
    them. Both are 0 on the CPU.
    """
    if device.type != "cuda":
        return {"to_device_bytes": 0, "device_written_bytes": 0}
    written = counts.get("bytes_planes", 0) + counts.get("bytes_batches", 0)
    return {"to_device_bytes": int(counts.get("bytes_uploaded", 0)), "device_written_bytes": int(written)}
