"""Makes an index of what a scan of the file tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gpupipe.data.bytes import Identity
from gpupipe.data.index.model import Int64s, VideoIndex
from gpupipe.data.scan.scan import Scan, scan
from gpupipe.errors import OpenError
from gpupipe.types import VideoInfo


def build(identity: Identity, scanner: Callable[[Identity], Scan] = scan) -> VideoIndex:
    """Scans a file and puts its packets in order.

    Args:
        identity: the file as it is now.
        scanner: reads it: here, or in another process.

    Raises:
        OpenError: when the file cannot be opened, has no video, or none of its frames can be decoded.
    """
    found = scanner(identity)
    packets = found.packets
    display, pts = _frames(found)
    if not len(display):
        raise OpenError(f"no frame of {identity.path} can be decoded", fix="is the file whole?", path=identity.path)
    starts = np.array(packets.start, np.bool_)
    if not starts.any():
        starts[0] = True
    layer = np.array(packets.layer, np.int64)
    return VideoIndex(
        identity,
        _info(found, pts[display].astype(np.float64) * float(found.time_base)),
        found.stream,
        position=np.array(packets.position, np.int64),
        size=np.array(packets.size, np.int64),
        pts=pts,
        key=np.array(packets.key, np.bool_),
        start=starts,
        droppable=np.array(packets.unreferenced, np.bool_) & (layer == layer.max()) & (not found.interlaced),
        display=display,
        extradata=found.extradata,
        length_size=found.length_size,
    )


def _frames(found: Scan) -> tuple[Int64s, Int64s]:
    """(the packet of each frame in display order, the time of each packet)."""
    packets = found.packets
    if found.display is None:
        pts = np.array(packets.pts, np.int64)
        shown = np.flatnonzero(packets.shown)
        return shown[np.argsort(pts[shown], kind="stable")], pts
    display = np.array(found.display, np.int64)
    times = [pts if pts is not None else dts for pts, dts in zip(packets.pts, packets.dts, strict=True)]
    if None not in times:
        pts = np.array(times, np.int64)
        if (np.diff(pts[display]) >= 0).all():
            return display, pts
    counted = np.zeros(len(packets.size))  # no usable clock: count frames at the average rate
    counted[display] = np.arange(len(display)) / (found.average_rate * float(found.time_base))
    return display, counted.round().astype(np.int64)


def _info(found: Scan, seconds: NDArray[np.floating[Any]]) -> VideoInfo:
    steps = np.diff(seconds)
    mean_step = float(steps.mean()) if len(steps) else 1 / found.average_rate
    damage = None
    if found.faults:
        promised = f"{found.promised} frames promised, " if found.promised > len(seconds) else ""
        damage = f"{promised}{len(seconds)} found ({', '.join(sorted(set(found.faults)))})"
    return VideoInfo(
        path=found.identity.path,
        container=found.container,
        codec=found.codec,
        pix_fmt=found.pix_fmt,
        width=found.width,
        height=found.height,
        frames=len(seconds),
        time_base=found.time_base,
        fps=1 / mean_step if mean_step > 0 else found.average_rate,
        start_seconds=float(seconds[0]),
        duration_seconds=float(seconds[-1] - seconds[0]) + mean_step,
        rotation=found.rotation,
        bit_depth=found.bit_depth,
        color_matrix=cast(Any, found.color_matrix),
        color_range=cast(Any, found.color_range),
        chroma_location=cast(Any, found.chroma_location),
        pixel_aspect=found.pixel_aspect,
        interlaced=found.interlaced,
        uniform=found.uniform,
        variable_rate=bool(len(steps) and float(steps.max() - steps.min()) > 0.5 * mean_step),
        damage=damage,
    )
