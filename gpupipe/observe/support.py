"""The support matrix: which decoder serves which kind of video on this machine, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = (
    ("h264", "4:2:0", 8), ("h264", "4:2:0", 10), ("h264", "4:2:2", 8), ("h264", "4:4:4", 8),
    ("hevc", "4:2:0", 8), ("hevc", "4:2:0", 10), ("hevc", "4:2:2", 10), ("hevc", "4:4:4", 8), ("hevc", "4:4:4", 10),
    ("vp8", "4:2:0", 8), ("vp9", "4:2:0", 8), ("vp9", "4:2:0", 10), ("av1", "4:2:0", 8), ("av1", "4:2:0", 10),
    ("mpeg2video", "4:2:0", 8), ("mpeg4", "4:2:0", 8),
)  # fmt: skip
"""(codec, chroma, bits) of the kinds of video that people have."""


@dataclass(frozen=True)
class Support:
    """One kind of video here. Sizes are NVDEC's, in pixels as (width, height); None where NVDEC does not serve it."""

    codec: str
    chroma: str
    bits: int
    decoder: str
    """``nvdec``, ``cpu``, or ``none`` where this FFmpeg lacks the codec too."""
    reason: str | None
    """Why not NVDEC."""
    min_size: tuple[int, int] | None
    max_size: tuple[int, int] | None
    engines: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def software_decoder(codec: str) -> str | None:
    """The decoder of FFmpeg that serves a codec on the CPU path, None when this build has none."""
    import av

    from gpupipe.data.scan.demux import software_name

    name = software_name(codec)
    return name if name in av.codecs_available else None


def support_matrix(device: torch.device) -> list[Support]:
    """One row for each of :data:`KINDS`: what ``auto`` takes for it on this device, by the loader's own rule."""
    return [_row(codec, chroma, bits, device) for codec, chroma, bits in KINDS]


def _row(codec: str, chroma: str, bits: int, device: torch.device) -> Support:
    from gpupipe.data.decode import choose
    from gpupipe.device.inventory import nvdec_caps
    from gpupipe.types import VideoInfo

    pix_fmt = f"yuv{chroma.replace(':', '')}p{f'{bits}le' if bits > 8 else ''}"
    example = VideoInfo(
        path="", container="mp4", codec=codec, pix_fmt=pix_fmt, width=1280, height=720, frames=1, time_base=Fraction(1, 25),
        fps=25.0, start_seconds=0.0, duration_seconds=0.04, bit_depth=bits,
    )  # fmt: skip
    choice = choose(example, device)
    if choice.decoder == "nvdec":
        caps = nvdec_caps(device.index or 0, codec, chroma, bits)
        sizes = (caps.min_width, caps.min_height), (caps.max_width, caps.max_height)
        return Support(codec, chroma, bits, "nvdec", None, *sizes, caps.engines)
    if software_decoder(codec) is None:
        return Support(codec, chroma, bits, "none", f"{choice.reason}; this FFmpeg has no {codec} decoder", None, None, 0)
    return Support(codec, chroma, bits, "cpu", choice.reason, None, None, 0)
