"""``gpupipe probe``: what gpupipe knows of one video, and which decoder would serve it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpupipe.cli.console import emit_json, say_facts, size_text
from gpupipe.config import StageConfig

if TYPE_CHECKING:
    from gpupipe.data.index import VideoIndex

_CLIP_FRAMES = 16
_CLIPS = 64
"""Starts over which a clip's cost is averaged."""


class ProbeConfig(StageConfig):
    """Which file to look at, and for which device."""

    file: str
    device: str = "auto"
    plan: bool = False
    """Work out what clips of this file cost to decode."""


def probe(config: ProbeConfig) -> dict[str, Any]:
    """Reads or makes the index of ``config.file``.

    Returns:
        Facts of the stream and of its index, JSON types only.

    Raises:
        OpenError: when the file cannot be opened as a video.
        DeviceError: when the device is not there.
    """
    import numpy as np

    from gpupipe.data import index as indices
    from gpupipe.data.bytes import Identity
    from gpupipe.data.decode import choose
    from gpupipe.data.scan.store import file_of
    from gpupipe.data.transform.color import matrix_name
    from gpupipe.device.inventory import resolve_device
    from gpupipe.errors import OpenError

    if os.path.isdir(config.file) or config.file.lower().endswith(".tar"):
        kind = "a folder" if os.path.isdir(config.file) else "a shard"
        fix = "name one video file (SHARD.tar::MEMBER in a shard); `gpupipe index` goes through a folder, a table or a list"
        raise OpenError(f"{config.file} is {kind}", fix=fix, path=config.file)
    device = resolve_device(config.device)
    identity = Identity.of(config.file)
    cached = indices.cached(identity) is not None
    began = time.perf_counter()
    index = indices.load(config.file)
    took = time.perf_counter() - began
    info = index.info
    choice = choose(info, device)
    plans = _plan_costs(index) if config.plan else None
    height, width = info.display_size
    starts = index.keyframes
    gaps = np.diff(starts)
    return {
        "command": "probe",
        "file": info.path,
        "container": info.container,
        "codec": info.codec,
        "pix_fmt": info.pix_fmt,
        "bit_depth": info.bit_depth,
        "width": info.width,
        "height": info.height,
        "display_width": width,
        "display_height": height,
        "rotation": info.rotation,
        "pixel_aspect": str(info.pixel_aspect),
        "color_matrix": info.color_matrix,
        "color_range": info.color_range,
        "color_matrix_used": matrix_name(info, "auto"),
        "color_range_used": info.color_range or "limited",
        "transfer": info.transfer,
        "coded_size": info.coded_size,
        "chroma_location": info.chroma_location,
        "interlaced": info.interlaced,
        "frames": info.frames,
        "damage": info.damage,
        "fps": info.fps,
        "variable_rate": info.variable_rate,
        "time_base": str(info.time_base),
        "start_seconds": info.start_seconds,
        "duration_seconds": info.duration_seconds,
        "packets": len(index.pts),
        "packet_bytes": int(index.size.sum()),
        "keyframes": int(index.key.sum()),
        "start_points": int(index.start.sum()),
        "start_distance_mean": float(gaps.mean()) if len(gaps) else float(info.frames),
        "start_distance_max": int(max(gaps.max(initial=0), info.frames - starts[-1])) if len(starts) else info.frames,
        "read_from_map": index.mapped,
        "index_cached": cached,
        "index_seconds": took,
        "index_file": str(file_of(identity)) if file_of(identity).is_file() else None,
        "plan": plans,
        "device": str(device),
        "decoder": choice.decoder,
        "decoder_reason": choice.reason or f"NVDEC of {device} decodes this stream to the same bits as software",
    }


def _plan_costs(index: VideoIndex) -> list[dict[str, float | int]]:
    """Packets that clips of 16 frames cost, on average over starts all through the video."""
    import numpy as np

    from gpupipe.data.plan import make_plan

    costs: list[dict[str, float | int]] = []
    for stride in (1, 4, 8):
        span = (_CLIP_FRAMES - 1) * stride + 1
        if span > index.info.frames:
            break
        starts = np.unique(np.linspace(0, index.info.frames - span, _CLIPS).astype(int)).tolist()
        plans = [make_plan(index, range(start, start + span, stride)) for start in starts]
        planned, plain = (sum(costs) / len(plans) for costs in zip(*((p.packets, p.plain_packets) for p in plans), strict=True))
        costs.append({"frames": _CLIP_FRAMES, "stride": stride, "packets": planned, "plain_packets": plain})
    return costs


def command(
    file: Annotated[str, typer.Argument(help="A video file, a URL, or SHARD.tar::MEMBER.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N: for which to choose the decoder.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Show what clips of it cost to decode.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Show a video's facts and which decoder serves it."""
    facts = probe(ProbeConfig(file=file, device=device, plan=plan))
    if as_json:
        emit_json(facts)
        return
    turned = f", shown as {facts['display_width']}x{facts['display_height']}" if facts["rotation"] else ""
    coded_height, coded_width = facts["coded_size"]
    differs = (coded_width, coded_height) != (facts["width"], facts["height"])
    coded = f" (coded as {coded_width}x{coded_height})" if differs else ""
    rate = "variable rate, on average " if facts["variable_rate"] else ""
    untagged = "not tagged"
    matrix = facts["color_matrix"] or f"{untagged} (read as {facts['color_matrix_used']})"
    span = facts["color_range"] or f"{untagged} (read as {facts['color_range_used']})"
    say_facts([
        ("file", facts["file"]),
        ("container", facts["container"]),
        ("codec", f"{facts['codec']}, {facts['pix_fmt']}, {facts['bit_depth']} bit{', interlaced' * facts['interlaced']}"),
        ("size", f"{facts['width']}x{facts['height']}{coded}{turned}, pixel aspect {facts['pixel_aspect']}"),
        ("rotation", f"{facts['rotation']} degrees clockwise"),
        ("colour", f"matrix {matrix}, range {span}, "
                   f"transfer {facts['transfer'] or untagged}, chroma {facts['chroma_location']}"),
        ("frames", f"{facts['frames']} at {rate}{facts['fps']:.3f} per second"),
        ("damage", facts["damage"]),
        ("time", f"from {facts['start_seconds']:.3f} s, {facts['duration_seconds']:.3f} s long, "
                 f"time base {facts['time_base']}"),
        ("packets", f"{facts['packets']}, {size_text(facts['packet_bytes'])}, "
                    f"{'read by position' if facts['read_from_map'] else 'read through the demuxer'}"),
        ("keyframes", f"{facts['keyframes']} flagged, {facts['start_points']} where a decode may start: every "
                      f"{facts['start_distance_mean']:.1f} frames on average, {facts['start_distance_max']} at most"),
        ("index", f"{'from the cache' if facts['index_cached'] else 'built'} in {1000 * facts['index_seconds']:.1f} ms"),
        ("index file", facts["index_file"] or "not kept: set GPUPIPE_CACHE to a folder that can be written"),
        ("decoder", f"{facts['decoder']} on device {facts['device']}: {facts['decoder_reason']}"),
        *((f"clip, stride {cost['stride']}", f"{cost['packets']:.1f} packets for {cost['frames']} frames, instead of "
           f"{cost['plain_packets']:.1f} from the keyframe on") for cost in facts["plan"] or ()),
    ])  # fmt: skip
