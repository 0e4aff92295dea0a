"""Clips a second over codecs, sizes, keyframe distances and strides: what decoding costs, with one small transform for all.

    python benchmarks/bench_decode.py                              # the main cases
    python benchmarks/bench_decode.py --sweep gop --append         # one factor around the base case; codec, size, stride, form
    python benchmarks/bench_decode.py --cases hevc-4k-g60-s8 --subjects gpupipe-nvdec torchcodec-cuda-14t --append
    python benchmarks/bench_decode.py --quick --out /tmp/results   # seconds, on the CPU: shows that it works

``gpupipe-nvdec`` decodes with NVDEC alone, ``gpupipe`` with processes that help it (``decode.cpu_workers="auto"``). What is
measured, and by which rules, is the same as in bench_loader.py.
"""

from __future__ import annotations

from clip_rates import Subjects, be_quick, parser, run
from loader_subjects import SUBJECTS, gpupipe

CASES = [
    "h264-1080p-g250-s1", "h264-1080p-g250-s4", "h264-256p-g250-s1", "h264-256p-g250-s4", "hevc-1080p-g250-s1",
    "hevc-1080p-g250-s4",
]  # fmt: skip
SWEEPS = {
    "codec": ["h264-1080p-g250-s1", "hevc-1080p-g250-s1", "vp9-1080p-g250-s1", "av1-1080p-g250-s1"],
    "size": ["h264-256p-g250-s1", "h264-720p-g250-s1", "h264-1080p-g250-s1", "h264-4k-g250-s1"],
    "gop": ["h264-1080p-g1-s1", "h264-1080p-g12-s1", "h264-1080p-g30-s1", "h264-1080p-g60-s1", "h264-1080p-g250-s1"],
    "stride": ["h264-1080p-g250-s1", "h264-1080p-g250-s4", "h264-1080p-g250-s8"],
    "form": [
        "h264-1080p-g250-s1-frame",
        "h264-1080p-g12-s1-frame",
        "h264-1080p-g1-s1-frame",
        "h264-1080p-g250-s1-whole",
        "hevc-1080p-g250-s1-whole",
        "h264-1080p-g250-s1-cold",
        "mixed-s1",
    ],
}
"""One factor at a time around h264-1080p-g250-s1."""
OURS: Subjects = {"gpupipe": gpupipe(cpu_workers="auto"), "gpupipe-nvdec": gpupipe(cpu_workers=0)}
BACKENDS: Subjects = {"gpupipe-dali": gpupipe(decoder="dali")}
ALL: Subjects = {**SUBJECTS, **OURS, **BACKENDS}
DEFAULT_SUBJECTS = [
    *OURS, "torchcodec-cuda-14t", "torchcodec-cpu-16t", "pynvvideocodec-simple-14t", "dali-decoders-video",
]  # fmt: skip
"""The best of each library: with them the main cases take eight minutes. ``--subjects`` names the others."""


def main() -> None:
    command = parser("Clips a second over codecs, sizes, keyframe distances and strides.", CASES, ALL, DEFAULT_SUBJECTS)
    command.set_defaults(budget=4.0, sources=3)
    command.add_argument("--sweep", choices=list(SWEEPS), help="the cases of one factor, in place of the main ones")
    options = command.parse_args()
    if options.sweep:
        options.cases = SWEEPS[options.sweep]
    if options.quick:
        be_quick(options, ["gpupipe", "gpupipe-nvdec", "pyav-16t"])
    run("decode", options, ALL)


if __name__ == "__main__":
    main()
