"""Clips a second of whole loaders on random clips: decode, transform and batching, from files to tensors on the GPU.

    python benchmarks/bench_loader.py                              # all default cases and subjects, on the GPU
    python benchmarks/bench_loader.py --cases h264-1080p-g250-s1 --subjects gpupipe torchcodec-cuda-14t --runs 5
    python benchmarks/bench_loader.py --quick --out /tmp/results   # seconds, on the CPU: shows that it works

Every subject gets the same files in the same order with the same first frames, and owes the same batches: 8 clips of 16
frames, 224x224, bf16, normalised, on the device. Each run has file names of its own, so nothing that a subject remembers of a
file serves again; the clock runs from before the subject is set up until its last batch is ready. README.md has the contract.
"""

from __future__ import annotations

from clip_rates import be_quick, parser, run
from loader_subjects import SUBJECTS

CASES = ["h264-1080p-g250-s1", "h264-1080p-g250-s4", "h264-256p-g250-s1", "h264-256p-g250-s4"]
DEFAULT_SUBJECTS = [
    "gpupipe", "torchcodec-cuda-7t", "torchcodec-cuda-14t", "torchcodec-cpu-16t", "pynvvideocodec-simple-14t", "pyav-16t",
]  # fmt: skip


def main() -> None:
    options = parser("Clips a second of whole loaders on random clips.", CASES, SUBJECTS, DEFAULT_SUBJECTS).parse_args()
    if options.quick:
        be_quick(options, ["gpupipe", "pyav-16t"])
    run("loader", options, SUBJECTS)


if __name__ == "__main__":
    main()
