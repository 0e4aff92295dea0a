"""The shortest use of gpupipe: point it at videos and iterate over batches.

    python samples/01_iterate.py path/to/videos
    python samples/01_iterate.py data/train.csv --device cpu

VIDEOS is a file, a folder, a glob pattern, or a table (.csv, .jsonl, .parquet) with a column "path".
"""

import argparse

from gpupipe import VideoLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Iterate over batches of clips.")
    parser.add_argument("videos", nargs="+", help="files, folders, patterns or tables")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=5, help="stop after so many (default: %(default)s)")
    options = parser.parse_args()

    loader = VideoLoader(
        options.videos if len(options.videos) > 1 else options.videos[0],
        clip={"frames": 16, "fps": 10},  # 16 frames, a tenth of a second apart, from a random start
        transform={"size": 112},  # random crop and flip, ImageNet's mean and deviation, bfloat16
        batch={"size": 4, "last": "partial"},
        device=options.device,
        seed=0,
    )
    with loader:
        for batch in loader:
            print(batch)
            for path, times in zip(batch.paths, batch["pts_seconds"].tolist(), strict=True):
                print(f"  {path}: {times[0]:.2f} s to {times[-1]:.2f} s")
            if batch.index + 1 == options.batches:
                break  # leaving early is fine: no thread stays behind
        for path, reason in loader.bad_files.items():
            print(f"could not use {path}: {reason}")


if __name__ == "__main__":
    main()
