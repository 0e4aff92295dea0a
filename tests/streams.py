"""Streams of every structure that the index and the plan must know, small and made here, to be compared bit by bit.

Each name says what is special: how pictures refer to each other, where a decode may start, what is hidden, how packets lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from clips import write_changing_sets, write_clip
from remux import (
    FRAGMENTED,
    Change,
    cut_start,
    ended_and_bare,
    ended_sequences,
    followed_by,
    hidden_start,
    joined,
    late_start,
    longer_sound,
    one_time,
    with_empty_packets,
    with_options,
    without_sync_samples,
)  # fmt: skip

WIDTH, HEIGHT, FRAMES = 192, 160, 72
"""Large enough for every NVDEC codec."""


@dataclass(frozen=True)
class Stream:
    """How to make one, and what becomes of it."""

    codec: str
    suffix: str = ".mp4"
    params: str = ""
    """Of x264 and x265."""
    options: dict[str, str] = field(default_factory=dict)
    bframes: int = 2
    gop: int = 24
    pix_fmt: str = "yuv420p"
    nvdec: bool = True
    """NVDEC decodes it on a Hopper GPU, to the bits of software."""
    change: Change | None = None
    """What becomes of the file that the encoder makes, an MP4 or, for VP8 and VP9, a WebM file."""
    frames: int = FRAMES
    """That a reader can deliver."""

    def make(self, folder: Path, name: str) -> Path:
        if self.change is None:
            return self._encode(folder / f"{name}{self.suffix}")
        plain = self._encode(folder / f"{name}-plain{'.webm' if 'vpx' in self.codec else '.mp4'}")
        return self.change(plain, folder / f"{name}{self.suffix}")

    def _encode(self, path: Path) -> Path:
        options = dict(self.options)
        if self.codec in ("libx264", "libx265"):
            key = "x264-params" if self.codec == "libx264" else "x265-params"
            quiet = "log-level=none" if self.codec == "libx264" else "log-level=none:pools=1"
            options[key] = ":".join(filter(None, [quiet, self.params]))
        return write_clip(
            path, self.codec, width=WIDTH, height=HEIGHT, frames=FRAMES, gop=self.gop,
            bframes=self.bframes, pix_fmt=self.pix_fmt, options=options,
        )  # fmt: skip


_LAYERS = (
    "ts_number_layers=3:ts_target_bitrate=100,200,300:ts_rate_decimator=4,2,1:ts_periodicity=4:ts_layer_id=0,2,1,2:"
    "ts_layering_mode=3"
)


def _layers(resilient: int) -> dict[str, str]:
    return {
        "deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0", "error-resilient": str(resilient),
        "b": "300k", "ts-parameters": _LAYERS,
    }  # fmt: skip


def _hidden(codec: str) -> Stream:
    options = {"b": "200k", "lag-in-frames": "16", "auto-alt-ref": "1", "deadline": "good", "cpu-used": "5"}
    return Stream(codec, ".webm", options=options, bframes=0)


_INTERLACED = {"flags": "+ilme+ildct"}
_OPEN = "open-gop=1:bframes=4:keyint=18:min-keyint=18:scenecut=0:b-adapt=0"


_CAVLC = Stream("libx264", params="cabac=0:8x8dct=0:bframes=2:keyint=12")
_RADL = "open-gop=0:keyint=18:min-keyint=18:bframes=4:radl=2:scenecut=0"


def _changing_sets(source: Path, target: Path) -> Path:
    return write_changing_sets(target.parent, "libx265" if "hevc" in target.name else "libx264").rename(target)


STREAMS: dict[str, Stream] = {
    # H.264: how B pictures refer to each other
    "h264_default": Stream("libx264"),
    "h264_pyramid_none": Stream("libx264", params="b-pyramid=none:bframes=3:keyint=30:b-adapt=0"),
    "h264_pyramid_strict": Stream("libx264", params="b-pyramid=strict:bframes=5:keyint=30:b-adapt=0"),
    "h264_pyramid_normal": Stream("libx264", params="b-pyramid=normal:bframes=7:keyint=30:ref=6:b-adapt=0"),
    "h264_ref16": Stream("libx264", params="ref=16:bframes=3:weightp=2:keyint=40:direct=temporal:weightb=1"),
    "h264_baseline": Stream("libx264", params="bframes=0:keyint=20:cabac=0", bframes=0),
    # H.264: where a decode may start
    "h264_open_gop": Stream("libx264", params="open-gop=1:bframes=4:keyint=18:min-keyint=18:scenecut=0"),
    "h264_intra_refresh": Stream("libx264", params="intra-refresh=1:keyint=20:bframes=0", bframes=0),
    "h264_intra_refresh_b": Stream("libx264", params="intra-refresh=1:keyint=20:bframes=2"),
    "h264_all_intra": Stream("libx264", params="keyint=1", bframes=0, gop=1),
    # H.264: how a picture lies in its packet
    "h264_slices": Stream("libx264", params="slices=4:bframes=3:keyint=25:aud=1:nal-hrd=vbr:vbv-maxrate=800:vbv-bufsize=800"),
    "h264_bluray": Stream(
        "libx264",
        params="bluray-compat=1:slices=4:bframes=3:keyint=24:open-gop=1:b-pyramid=strict:ref=4:aud=1:vbv-maxrate=8000:"
        "vbv-bufsize=8000",
    ),
    "h264_repeated_headers": Stream("libx264", params="repeat-headers=1:keyint=20"),
    "h264_mbaff": Stream("libx264", params="tff=1:bframes=3:keyint=20:b-pyramid=normal", options=_INTERLACED, nvdec=False),
    # H.264: containers
    "h264_ts": Stream("libx264", ".ts", params="b-pyramid=normal:bframes=7:keyint=30:ref=6:b-adapt=0"),
    "h264_mkv": Stream("libx264", ".mkv", params="b-pyramid=normal:bframes=7:keyint=30:ref=6:b-adapt=0"),
    "h264_flv": Stream("libx264", ".flv", params="keyint=24"),
    "h264_avi": Stream("libx264", ".avi", params="keyint=24:bframes=0", bframes=0),
    "h264_fragmented": Stream("libx264", change=with_options(options=FRAGMENTED)),
    "h264_live_mkv": Stream("libx264", ".mkv", change=with_options(options={"live": "1"})),
    "h264_mov": Stream("libx264", ".mov"),
    "h264_bare": Stream("libx264", ".h264", params="bframes=0", bframes=0, change=with_options(format="h264")),
    "h264_longer_sound": Stream("libx264", change=longer_sound),
    "h264_hidden_start": Stream("libx264", change=hidden_start, frames=FRAMES - 7),
    "h264_late_start": Stream("libx264", params=_OPEN, change=late_start, frames=54),
    "h264_late_start_ts": Stream("libx264", ".ts", params=_OPEN + ":repeat-headers=1", change=late_start, frames=54),
    "h264_cut_start_ts": Stream("libx264", ".ts", change=cut_start, frames=48),
    "h264_refresh_cut_ts": Stream(
        "libx264",
        ".ts",
        params="intra-refresh=1:keyint=20:repeat-headers=1",
        bframes=0,
        nvdec=False,
        change=cut_start,
        frames=42,
    ),
    "h264_changing_sets": Stream("libx264", change=_changing_sets, frames=80),
    "h264_two_configurations": Stream(
        "libx264",
        ".flv",
        params="keyint=12",
        frames=2 * FRAMES,
        nvdec=False,
        change=followed_by(lambda path: _CAVLC._encode(path)),
    ),
    "h264_avi_reordered": Stream("libx264", ".avi", params="bframes=3:keyint=24"),
    "h264_one_time": Stream("libx264", ".mkv", params=_OPEN, change=one_time),
    "h264_empty_packets": Stream("libx264", change=with_empty_packets),
    "h264_joined_ts": Stream("libx264", ".ts", params="repeat-headers=1", change=joined(900, 0, 400), frames=3 * FRAMES),
    "h264_wide_pixels": Stream("libx264", params="sar=4/3"),
    # H.264: samples that NVDEC has not on every chip
    "h264_10bit": Stream("libx264", pix_fmt="yuv420p10le", nvdec=False),
    "h264_422": Stream("libx264", pix_fmt="yuv422p", nvdec=False),
    "h264_444": Stream("libx264", pix_fmt="yuv444p", nvdec=False),
    # HEVC
    "hevc_default": Stream("libx265"),
    "hevc_open_gop": Stream("libx265", params="open-gop=1:keyint=18:min-keyint=18:bframes=4:scenecut=0"),
    "hevc_radl": Stream("libx265", params="open-gop=0:keyint=18:min-keyint=18:bframes=4:radl=2:scenecut=0"),
    "hevc_temporal_layers": Stream(
        "libx265", params="temporal-layers=3:bframes=7:keyint=30:b-adapt=0", options={"preset": "veryfast"}
    ),
    "hevc_pyramid": Stream("libx265", params="b-pyramid=1:bframes=8:ref=5:keyint=30:b-adapt=0", options={"preset": "veryfast"}),
    "hevc_intra_refresh": Stream("libx265", params="intra-refresh=1:keyint=20"),
    "hevc_slices": Stream("libx265", params="slices=2:aud=1:hrd=1:vbv-maxrate=800:vbv-bufsize=800:keyint=20:hash=1"),
    "hevc_repeated_headers": Stream("libx265", params="keyint=20:repeat-headers=1"),
    "hevc_ts": Stream("libx265", ".ts", params="keyint=20"),
    "hevc_ended_sequences": Stream("libx265", change=ended_sequences, frames=64),
    "hevc_hidden_start": Stream("libx265", params="open-gop=1:keyint=18:min-keyint=18", change=hidden_start, frames=FRAMES - 7),
    "hevc_late_start_ts": Stream("libx265", ".ts", params="open-gop=1:keyint=18:min-keyint=18", change=late_start, frames=54),
    "hevc_cut_start_ts": Stream("libx265", ".ts", params="keyint=18:min-keyint=18", change=cut_start, frames=54),
    "hevc_radl_start_ts": Stream("libx265", ".ts", params=_RADL + ":repeat-headers=1", change=late_start, frames=56),
    "hevc_ended_bare": Stream("libx265", ".hevc", change=ended_and_bare, frames=64),
    "hevc_joined_ts": Stream(
        "libx265", ".ts", params="open-gop=0:keyint=18:repeat-headers=1", change=joined(900, 0, 400), frames=3 * FRAMES
    ),
    "hevc_changing_sets": Stream("libx265", change=_changing_sets, frames=80),
    "hevc_10bit": Stream("libx265", pix_fmt="yuv420p10le"),
    "hevc_444": Stream("libx265", pix_fmt="yuv444p"),
    # VP9 and VP8: hidden pictures, temporal layers
    "vp9_default": Stream("libvpx-vp9", ".webm", bframes=0),
    "vp9_live": Stream("libvpx-vp9", ".webm", bframes=0, change=with_options(options={"live": "1"})),
    "vp9_hidden": _hidden("libvpx-vp9"),
    "vp9_layers": Stream("libvpx-vp9", ".webm", options=_layers(0), bframes=0),
    "vp9_layers_resilient": Stream("libvpx-vp9", ".webm", options=_layers(1), bframes=0),
    "vp8_hidden": _hidden("libvpx"),
    "vp8_layers": Stream("libvpx", ".webm", options=_layers(0), bframes=0),
    "vp8_layers_resilient": Stream("libvpx", ".webm", options=_layers(1), bframes=0),
    # Codecs that stay with software
    "mpeg2_b": Stream("mpeg2video", ".mpg", options={"b": "600k"}, gop=15, nvdec=False),
    "mpeg2_interlaced": Stream("mpeg2video", ".ts", options={"b": "900k", **_INTERLACED}, gop=12, nvdec=False),
    "mpeg2_cut_start_ts": Stream("mpeg2video", ".ts", options={"b": "600k"}, gop=12, nvdec=False, change=cut_start, frames=60),
    "mpeg1": Stream("mpeg1video", ".mpg", options={"b": "600k"}, gop=12, nvdec=False),
    "mpeg4_mp4": Stream("mpeg4", gop=30, nvdec=False),
    "mpeg4_no_keyframes": Stream("mpeg4", bframes=0, nvdec=False, change=without_sync_samples),
    "mpeg2_no_keyframes": Stream("mpeg2video", options={"b": "600k"}, bframes=0, nvdec=False, change=without_sync_samples),
    "qtrle_palette": Stream("qtrle", ".mov", pix_fmt="gray", bframes=0, nvdec=False),
    "mpeg4_avi": Stream("mpeg4", ".avi", gop=30, nvdec=False),
    "prores": Stream("prores", ".mov", pix_fmt="yuv422p10le", bframes=0, nvdec=False),
    "mjpeg": Stream("mjpeg", ".mov", pix_fmt="yuvj420p", bframes=0, nvdec=False),
    "ffv1": Stream("ffv1", ".mkv", bframes=0, nvdec=False),
    "wmv2": Stream("wmv2", ".wmv", bframes=0, nvdec=False),
    "flv1": Stream("flv", ".flv", bframes=0, nvdec=False),
    "msmpeg4": Stream("msmpeg4", ".avi", bframes=0, nvdec=False),
    "av1": Stream("libsvtav1", options={"preset": "12", "svtav1-params": "lp=1"}, bframes=0, nvdec=False),
}
