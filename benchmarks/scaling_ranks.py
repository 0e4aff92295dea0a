"""What a rank of bench_scaling.py does with the loader alone; started under torchrun with a part and its folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clip_rates import cpu_seconds, warm_up

from gpupipe import VideoLoader
from gpupipe.observe.measure import measure

Found = dict[str, Any]
Answer = Callable[[Found], None]


def join(device: str) -> torch.device:
    """Joins the group; this rank's device, ``cpu`` or the GPU of its number on this machine."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(own)
    return own


def loader_alone(given: Found, answer: Answer) -> None:
    """An epoch of each of ``videos``, as fast as the loader gives it: when it began and ended, and what that took."""
    device = join(given["device"])
    warm_up(device)
    runs = []
    for videos in given["videos"]:
        dist.barrier()
        cpu, begin = cpu_seconds(), time.time()
        with VideoLoader(videos, config=given["loader"], device=device) as loader:
            found = measure(loader)
            end = time.time()
            runs.append(
                {
                    "begin": begin,
                    "end": end,
                    "clips": found.clips,
                    "cpu_s": cpu_seconds() - cpu,
                    "nvdec_percent": found.resources.nvdec_percent_mean,
                    "host_bytes": found.resources.peak_host_bytes,
                    "device_bytes": found.resources.peak_device_bytes,
                }
            )
    answer({"runs": runs})
    dist.barrier()
    dist.destroy_process_group()


def resume(given: Found, answer: Answer) -> None:
    """Runs of the loader, each by a loader of its own, from ``state`` on for so many ``steps``: of each clip what it is and a
    hash of its pixels; and the state behind them."""
    device = join(given["device"])
    answer({"runs": [received(given, one["state"], one["steps"], device) for one in given["runs"]]})
    dist.barrier()
    dist.destroy_process_group()


def received(given: Found, state: Found, count: int, device: torch.device) -> Found:
    steps = []
    with VideoLoader(given["videos"], config=given["loader"], device=device, repeat=True) as loader:
        loader.load_state_dict(state)
        for batch in itertools.islice(loader, count):
            hashes = [hash_of(clip) for clip in batch.video]
            clips = zip(batch.clips, hashes, strict=True)
            steps.append([[one.request.epoch, one.request.sample, Path(one.path).name, made] for one, made in clips])
            state = dict(batch.state)
    return {"steps": steps, "state": state}


def hash_of(pixels: torch.Tensor) -> str:
    """Of the bits of a tensor."""
    return hashlib.blake2b(pixels.contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def answer_in(folder: Path) -> Answer:
    """Writes what this rank found to its file in the group's folder, whole or not at all."""

    def answer(found: Found) -> None:
        file = folder / f"rank{dist.get_rank()}.json"
        file.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        file.with_suffix(".part").rename(file)

    return answer


def task(folder: Path) -> Found:
    """What the group is to do."""
    found: Found = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    return found


PARTS: dict[str, Callable[[Found, Answer], None]] = {"loader": loader_alone, "resume": resume}

if __name__ == "__main__":
    PARTS[sys.argv[1]](task(Path(sys.argv[2])), answer_in(Path(sys.argv[2])))
