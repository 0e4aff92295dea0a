"""Epochs begun and left at random, in every way there is: none may hang, and none may leave a thread.

``GPUPIPE_RUNS=10000`` makes as many runs; by default there are a few, so that every test run has its share.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupipe import Batch, VideoLoader
from gpupipe.errors import ClosedError

RUNS = int(os.environ.get("GPUPIPE_RUNS", "60"))
HANGS_SECONDS = 150.0


@pytest.fixture(autouse=True)
def told_where_it_hangs() -> Iterator[None]:
    yield
    faulthandler.cancel_dump_traceback_later()


def loader_of(chance: random.Random, paths: list[str]) -> VideoLoader:
    buckets = chance.choice([None, None, {"frames": [2, 4]}])
    options: dict[str, Any] = {
        "batch": {"size": chance.randint(1, 4), "last": chance.choice(["drop", "partial", "fill"]), "buckets": buckets},
        "decode": {"threads": chance.randint(1, 4)},
        "jitter": {"depth": chance.choice(["auto", 1, 2, 7]), "in_order": chance.random() < 0.8},
        "cache": {"read_ahead": chance.choice([0, 0, 8])},
        "on_bad_file": chance.choice(["substitute", "skip"]),
        "repeat": chance.random() < 0.2,
        "seed": chance.randint(0, 99),
    }
    return VideoLoader(
        chance.choices(paths, k=12), clip={"frames": 2}, transform={"size": 8, "dtype": "float32"}, device="cpu", **options
    )


def some(chance: random.Random, iterator: Iterator[Batch]) -> None:
    for _ in range(chance.choice([0, 0, 1, 2, 5])):
        if next(iterator, None) is None:
            break


def leave(chance: random.Random, loader: VideoLoader) -> None:
    """One epoch, begun, and left in one of the ways there are."""
    iterator = iter(loader)
    way = chance.choice(["drop", "close", "close the loader", "next epoch", "error", "from another thread", "collected", "end"])
    if way == "from another thread":
        other = threading.Thread(target=lambda: (time.sleep(chance.random() * 0.01), loader.close()))
        other.start()
        try:
            for _ in range(1000):
                next(iterator)
        except (ClosedError, StopIteration):
            pass
        other.join()
        return
    some(chance, iterator)
    if way == "close":
        iterator.close()
    elif way == "close the loader":
        loader.close()
    elif way == "next epoch":
        some(chance, iter(loader))
    elif way == "error":
        try:
            for _ in iterator:
                raise KeyError
        except KeyError:
            pass
    elif way == "collected":
        ring: list[Any] = [iterator]
        ring.append(ring)
        del ring, iterator
        gc.collect()
    elif way == "end" and not loader.config.repeat:
        for _ in iterator:
            pass


@pytest.mark.timeout(0)  # each run has its own
def test_no_run_hangs_and_none_leaves_a_thread(clips: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    paths = [*(str(clips[name]) for name in ("h264", "vp9_odd", "mpeg4", "h264_odd")), str(bad)]
    seed = random.randrange(10**9)
    for run in range(RUNS):
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        chance = random.Random(f"{seed} {run}")
        try:
            with loader_of(chance, paths) as loader:
                for _ in range(chance.randint(1, 3)):
                    try:
                        leave(chance, loader)
                    except ClosedError:
                        break
        except Exception as error:
            error.add_note(f"seed {seed}, run {run}")
            raise
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]
        assert not left, (seed, run, left)
