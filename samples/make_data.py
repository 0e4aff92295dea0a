"""Makes a small labelled set of clips to try gpupipe on: moving shapes, and the class is the motion.

    python samples/make_data.py data
    python samples/make_data.py data --train 10 --val 2 --seed 1

The folder then holds train.csv and val.csv with the columns path, label and motion, and the clips that they name. Any table
like these works with gpupipe: paths are relative to the table.
"""

import argparse
from pathlib import Path

from gpupipe.cli.demo_data import make_clips


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small labelled set of clips.")
    parser.add_argument("folder", type=Path, help="where the clips are put")
    parser.add_argument("--train", type=int, default=60, help="clips in each class to train on (default: %(default)s)")
    parser.add_argument("--val", type=int, default=20, help="clips in each class to validate on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the clips (default: %(default)s)")
    options = parser.parse_args()

    clips = make_clips(options.folder, seed=options.seed, train=options.train, val=options.val)
    print(f"{clips.train} and {clips.val}: classes {', '.join(clips.classes)}")


if __name__ == "__main__":
    main()
