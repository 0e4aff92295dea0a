"""Which decoder serves a video, from its facts and the machine's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpupipe.data.decode.dali import refusal
from gpupipe.device.inventory import nvdec_caps
from gpupipe.types import VideoInfo

if TYPE_CHECKING:
    import torch

Decoder = Literal["nvdec", "dali", "cpu"]
Mode = Literal["auto", "nvdec", "dali", "cpu"]

_EXACT = ("h264", "hevc", "vp8", "vp9")
"""Codecs whose standards fix every output bit, so that NVDEC and FFmpeg agree."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decoder and why not the one before it; ``reason`` is None where NVDEC serves, or DALI where it was asked for."""

    decoder: Decoder
    reason: str | None


def choose(info: VideoInfo, device: torch.device, mode: Mode = "auto") -> Choice:
    """The decoder for one video on ``device``: NVDEC where it gives the same bits as software decoding, else the CPU.

    DALI only where ``mode`` says so, and only for what it decodes to the same bits.
    """
    if mode == "dali":
        reason = refusal(info, device)
        return Choice("dali" if reason is None else "cpu", reason)
    reason = _why_not_nvdec(info, device, mode)
    return Choice("nvdec" if reason is None else "cpu", reason)


def _why_not_nvdec(info: VideoInfo, device: torch.device, mode: str) -> str | None:
    if mode == "cpu":
        return "decoder='cpu' was asked for"
    if device.type != "cuda":
        return "the device is the CPU"
    if info.interlaced:
        return "interlaced video: NVDEC would deinterlace it"
    if not info.uniform:
        return "its size or format changes in mid-stream: NVDEC would scale the rest to the first size"
    if not info.whole_start:
        return "its first frames refer to pictures that it has not got"
    if info.codec not in _EXACT:
        return f"{info.codec}: hardware and software need not agree to the bit"
    subsampling = re.match(r"yuvj?(4\d\d)p", info.pix_fmt)
    if subsampling is None:
        return f"NVDEC does not put out {info.pix_fmt}"
    chroma = ":".join(subsampling[1])
    if chroma == "4:2:0" and info.height % 2:
        return f"odd height {info.height}: PyNvVideoCodec's surfaces have no room for the last chroma row"
    caps = nvdec_caps(device.index or 0, info.codec, chroma, info.bit_depth)
    if not caps.supported:
        return caps.reason
    if not (caps.min_width <= info.width <= caps.max_width and caps.min_height <= info.height <= caps.max_height):
        return (
            f"{info.width}x{info.height} is outside this NVDEC's {caps.min_width}x{caps.min_height} to "
            f"{caps.max_width}x{caps.max_height} for {info.codec}"
        )
    return None
