"""DALI as its users run it: one pipeline that decodes, resizes, crops and normalises on the GPU, with prefetching on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_cases import MEAN, STD, Case, Draw, in_batches
from torch.utils.dlpack import from_dlpack

THREADS = 14
Node = Any
"""A tensor list in DALI's graph."""


class Dali:
    """One pipeline over all visits, in order; ``frames`` makes the node of their frames, (T, H, W, 3) uint8 RGB on the GPU."""

    def __init__(
        self, case: Case, draws: Sequence[Draw], device: torch.device, frames: Callable[[list[Draw], Path], Node]
    ) -> None:
        from nvidia.dali import Pipeline

        if device.type != "cuda":
            raise ValueError("these subjects decode on a GPU")
        self._folder = tempfile.TemporaryDirectory()
        self._batches = len(draws) // case.batch
        visits = [visit for group in in_batches(draws, case.batch) for visit in group]
        self._pipeline: Any = Pipeline(batch_size=case.batch, num_threads=THREADS, device_id=device.index or 0)
        with self._pipeline:
            self._pipeline.set_outputs(_finished(frames(visits, Path(self._folder.name)), case))
        self._pipeline.build()

    def batches(self) -> Iterator[torch.Tensor]:
        for _ in range(self._batches):
            (output,) = self._pipeline.run()
            batch = from_dlpack(output.as_tensor()).to(torch.bfloat16)
            torch.cuda.current_stream(batch.device).synchronize()  # the pipeline's memory is read to the end
            yield batch

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        del self._pipeline
        self._folder.cleanup()


def _finished(frames: Node, case: Case) -> Node:
    """What every subject owes, but in half precision: DALI has no bfloat16."""
    from nvidia.dali import fn, types

    small = fn.resize(frames, size=[case.size, case.size], mode="not_smaller", interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.crop_mirror_normalize(
        small, crop=(case.size, case.size), mean=[255 * value for value in MEAN], std=[255 * value for value in STD],
        dtype=types.FLOAT16, output_layout="CFHW",
    )  # fmt: skip


def decoders_video(case: Case, draws: Sequence[Draw], device: torch.device) -> Dali:
    """``fn.decoders.video``: takes whole files as bytes, and the first frame of each as an argument."""
    from nvidia.dali import fn

    def frames(visits: list[Draw], _: Path) -> Node:
        def batch() -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
            for group in in_batches(visits, case.batch):
                yield (
                    [np.fromfile(visit.path, np.uint8) for visit in group],
                    [np.array(visit.start, np.int32) for visit in group],
                )

        files, starts = fn.external_source(source=batch(), num_outputs=2, device="cpu")
        return fn.decoders.video(files, device="mixed", start_frame=starts, sequence_length=case.frames, stride=case.stride)

    return Dali(case, draws, device, frames)


def readers_video(case: Case, draws: Sequence[Draw], device: torch.device) -> Dali:
    """``fn.readers.video``, with a list of files and ranges of frames that hold one clip each."""
    from nvidia.dali import fn

    def frames(visits: list[Draw], folder: Path) -> Node:
        video, *_ = fn.readers.video(
            device="gpu", file_list=_list(case, visits, folder), file_list_frame_num=True,
            file_list_include_preceding_frame=True, sequence_length=case.frames, stride=case.stride, step=_span(case),
        )  # fmt: skip
        return video

    return Dali(case, draws, device, frames)


def experimental_readers_video(case: Case, draws: Sequence[Draw], device: torch.device) -> Dali:
    """``fn.experimental.readers.video``, with the same list."""
    from nvidia.dali import fn

    def frames(visits: list[Draw], folder: Path) -> Node:
        video, *_ = fn.experimental.readers.video(
            device="gpu", file_list=_list(case, visits, folder), file_list_format="frames", file_list_include_end=False,
            sequence_length=case.frames, stride=case.stride, step=_span(case), pad_mode="edge",
        )  # fmt: skip
        return video

    return Dali(case, draws, device, frames)


def _span(case: Case) -> int:
    """Frames from the first of a clip to its last, and one more."""
    return (case.frames - 1) * case.stride + 1


def _list(case: Case, visits: list[Draw], folder: Path) -> str:
    """The path of a list with a line for each visit: file, label, first frame, end."""
    lines = [
        f"{os.path.abspath(visit.path)} {number} {visit.start} {visit.start + _span(case)}"
        for number, visit in enumerate(visits)
    ]
    path = folder / "visits.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)
