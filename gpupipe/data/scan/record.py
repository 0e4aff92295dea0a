"""Index records: what is known of a video's packets, as the bytes of an index file.

Form: magic and version, length of a JSON header, the header, then the arrays one after the other, then a CRC-32. The arrays
and the facts are those of :class:`gpupipe.data.index.model.VideoIndex`, which reads a record.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gpupipe.data.scan.scan import Scan
from gpupipe.errors import OpenError

FAMILY = b"gpupipe-index-"
MAGIC = FAMILY + b"3\n"
CHECKSUM_BYTES = 4
_INT32 = range(-(1 << 31), 1 << 31)
_BYTE_ORDER = "<" if sys.byteorder == "little" else ">"


def record(found: Scan) -> bytes:
    """The index record of a scanned file.

    Raises:
        OpenError: when none of its frames can be decoded.
    """
    path, packets = found.identity.path, found.packets
    display, pts, counted = _frames(found)
    if not display:
        raise OpenError(f"no frame of {path} can be decoded", fix="is the file whole?", path=path)
    start = packets.start if any(packets.start) else [True, *packets.start[1:]]
    whole = any(packets.start) and _begins_whole(found, display, pts)
    top = max(packets.layer)
    layers = zip(packets.layer, packets.unreferenced, strict=True)
    droppable = [unreferenced and layer == top and not found.interlaced for layer, unreferenced in layers]
    tick = float(found.time_base)
    arrays = {
        "position": _integers(packets.position),
        "size": _integers(packets.size),
        "pts": _integers(pts),
        "key": _booleans(packets.key),
        "start": _booleans(start),
        "droppable": _booleans(droppable),
        "display": _integers(display),
    }
    header = {
        "identity": found.identity.as_dict(),
        "info": _info(found, [pts[packet] * tick for packet in display]) | {"whole_start": whole},
        "stream": found.stream,
        "extradata": base64.b64encode(found.extradata).decode(),
        "length_size": found.length_size,
        "counted": counted,
        "in_force": [(packet, base64.b64encode(sets).decode()) for packet, sets in found.in_force],
        "arrays": {name: (dtype, count) for name, (dtype, count, _) in arrays.items()},
    }
    text = json.dumps(header).encode()
    body = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(data for _, _, data in arrays.values())])
    return body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little")


def _integers(values: Sequence[int]) -> tuple[str, int, bytes]:
    """(NumPy's name of the type, count, bytes); 32 bits a number where all fit."""
    narrow = not values or (min(values) in _INT32 and max(values) in _INT32)
    return f"{_BYTE_ORDER}i{4 if narrow else 8}", len(values), array("i" if narrow else "q", values).tobytes()


def _booleans(values: Sequence[bool]) -> tuple[str, int, bytes]:
    return "|b1", len(values), bytes(values)


def _frames(found: Scan) -> tuple[list[int], list[int], bool]:
    """(the packet of each frame in display order, the time of each packet, whether times are counted rather than read)."""
    packets = found.packets
    if found.display is None:
        pts = [time for time in packets.pts if time is not None]  # all have one, or ``display`` would be there
        shown = (number for number, is_shown in enumerate(packets.shown) if is_shown)
        return sorted(shown, key=pts.__getitem__), pts, False
    display = found.display
    times = [pts if pts is not None else dts for pts, dts in zip(packets.pts, packets.dts, strict=True)]
    known = [time for time in times if time is not None]
    if len(known) == len(times) and all(known[a] <= known[b] for a, b in pairwise(display)):
        return display, known, False
    counted = [0] * len(packets.size)  # no usable clock: count frames at the average rate
    for rank, packet in enumerate(display):
        counted[packet] = round(rank / (found.average_rate * float(found.time_base)))
    with_frames = set(display)
    for packet in range(1, len(counted)):
        if packet not in with_frames:  # as late as the one before: it may be referred to, and counts as no leading picture
            counted[packet] = counted[packet - 1]
    return display, counted, True


def _begins_whole(found: Scan, display: list[int], pts: list[int]) -> bool:
    """Whether no frame is shown that needs what comes before the first start point.

    HEVC names its leading pictures: those that can be decoded need nothing else, the rest are not shown.
    """
    first = found.packets.start.index(True)
    leading = found.codec != "hevc"
    return not any(packet < first or (leading and pts[packet] < pts[first]) for packet in display)


def _info(found: Scan, seconds: list[float]) -> dict[str, Any]:
    """The fields of :class:`gpupipe.types.VideoInfo`, fractions as text."""
    steps = [later - earlier for earlier, later in pairwise(seconds)]
    mean_step = (seconds[-1] - seconds[0]) / len(steps) if steps else 1 / found.average_rate
    damage = None
    if found.faults:
        promised = f"{found.promised} frames promised, " if found.promised > len(seconds) else ""
        damage = f"{promised}{len(seconds)} found ({', '.join(sorted(set(found.faults)))})"
    return {
        "path": found.identity.path,
        "container": found.container,
        "codec": found.codec,
        "pix_fmt": found.pix_fmt,
        "width": found.width,
        "height": found.height,
        "frames": len(seconds),
        "time_base": str(found.time_base),
        "fps": 1 / mean_step if mean_step > 0 else found.average_rate,
        "start_seconds": seconds[0],
        "duration_seconds": seconds[-1] - seconds[0] + mean_step,
        "rotation": found.rotation,
        "bit_depth": found.bit_depth,
        "color_matrix": found.color_matrix,
        "color_range": found.color_range,
        "transfer": found.transfer,
        "coded_size": found.coded_size,
        "chroma_location": found.chroma_location,
        "pixel_aspect": str(found.pixel_aspect),
        "interlaced": found.interlaced,
        "uniform": found.uniform,
        "variable_rate": bool(steps) and max(steps) - min(steps) > 0.5 * mean_step,
        "damage": damage,
    }
